"""The commit table on a real api-server with rights per DAG (FAB): who sees what, and what the pages say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape

import pytest
from sqlalchemy import make_url

from support.pipelines import showcase
from support.servers.api_server import FAB, ApiServer, folder
from support.servers.postgres import administer, database
from twophase.committer.record import PostgresRecord

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(600)]

#: Who asks: everybody here may read DAG runs; `reader` those of one DAG that runs `orders`, `stranger` of another DAG.
RUNS = ("can_read", "DAG Runs")
USERS = {
    "admin": ("Admin", []),
    "viewer": ("Viewer", []),
    "reader": ("readers", [RUNS, ("can_read", "DAG:shared")]),
    "stranger": ("strangers", [RUNS, ("can_read", "DAG:somebody_elses")]),
    "nothing": ("nobodies", [("can_read", "Website")]),
}
#: Route of the app → example → status for nobody, no rights, of another DAG, of its DAG, viewer, admin.
WHO = (None, "nothing", "stranger", "reader", "viewer", "admin")
TABLE = {
    "/": {"/": (401, 403, 200, 200, 200, 200)},
    "/dags/{dag_id}": {
        "/dags/orders": (401, 403, 403, 403, 200, 200),
        "/dags/shared": (401, 403, 403, 200, 200, 200),
        "/dags/somebody_elses": (401, 403, 200, 403, 200, 200),
        "/dags/not_there": (401, 403, 403, 403, 200, 200),
    },
    "/pipelines/{pipeline}": {
        "/pipelines/orders": (401, 403, 403, 200, 200, 200),
        "/pipelines/secret": (401, 403, 200, 403, 200, 200),
        "/pipelines/scratch": (401, 403, 403, 403, 200, 200),
        "/pipelines/not_there": (401, 403, 403, 403, 404, 404),
        "/pipelines/orders?dag_id=somebody_elses": (401, 403, 403, 403, 200, 200),
        "/pipelines/orders?state=NONE": (401, 403, 403, 422, 422, 422),
    },
    "/pipelines/{pipeline}/checkpoints/{checkpoint_id}": {
        "/pipelines/orders/checkpoints/9": (401, 403, 403, 200, 200, 200),
        "/pipelines/orders/checkpoints/999": (401, 403, 403, 404, 404, 404),
        "/pipelines/orders/checkpoints/9?revision=7": (401, 403, 403, 404, 404, 404),
        "/pipelines/secret/checkpoints/1": (401, 403, 404, 403, 404, 404),
        f"/pipelines/orders/checkpoints/{2**63}": (401, 403, 403, 422, 422, 422),
    },
}

LEFT = "1 left by a run that has ended"

ROUTES = """
import json
from twophase.web.app import router
print(json.dumps([route.path for route in router.routes]))
"""


@pytest.fixture(scope="module")
def dsn_of_record(server: str) -> Iterator[str]:
    """Return a record with something of everything in it, and one pipeline with a history of several pages."""
    with database(server) as made:
        showcase.fill_everything(made)
        record = PostgresRecord.open(made)
        showcase.fill_many(record, "long", 120)
        record.engine.dispose()
        yield made


@pytest.fixture(scope="module")
def pages(server: str, dsn_of_record: str) -> Iterator[ApiServer]:
    """Start an api-server whose users have rights per DAG."""
    name = f"airflow_{make_url(dsn_of_record).database}"
    place = server.rpartition("/")[0]
    administer(f"{place}/postgres", f"CREATE DATABASE {name}")
    with folder() as home:
        made = ApiServer(home, f"{place}/{name}", dsn_of_record, AIRFLOW__CORE__AUTH_MANAGER=FAB)
        made.airflow("db", "migrate")
        made.add_users(USERS)
        with made.running():
            yield made
    administer(f"{place}/postgres", f"DROP DATABASE {name} WITH (FORCE)")


def text_of(html: str) -> str:
    """Return what a page says, without its markup."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


# --- access ----------------------------------------------------------------------------------------------------------


def test_every_route_has_its_row_in_the_table(pages: ApiServer) -> None:
    routes = json.loads(pages.airflow(program=("-c", ROUTES)).splitlines()[-1])

    assert sorted(routes) == sorted(TABLE)


def test_every_page_answers_each_user_as_the_table_says(pages: ApiServer) -> None:
    found = {
        path: tuple(pages.get(f"/twophase{path}", who).status for who in WHO)
        for examples in TABLE.values()
        for path in examples
    }

    assert found == {path: expected for examples in TABLE.values() for path, expected in examples.items()}


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/static/style.css", "/../etc"])
def test_nothing_else_is_served(pages: ApiServer, path: str) -> None:
    assert pages.get(f"/twophase{path}", "admin").status == 404


