"""The pages of the commit table, as a FastAPI app that Airflow's api-server mounts at /twophase.

They only read. Each page is made on the server from one or a few indexed queries. No asset comes from another server;
each page's content security policy makes the browser refuse any that would.
"""

import base64
import hashlib
from collections import Counter
from collections.abc import Collection
from functools import cache
from pathlib import Path as Folder
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from sqlalchemy import Connection
from starlette.exceptions import HTTPException as AnyHTTPException

from twophase.cli.manual_decisions import standing
from twophase.committer import queries, writes
from twophase.core.errors import ConfigError
from twophase.core.next_step import advise, is_left
from twophase.core.states import State
from twophase.web import page_text
from twophase.web.access import MAY_READ_RUNS, OnePipeline, VisiblePipelines
from twophase.web.airflow_runs import has_ended
from twophase.web.plugin import PREFIX
from twophase.web.record_session import Unavailable, reading

TEMPLATES = Folder(__file__).parent / "templates"
STYLE, SCRIPT = TEMPLATES / "style.css", TEMPLATES / "page.js"
#: Revisions on one page of a listing.
PAGE = 50
#: Parked revisions that a pipeline's page names; the listing has all of them.
PARKED = 5

Id = Annotated[int, Path(ge=1, lt=2**63)]
Revision = Annotated[int | None, Query(ge=0, lt=2**31)]
DagId = Annotated[str, Path(pattern=r"^[^\x00]+$")]
#: `checkpoint.revision` of the last one on the page before.
Before = Annotated[str | None, Query(pattern=r"^\d{1,18}\.\d{1,9}$")]

router = APIRouter(dependencies=[MAY_READ_RUNS], default_response_class=HTMLResponse)


@cache
def app() -> FastAPI:
    """Return the app with the pages only, without FastAPI's own documentation, which would be open to everybody."""
    made = FastAPI(title="Twophase", openapi_url=None, docs_url=None, redoc_url=None)
    made.include_router(router)
    made.add_exception_handler(Unavailable, _unavailable)
    made.add_exception_handler(ConfigError, _not_there)
    made.add_exception_handler(RequestValidationError, _no_such_page)
    made.add_exception_handler(AnyHTTPException, _refused)
    return made


# --- pages -----------------------------------------------------------------------------------------------------------


@router.get("/")
def pipelines(request: Request, visible: VisiblePipelines) -> Response:
    """List the pipelines that the user may see."""
    with reading() as connection:
        found = _overview(connection, visible)
        links = queries.dags(connection)
    return _page(request, "pipelines.html", pipelines=found, dags=links, dag_id=None)


@router.get("/dags/{dag_id}")
def of_a_dag(request: Request, dag_id: DagId) -> Response:
    """Show the pipeline that a DAG runs, or list them if there are several."""
    with reading() as connection:
        names = queries.pipelines_of(connection, dag_id)
        if len(names) == 1:
            return RedirectResponse(f"{_base(request)}/pipelines/{names[0]}", 303)
        found = _overview(connection, names)
        links = {name: queries.dags_of(connection, name) for name in names}
    return _page(request, "pipelines.html", pipelines=found, dags=links, dag_id=dag_id)


@router.get("/pipelines/{pipeline}")
def checkpoints(request: Request, pipeline: OnePipeline, state: State | None = None, before: Before = None) -> Response:
    """List a pipeline's checkpoints, newest first, every revision a row."""
    after = (int(before.split(".")[0]), int(before.split(".")[1])) if before else None
    with reading() as connection:
        found = queries.checkpoints(connection, pipeline, state=state, before=after, limit=PAGE + 1)
        (summary,) = _overview(connection, [pipeline])
        pending = queries.pending(connection, pipeline) if summary["parked"] else []
        unbegun = queries.unbegun(connection, pipeline, PARKED)
        links = queries.dags_of(connection, pipeline)
        declared = queries.declaration(connection, pipeline)
        dropped = writes.dropped(connection, pipeline)
    parked = [{**row, "advice": advise(standing(row))} for row in pending if row["parked_reason"]]
    last = found[PAGE - 1] if len(found) > PAGE else None
    return _page(
        request,
        "pipeline.html",
        pipeline=pipeline,
        summary=summary,
        parked=parked[:PARKED],
        unbegun=unbegun,
        checkpoints=found[:PAGE],
        state=state,
        states=list(State),
        before=before,
        older=f"{last['checkpoint_id']}.{last['revision']}" if last else None,
        dags=links,
        declared=declared,
        dropped=dropped,
    )


