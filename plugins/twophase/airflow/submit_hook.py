"""Airflow's spark-submit hook with our environment and settings; `StageOperator` uses it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

from twophase.core import connections
from twophase.core.secret_texts import without_secrets
from twophase.spark import private_settings
from twophase.spark import submit as spark

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: How spark-submit's log names a driver on Kubernetes: by its namespace and its pod.
_SUBMITTED = re.compile(r"submission ID [^\s:]+:(\S+-driver)\b")


class SubmitHook(SparkSubmitHook):
    """Airflow's hook; its child gets none of Airflow's secrets except the connections that it needs."""

    given: dict[str, str]

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        """Run spark-submit; the child is killed when this thread ends, for whatever reason."""
        self._child = self._environment()
        with private_settings.opened() as self._private:
            submitted: str | None = super().submit(
                application,
                **kwargs,
                env=self._child,
                pass_fds=self._private.passed,
                preexec_fn=spark.die_with_submitter(),
            )
        return submitted

    def _environment(self) -> dict[str, str]:
        python = spark.interpreter()
        java, _ = spark.find_java(python)
        environment = spark.child_environment(os.environ, python, spark.find_spark_home(python), java)
        # The spark-submit that is installed with us comes last on the path, after the worker's own.
        environment |= self.given
        environment["PATH"] = os.pathsep.join(filter(None, [environment.get("PATH"), str(Path(sys.executable).parent)]))
        return environment

    def _process_spark_submit_log(self, itr: Iterator[str]) -> None:
        """Find the driver's pod in any namespace: Airflow's hook finds it only in one named spark.

        The lines go to the task's log without secrets: Spark logs whatever was raised in a job.
        """
        super()._process_spark_submit_log(map(without_secrets, self._noting_pod(itr)))

    def _noting_pod(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            if self._is_kubernetes and (found := _SUBMITTED.search(line)):
                self._kubernetes_driver_pod = found[1]
            yield line

    def _build_spark_common_args(self) -> list[str]:
        """Keep secrets off the command line, and put `env_vars` into the child's environment.

        Otherwise the hook would give the child a copy of this process's environment.
        """
        arguments: list[str] = super()._build_spark_common_args()
        if self._env:
            self._child.update({name: str(value) for name, value in self._env.items()})
            self._env = None
        home = self._child.get("SPARK_HOME", "")
        return self._private.taken_from(arguments, private_settings.default_file(Path(home), self._child))


def made_ours(
    hook: SparkSubmitHook, properties_file: str | None, application: str, given: Sequence[str]
) -> SparkSubmitHook:
    """Turn the hook of a SparkSubmitOperator into a SubmitHook that gives the driver these connections.

    The user's settings stay. The files of spark_jobs/ are shipped only with our own main.
    """
    hook.__class__ = SubmitHook
    hook.given = connections.exported(given)  # type: ignore[attr-defined]
    settings = spark.defaults(hook._connection["master"])  # noqa: SLF001 - only the hook has resolved it
    said = _said_in(properties_file) | set(hook._conf)  # noqa: SLF001 - no getter
    hook._conf |= {name: value for name, value in settings.items() if name not in said}  # noqa: SLF001 - no setter
    if application == str(spark.MAIN):
        jobs = [str(path) for path in spark.jobs()]
        hook._py_files = ",".join(filter(None, [hook._py_files, *jobs])) or None  # noqa: SLF001 - no setter
    return hook


def _said_in(properties_file: str | None) -> set[str]:
    """Return the names of the settings in a properties file; our defaults must not override them."""
    if not properties_file:
        return set()
    try:
        lines = Path(properties_file).read_text(encoding="utf-8").splitlines()
    except OSError:  # spark-submit says so
        return set()
    return {re.split(r"[\s=:]", line.strip(), maxsplit=1)[0] for line in lines if line.strip()}