def test_a_token_that_is_none_is_refused(pages: ApiServer) -> None:
    pages._tokens["forger"] = "ey.no.token"

    assert pages.get("/twophase/", "forger").status == 403


@pytest.mark.parametrize(
    ("who", "seen"),
    [
        ("admin", ["daily_totals", "growing", "long", "orders", "scratch", "secret", "waiting"]),
        ("viewer", ["daily_totals", "growing", "long", "orders", "scratch", "secret", "waiting"]),
        ("reader", ["orders"]),
        ("stranger", ["secret"]),
    ],
)
def test_the_list_has_the_pipelines_of_the_dags_that_one_may_read(pages: ApiServer, who: str, seen: list[str]) -> None:
    page = pages.get("/twophase/", who).text

    assert re.findall(r'<td class="title"><a href="/twophase/pipelines/(\w+)"', page) == seen


def test_who_may_not_see_a_pipeline_is_not_told_whether_it_is_there(pages: ApiServer) -> None:
    there, not_there = (pages.get(f"/twophase/pipelines/{name}", "stranger") for name in ("orders", "not_there"))

    assert there.text == not_there.text


# --- what the pages say ----------------------------------------------------------------------------------------------


def test_the_list_says_what_was_last_and_what_needs_somebody(pages: ApiServer) -> None:
    said = text_of(pages.get("/twophase/", "admin").text)

    given = r"lake 1,200 in 4 files, 96.4 kB mart 1,200 in 4 files, 96.4 kB"
    assert re.search(rf"daily_totals checkpoint 1 .{{1,20}} ago {given} 1 COMMITTED fine 0 0 1 daily_totals", said)
    failing = re.escape(f"1 parked, a person is needed 2 failures in a row 1 failed slot {showcase.FAILED}")
    assert re.search(rf"orders checkpoint 8 .{{1,20}} ago {given} 13 OPEN {failing} {LEFT} 4 1 0 orders , shared", said)
    assert "scratch record is behind none yet 0 0 0 not run by Airflow yet" in said


def test_a_parked_revision_is_told_with_the_command_that_fits(pages: ApiServer) -> None:
    for path in ("/pipelines/orders", "/pipelines/orders/checkpoints/9"):
        said = text_of(pages.get(f"/twophase{path}", "viewer").text)

        assert showcase.PARKED in said
        assert "twophase restage orders 9 --reason …" in said


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "3 COMMITTED archive lacks checkpoints 1..2 0 0 0 growing"),
        ("/pipelines/growing", "orders → lake archive · mart, not declared any more, up to checkpoint 2 "),
        ("/pipelines/growing", "archive is not whole It takes part from checkpoint 3 on"),
        (
            "/pipelines/growing",
            "checkpoints 1..2 not there. A backfill fills it: twophase backfill growing --checkpoints 1..2 ",
        ),
        ("/pipelines/growing/checkpoints/2", "archive has nothing of it The write was added or moved later."),
        ("/pipelines/growing/checkpoints/2", "A backfill fills it: twophase backfill growing --checkpoints 2 "),
        ("/pipelines/orders/checkpoints/1", "r2 COMMITTED"),
        ("/pipelines/orders/checkpoints/1?revision=1", "r1 SUPERSEDED"),
        ("/pipelines/orders/checkpoints/10", f"{showcase.FAILED} The next run takes its input again."),
        ("/pipelines/orders/checkpoints/10", "twophase release orders 10 --reason …"),
        ("/pipelines/orders/checkpoints/11", "twophase recover orders"),
        (
            "/pipelines/orders/checkpoints/12",
            "Recovery would abort it; to commit it, twophase commit orders 12 --reason …",
        ),
        ("/pipelines/orders", f"Last failure {showcase.FAILED}"),
        ("/pipelines/waiting", "Slot 2026-11-02 → 2026-11-03 waits waiting for input: /landing/dt=2026-11-02"),
        ("/pipelines/waiting", "Slot 2026-11-01 → 2026-11-02 could not begin InputMissing: nothing there"),
        ("/pipelines/orders/checkpoints/13", "A run works on it"),
        ("/pipelines/daily_totals/checkpoints/1", "orders/1 was r1 and is r2 now."),
        ("/pipelines/daily_totals/checkpoints/1", "twophase backfill daily_totals --checkpoints 1"),
        ("/pipelines/scratch", "No checkpoint yet"),
        ("/pipelines/scratch", "No run begins: sink 'lake' was given commit_seq 9"),
        ("/pipelines/scratch", "See what it has forgotten, and record it again: twophase reconcile scratch"),
        ("/pipelines/orders?state=SUPERSEDED", "1 r1 SUPERSEDED"),
        ("/pipelines/secret?state=OPEN", "Nothing is open"),
        ("/dags/not_there", "No pipeline has been run by this DAG yet."),
    ],
)
def test_a_page_says(pages: ApiServer, path: str, expected: str) -> None:
    assert expected in text_of(pages.get(f"/twophase{path}", "admin").text)


