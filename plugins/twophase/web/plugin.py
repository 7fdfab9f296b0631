"""The Airflow plugin: it tells Airflow where the pages of the commit table are; `twophase_plugin` loads it.

Airflow imports this in every component and every task, so it only defines the class. The pages, and FastAPI with them,
are imported when the api-server asks for its apps; no other component does.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from airflow.plugins_manager import AirflowPlugin

#: Below Airflow's own address.
PREFIX = "/twophase"


#: A tick in a circle, in colours that show on light, on dark, and on the bar's own mark of where one is.
ICON = "data:image/svg+xml," + quote(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" fill="none" stroke-width="2.4" stroke="white"'
    ' stroke-linecap="round" stroke-linejoin="round"><circle cx="12" cy="12" r="10" fill="#2a9d5c" stroke="none"/>'
    '<path d="m7.5 12.5 3 3 6-7"/></svg>'
)


class TwophasePlugin(AirflowPlugin):
    """The commit table: in the navigation, and on each DAG that runs a pipeline."""

    name = "twophase"

    #: Relative, so that they are right below any base URL of Airflow.
    external_views: list[Any] = [  # noqa: RUF012 - Airflow's own kind of attribute
        {
            "name": "Commits",
            "href": f"{PREFIX.lstrip('/')}/",
            "destination": "nav",
            "nav_top_level": True,
            "url_route": "twophase",
            "icon": ICON,
        },
        {
            "name": "Commits",
            "href": f"{PREFIX.lstrip('/')}/dags/{{DAG_ID}}",
            "destination": "dag",
            "url_route": "twophase-commits",
            "icon": ICON,
        },
    ]

    @property
    def fastapi_apps(self) -> list[Any]:  # type: ignore[override]
        """Return the pages; only the api-server asks."""
        from twophase.web.app import app

        return [{"app": app(), "url_prefix": PREFIX, "name": "Twophase"}]
