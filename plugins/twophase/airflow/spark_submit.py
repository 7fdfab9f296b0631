"""`StageOperator`, the stage task over Airflow's own SparkSubmitOperator; `add_tasks` puts it into DAGs."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

from twophase.airflow.stage_task import Job, StagingOperator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.sdk import Context

    from twophase.core.checkpoint import Json


class StageOperator(StagingOperator, SparkSubmitOperator):  # type: ignore[misc]
    """Stages one checkpoint by a spark-submit.

    Every argument of SparkSubmitOperator works: connection, conf, queue, deploy mode, packages. With `application` it
    submits the user's own Spark job, in any language, which writes to `{{ staging('write') }}`. Otherwise it submits
    our main, which calls the pipeline's transform.
    """

    template_fields: Sequence[str] = (
        *SparkSubmitOperator.template_fields,
        *StagingOperator.template_fields_of_ours,
    )

    def __init__(self, *, application: str = "", durable: bool = True, **kwargs: Any) -> None:
        """Stage a pipeline; with `durable` a job that outlived its task is rejoined by the next try."""
        self.application = application
        self._rejoins = durable
        # durable=False: the record keeps which job belongs to which attempt, so that no other job is rejoined.
        super().__init__(application=application, durable=False, **kwargs)
        self._job: Job | None = None
        self._rejoined: str | None = None

    # --- how Spark is reached ----------------------------------------------------------------------------------------

    def require(self) -> None:
        """Raise ConfigError on a worker that cannot submit Spark jobs."""
        from twophase.spark.submit import require

        require()

    def submit(self, job: Job, context: Context) -> None:
        """Run a job to its end by spark-submit."""
        own = self.application
        self._job = job
        try:
            self._hook = None  # a new hook, with the arguments of this job
            self.application = job.application
            self.application_args = job.arguments
            for name in ("conf", "env_vars", "files", "name"):
                setattr(self, name, job.fill(getattr(self, name)))
            if not own:
                self.name = f"twophase {job.key} a{job.attempt}"
            SparkSubmitOperator.execute(self, context)
        finally:
            self.application = own

    def submit_job(self, context: Context) -> str | None:
        """Submit to a cluster, and record the driver's id before anything else happens."""
        job_id: str | None = super().submit_job(context)
        if job_id is not None and self._job is not None:
            self._job.keep(job_id)
        return job_id

    def may_rejoin(self, job: Json) -> bool:
        """Return True if a job may be rejoined: this operator submitted it, and `durable` is on."""
        return self._rejoins and super().may_rejoin(job)

    def outlives(self, job_id: str, context: Context) -> bool:
        """Return True if a driver that another task submitted is active or has succeeded; asks the cluster."""
        status = self.get_job_status(job_id, context)
        self.log.info("job %s is %s", job_id, status)
        return bool(self.is_job_succeeded(status) or self.is_job_active(status))

    def rejoin(self, job_id: str, context: Context) -> None:
        """Wait for a driver on the cluster that another task submitted."""
        self._rejoined = job_id
        if not self.is_job_succeeded(self.get_job_status(job_id, context)):
            self.poll_until_complete(job_id, context)

    @classmethod
    def kill(cls, job: Json) -> None:
        """Kill a driver through its master: YARN's ResourceManager, Kubernetes, or Spark's own."""
        from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

        hook = SparkSubmitHook(conn_id=job["conn_id"], deploy_mode="cluster")
        # The hook can do it, but only for a driver that it submitted itself.
        if hook._is_yarn:  # noqa: SLF001 - likewise
            hook._kill_yarn_application(job["id"])  # noqa: SLF001 - likewise
        elif hook._is_kubernetes:  # noqa: SLF001 - likewise
            _delete_pod(*cls._parse_k8s_external_id(job["id"]))
        else:
            hook._driver_id = job["id"]  # noqa: SLF001 - likewise
            hook.on_kill()

    def kept(self) -> dict[str, Any]:
        """Return the connection, which `kill` needs."""
        return {"conn_id": self._conn_id}

    def stop(self) -> None:
        """Stop what was submitted or rejoined, if anything was."""
        if self._rejoined is not None:  # the hook knows only of what it has submitted itself
            self.kill({"id": self._rejoined, **self.kept()})
        elif self._hook is not None:
            SparkSubmitOperator.on_kill(self)

    def _get_hook(self) -> SparkSubmitHook:
        """Return a hook whose spark-submit holds no credentials, finds this Spark, and dies with this task."""
        from twophase.airflow.submit_hook import made_ours

        job = self._job
        hook: SparkSubmitHook = super()._get_hook()
        return made_ours(hook, self.properties_file, *((job.application, job.connections) if job else ("", [])))


def _delete_pod(namespace: str, name: str) -> None:
    """Delete a driver's pod; a pod that is gone is no error. The hook itself would only log a refusal."""
    from airflow.providers.cncf.kubernetes import kube_client  # type: ignore[import-not-found] # only where it is used

    try:
        kube_client.get_kube_client().delete_namespaced_pod(name, namespace)
    except kube_client.ApiException as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
