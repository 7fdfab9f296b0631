"""A sender for an HTTP service that keeps the ids of rows: with `idempotent=True` each row takes effect there once."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from twophase.core import connections
from twophase.sinks import Sender

if TYPE_CHECKING:
    from datetime import datetime

UNAVAILABLE = 503


class HttpSender(Sender):
    """Posts rows as JSON lists. The service answers 2xx once it has kept them and their ids, in one transaction."""

    def __init__(self, url: str, *, conn_id: str | None = None, batch: int = 500, seconds: float = 30.0) -> None:
        """Post to an address, with login and password of a connection if one is named."""
        self.url = url
        self.batch = batch
        self.seconds = seconds
        self.headers = {"Content-Type": "application/json"}
        if conn_id is not None:
            found = connections.required(conn_id)
            login = base64.b64encode(f"{found.login or ''}:{found.password or ''}".encode()).decode()
            self.headers["Authorization"] = f"Basic {login}"

    def send_values(self, rows: Iterator[dict[str, Any]], checkpoint_id: int, timestamp: datetime) -> bool:  # noqa: ARG002 - the ids say all
        """Post every row; return False if the service is down for now (503), raise on any other error."""
        while batch := list(islice(rows, self.batch)):
            body = json.dumps(batch, default=str).encode()
            request = urllib.request.Request(self.url, body, self.headers)  # noqa: S310 - the declared address
            try:
                with urllib.request.urlopen(request, timeout=self.seconds):  # noqa: S310 - likewise
                    pass
            except urllib.error.HTTPError as error:
                if error.code == UNAVAILABLE:
                    return False
                raise
        return True