@router.get("/pipelines/{pipeline}/checkpoints/{checkpoint_id}")
def checkpoint(request: Request, pipeline: OnePipeline, checkpoint_id: Id, revision: Revision = None) -> Response:
    """Show one checkpoint whole: the newest of its revisions, or the given one."""
    with reading() as connection:
        found = queries.show(connection, pipeline, checkpoint_id, revision)
        revisions = queries.revisions(connection, pipeline, checkpoint_id)
        pending = queries.pending(connection, pipeline, checkpoint_id)
        stale = queries.stale(connection, pipeline, checkpoint_id)
    mine = next((row for row in pending if row["revision"] == found["revision"]), None)
    ended = has_ended(mine) if mine else None
    replaced = [row for row in stale if row["revision"] == found["revision"]]
    return _page(
        request,
        "checkpoint.html",
        pipeline=pipeline,
        found=found,
        revisions=revisions,
        pending=mine,
        stale=replaced,
        advice=advise(standing({**found, **(mine or {})}, run_ended=ended, stale=bool(replaced))),
        events=[event for event in found["events"] if event["revision"] == found["revision"]],
    )


def _overview(connection: Connection, names: Collection[str]) -> list[dict[str, Any]]:
    """List some pipelines, each with how many undecided revisions a run has left that is over, as Airflow says."""
    found = queries.overview(connection, names)
    busy = [row["pipeline"] for row in found if row["pending"] > row["parked"]]
    pending = [row for name in busy for row in queries.pending(connection, name)]
    left = Counter(row["pipeline"] for row in pending if is_left(standing(row, run_ended=has_ended(row))))
    return [{**row, "left": left[row["pipeline"]]} for row in found]


# --- what goes wrong -------------------------------------------------------------------------------------------------


def _unavailable(request: Request, error: Exception) -> Response:
    return _problem(request, 503, "The commit table cannot be shown", str(error))


def _not_there(request: Request, error: Exception) -> Response:
    return _problem(request, 404, "Not in the record", str(error))


def _no_such_page(request: Request, _error: Exception) -> Response:
    return _problem(request, 422, "No such page", "the address does not name anything that the record could hold")


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException | AnyHTTPException)  # noqa: S101 - for the type checker
    titles = {401: "Sign in to Airflow first", 403: "Not for you to see", 404: "No such page"}
    texts = {403: "it takes the right to read a DAG that runs this pipeline, and its runs"}
    title = titles.get(error.status_code, "That did not work")
    text = texts.get(error.status_code, str(error.detail))
    return _problem(request, error.status_code, title, text, dict(error.headers or {}))


def _problem(request: Request, code: int, title: str, text: str, headers: dict[str, str] | None = None) -> Response:
    return _page(request, "problem.html", code, headers, title=title, text=text)


# --- templates -------------------------------------------------------------------------------------------------------


def _base(request: Request) -> str:
    """Return the path of these pages, below the path that Airflow is served at."""
    path: str = request.scope.get("root_path", "")
    return path.rstrip("/")


@cache
def _templates() -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(page_text.FILTERS)
    made.globals.update({file.stem: Markup(file.read_text()) for file in (STYLE, SCRIPT)})  # noqa: S704 - our own files
    return made


@cache
def _policy() -> str:
    """Return the content security policy of a page: the browser may load only the style and script in the page."""

    def digest(file: Folder) -> str:
        return base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()

    return (
        f"default-src 'none'; style-src 'sha256-{digest(STYLE)}'; script-src 'sha256-{digest(SCRIPT)}'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'self'"
    )


def _page(
    request: Request,
    template: str,
    status: int = 200,
    headers: dict[str, str] | None = None,
    **context: Any,  # noqa: ANN401 - whatever the template shows
) -> Response:
    base = _base(request)
    text = _templates().get_template(template).render(base=base, airflow=base.removesuffix(PREFIX), **context)
    secure = {
        "Cache-Control": "private, no-cache",
        "Content-Security-Policy": _policy(),
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(text, status, {**(headers or {}), **secure})