def test_one_checkpoint_is_shown_whole(pages: ApiServer) -> None:
    said = text_of(pages.get("/twophase/pipelines/orders/checkpoints/2", "admin").text)

    for part in (
        "slot 2026-11-02 → 2026-11-03",
        "rows 1,200",
        "12 files, 216.1 kB",
        "2026-11-02/orders-00.json",
        "… and 2 more",
        "lake sink yes 1 1,200 4 96.4 kB",
        f"row_count audit yes 1 {showcase.AUDIT}",
        "PRECOMMITTED 3 of 3 voted yes",
        "COMMITTED promoted to lake, mart",
    ):
        assert part in said


def test_a_run_leads_to_airflows_own_page_of_it(pages: ApiServer) -> None:
    page = pages.get("/twophase/pipelines/orders/checkpoints/2", "admin").text

    assert 'href="/dags/orders/runs/scheduled__2026-11-02T00%3A00%3A00Z"' in page


def test_the_page_of_a_dag_is_that_of_its_only_pipeline(pages: ApiServer) -> None:
    answer = pages.get("/twophase/dags/shared", "reader", follow=False)

    assert (answer.status, answer.headers["location"]) == (303, "/twophase/pipelines/orders")


def test_paging_shows_every_revision_once_newest_first(pages: ApiServer) -> None:
    path, seen, lengths = "/twophase/pipelines/long", [], []
    while path:
        page = pages.get(path, "admin").text
        found = [int(number) for number in re.findall(r"/checkpoints/(\d+)\?revision=1", page)]
        seen += found
        lengths.append(len(found))
        older = re.search(r'rel="next" href="([^"]+)"', page)
        path = unescape(older[1]) if older else ""

    assert seen == list(range(120, 0, -1))
    assert lengths == [50, 50, 20]


def test_a_page_loads_nothing_from_anywhere(pages: ApiServer) -> None:
    for examples in TABLE.values():
        for path in examples:
            answer = pages.get(f"/twophase{path}", "admin")

            assert not re.findall(r'(?:src|href|action)="(?!/)[^"]*"|@import|url\(', answer.text)
            assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")


# --- no record -------------------------------------------------------------------------------------------------------


@contextmanager
def changed(server: str, there: str, back: str) -> Iterator[None]:
    """Change the committer's server while a page is asked for."""
    administer(f"{server.rpartition('/')[0]}/postgres", *there.split(";"))
    try:
        yield
    finally:
        administer(f"{server.rpartition('/')[0]}/postgres", *back.split(";"))


def test_a_database_that_does_not_answer_is_told_in_one_line(pages: ApiServer, server: str, dsn_of_record: str) -> None:
    name, password = make_url(dsn_of_record).database, make_url(dsn_of_record).password
    closed = f"ALTER DATABASE {name} ALLOW_CONNECTIONS false; {terminate(str(name))}"

    with changed(server, closed, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"):
        answer = pages.get("/twophase/pipelines/orders", "viewer")

    assert answer.status == 503
    assert "it does not answer; check connection twophase_committer" in text_of(answer.text)
    assert str(password) not in answer.text
    assert "Traceback" not in answer.text
    assert pages.get("/twophase/pipelines/orders", "viewer").status == 200


def test_a_record_that_is_not_made_is_told_with_the_command_that_makes_it(pages: ApiServer, dsn_of_record: str) -> None:
    administer(dsn_of_record, "ALTER SCHEMA twophase RENAME TO aside")
    try:
        answer = pages.get("/twophase/", "viewer")
    finally:
        administer(dsn_of_record, "ALTER SCHEMA aside RENAME TO twophase")

    assert answer.status == 503
    assert "found none; run `twophase db upgrade`" in text_of(answer.text)


def test_a_server_that_was_started_again_is_not_noticed(pages: ApiServer, server: str, dsn_of_record: str) -> None:
    before = pages.get("/twophase/", "viewer").status
    administer(f"{server.rpartition('/')[0]}/postgres", terminate(str(make_url(dsn_of_record).database)))

    assert (before, pages.get("/twophase/", "viewer").status) == (200, 200)


def terminate(database_name: str) -> str:
    return f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{database_name}'"
