"""The client of Airflow's API where there is no Airflow; what it does with one is in tests/airflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from twophase.core.errors import StoreUnavailable
from twophase.local import stack
from twophase.local.airflow_client import Client


def test_an_airflow_that_is_not_there_is_unavailable_and_named() -> None:
    url = f"http://127.0.0.1:{stack.free_port()}"

    with pytest.raises(StoreUnavailable, match=f"{url} does not answer"):
        Client(url, Path()).api("GET", "dags", user=None)
