"""The commit table as people meet it: in Airflow's navigation and on a DAG, walked in headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect, sync_playwright

from support.pipelines import showcase
from support.servers import chromium
from support.servers.airflow import AirflowServer
from twophase.committer.record import PostgresRecord
from twophase.local import postgres
from twophase.local.airflow_client import ApiError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, FrameLocator, Page

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(600)]

#: As root, without a GPU, and without calls to its maker.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DAG = """
from airflow.sdk import DAG, task

with DAG("pages_orders", schedule=None):

    @task
    def stage():
        pass

    stage()
"""


@pytest.fixture(scope="module")
def shown(airflow: AirflowServer) -> AirflowServer:
    """Return the Airflow of the session, with a DAG, and with what it would have committed in the record."""
    airflow.wait_until_healthy()
    airflow.add_dag("pages_orders.py", DAG)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TWOPHASE_HOME", str(airflow.home))
        dsn = postgres.running()
    assert dsn
    record = PostgresRecord.open(dsn, who="test")
    showcase.fill(record, "pages_orders", "pages_orders")
    showcase.enter(record, "pages_scratch", None)
    record.engine.dispose()
    return airflow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium, or say what is missing."""
    found = chromium.find()
    if found is None:
        pytest.skip(chromium.MISSING)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def context(browser: Browser, shown: AirflowServer) -> Iterator[BrowserContext]:
    """Return a browser that is signed in as the viewer."""
    made = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    made.set_default_timeout(60_000)
    made.add_cookies([{"name": "_token", "value": shown.token("viewer"), "url": shown.url}])
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, tmp_path: Path) -> Iterator[Page]:
    """Return a page whose requests all go to Airflow."""
    made = context.new_page()
    yield made
    made.screenshot(path=tmp_path / "last.png")


def frame(page: Page) -> FrameLocator:
    """Return the frame in which Airflow shows the pages."""
    return page.frame_locator('iframe[title="Commits"]')


def test_the_table_is_found_by_the_navigation_and_walked_to_a_checkpoint(page: Page, shown: AirflowServer) -> None:
    page.goto(shown.url)
    page.get_by_role("link", name="Commits").first.click()
    inside = frame(page)
    inside.get_by_role("link", name="pages_orders", exact=True).first.click()
    inside.get_by_role("link", name="8", exact=True).click()

    expect(inside.get_by_role("heading", name="Checkpoint 8")).to_be_visible()
    expect(inside.get_by_text("promoted to lake, mart")).to_be_visible()
    expect(page).to_have_url(re.compile(r"/plugin/twophase/twophase/pipelines/pages_orders/checkpoints/8"))


def test_a_dag_shows_the_checkpoints_of_its_pipeline(page: Page, shown: AirflowServer) -> None:
    page.goto(f"{shown.url}/dags/pages_orders")
    page.locator('a[href$="/plugin/twophase-commits"]').click()

    inside = frame(page)
    expect(inside.get_by_role("heading", name="pages_orders")).to_be_visible()
    expect(inside.get_by_text(showcase.PARKED).first).to_be_visible()


def test_a_link_to_a_dag_leaves_the_frame(page: Page, shown: AirflowServer) -> None:
    """Airflow's frame may not be left by a link; the page has the window around it open Airflow's own page."""
    page.goto(f"{shown.url}/plugin/twophase")
    inside = frame(page)
    inside.locator("tr", has_text="pages_orders").locator("a[data-airflow]").click()

    page.wait_for_url(f"{shown.url}/dags/pages_orders**")
    expect(page.locator("iframe")).to_have_count(0)


def test_the_filter_leaves_one_state(page: Page, shown: AirflowServer) -> None:
    page.goto(f"{shown.url}/twophase/pipelines/pages_orders")
    page.get_by_role("link", name="superseded", exact=True).click()

    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody .badge")).to_have_text("SUPERSEDED")


@pytest.mark.parametrize("width", [1280, 880, 740, 390])
@pytest.mark.parametrize("path", ["/", "/pipelines/pages_orders", "/pipelines/pages_orders/checkpoints/9"])
def test_a_page_is_as_wide_as_the_screen(page: Page, shown: AirflowServer, path: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(f"{shown.url}/twophase{path}")

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_and_dark_follow_airflow_and_else_the_browser(page: Page, shown: AirflowServer) -> None:
    seen = []
    for scheme, chosen in (("light", None), ("dark", None), ("light", "dark"), ("dark", "light")):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        page.goto(f"{shown.url}/twophase/")
        page.evaluate("theme => theme ? localStorage.setItem('theme', theme) : localStorage.clear()", chosen)
        page.reload()
        seen.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light, dark = seen[:2]
    assert seen == [light, dark, dark, light]
    assert light != dark


def test_the_browser_asks_nobody_but_airflow_and_refuses_nothing(page: Page, shown: AirflowServer) -> None:
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    for path in ("/", "/pipelines/pages_orders", "/pipelines/pages_orders/checkpoints/1"):
        page.goto(f"{shown.url}/twophase{path}")

    assert {url.startswith(shown.url) for url in asked} == {True}
    assert said == []


# --- roles of the simple auth manager --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/twophase/", {None: 401, "viewer": 200, "admin": 200}),
        ("/twophase/dags/pages_orders", {None: 401, "viewer": 200, "admin": 200}),
        ("/twophase/pipelines/pages_orders", {None: 401, "viewer": 200, "admin": 200}),
        ("/twophase/pipelines/pages_scratch", {None: 401, "viewer": 200, "admin": 200}),
        ("/twophase/pipelines/pages_nowhere", {None: 401, "viewer": 404, "admin": 404}),
        ("/twophase/pipelines/pages_orders/checkpoints/1", {None: 401, "viewer": 200, "admin": 200}),
    ],
)
def test_a_role_is_answered_as_the_table_says(shown: AirflowServer, path: str, expected: dict[str | None, int]) -> None:
    def status(user: str | None) -> int:
        try:
            shown.api("GET", path, user=user)
        except ApiError as refused:
            return refused.status
        return 200

    assert {user: status(user) for user in expected} == expected
