"""Decide which pipelines a user may see, by the DAGs that Airflow lets the user read; every route depends on it.

A pipeline belongs to the DAGs that have run it (`pipeline_dag` in the record). A user who may read one of them, and its
runs, sees the whole pipeline. A pipeline that no DAG has run yet is guarded like the DAG of its own name, as
`TwophaseDag` calls it: a user sees it who may read all DAGs, or that one.

No `from __future__ import annotations` here or in `app`: FastAPI would treat an annotation that it cannot resolve as a
query parameter, and the route would lose its check.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Annotated

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException, status

from twophase.committer import queries
from twophase.web.record_session import reading

#: On every route: may this user read runs at all, and those of the DAG that the path names?
MAY_READ_RUNS = Depends(requires_access_dag("GET", DagAccessEntity.RUN))


def readable(user: GetUserDep, dag_ids: Collection[str]) -> set[str]:
    """Return which of these DAGs a user may read."""
    if not dag_ids:
        return set()
    if not hasattr(DagModel, "get_dag_id_to_team_name_mapping"):  # Airflow 3.1 knows no teams
        return get_auth_manager().filter_authorized_dag_ids(dag_ids=set(dag_ids), user=user, method="GET")
    teams = DagModel.get_dag_id_to_team_name_mapping(list(dag_ids))
    by_team: dict[str | None, set[str]] = defaultdict(set)
    for dag_id in dag_ids:
        by_team[teams.get(dag_id)].add(dag_id)
    found: set[str] = set()
    for team, ids in by_team.items():
        found |= get_auth_manager().filter_authorized_dag_ids(dag_ids=ids, user=user, method="GET", team_name=team)
    return found


def guards(pipeline: str, dag_ids: Collection[str]) -> set[str]:
    """Return the DAGs of which one must be readable for a pipeline to be seen."""
    return set(dag_ids) or {pipeline}


def visible_pipelines(user: GetUserDep) -> list[str]:
    """Return the names of the pipelines that a user may see."""
    with reading() as connection:
        guarded = {pipeline: guards(pipeline, dag_ids) for pipeline, dag_ids in queries.dags(connection).items()}
    allowed = readable(user, set().union(*guarded.values()))
    return [pipeline for pipeline, dag_ids in guarded.items() if dag_ids & allowed]


def one_pipeline(pipeline: str, user: GetUserDep) -> str:
    """Return the pipeline that the path names; 403 alike for one that is not for this user and one that is not there.

    Only who may see it, if it were there, is told that it is not.
    """
    with reading() as connection:
        dag_ids = queries.dags_of(connection, pipeline)
    if not readable(user, guards(pipeline, dag_ids)):
        raise HTTPException(status.HTTP_403_FORBIDDEN, "Forbidden")
    return pipeline


VisiblePipelines = Annotated[list[str], Depends(visible_pipelines)]
OnePipeline = Annotated[str, Depends(one_pipeline)]
