"""`twophase up`: a whole Airflow that comes back from anything, keeps its secrets, and goes without a trace."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.servers.airflow import AirflowServer, eventually
from twophase.local.airflow_client import ApiError

pytestmark = pytest.mark.airflow

COMPONENTS = ["postgres", "kafka", "api-server", "scheduler", "dag-processor", "triggerer"]

#: A task that says what it finds in its surroundings.
NOOP = """
import os
from airflow.sdk import DAG, task

with DAG("{name}", schedule=None):

    @task
    def say() -> None:
        keys = [name for name in os.environ if "SECRET" in name or "FERNET" in name]
        print("inherited", [name for name in keys if not name.endswith("_CMD")])
        print("home", os.environ["TWOPHASE_HOME"])

    say()
"""


#: A task that notes its pid, and ends when it is allowed to.
PATIENT = """
import os, pathlib, time
from airflow.sdk import DAG, task

folder = pathlib.Path({folder!r})

with DAG("patient", schedule=None):

    @task
    def wait() -> None:
        (folder / f"pid-{{os.getpid()}}").touch()
        while not (folder / "go").exists():
            time.sleep(0.1)

    wait()
"""


def family(server: AirflowServer, *names: str) -> list[psutil.Process]:
    """Return every process of a server."""
    roots = [psutil.Process(server.component_pid(name)) for name in names or ("supervisor", "postgres")]
    return [process for root in roots for process in [root, *root.children(recursive=True)]]


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def gone(processes: list[psutil.Process]) -> bool:
    return not [process for process in processes if runs(process)]


def healthy(server: AirflowServer) -> bool:
    return {part["health"] for part in server.components().values()} == {"healthy"}


# --- on the shared Airflow -------------------------------------------------------------------------------------------


def test_up_brings_everything_up(airflow: AirflowServer) -> None:
    found = airflow.status()

    assert [part["name"] for part in found["airflow"]["components"]] == COMPONENTS
    assert healthy(airflow)
    assert found["airflow"]["url"] == airflow.url
    assert {"twophase", "airflow", "spark", "postgres"} <= found["versions"].keys()
    assert all(Path(part["log"]).exists() for part in found["airflow"]["components"])


def test_up_twice_is_the_same_as_once(airflow: AirflowServer) -> None:
    pid = airflow.component_pid("supervisor")
    first, second = airflow.start(), airflow.twophase("up")

    assert first == second
    assert airflow.url in first
    assert airflow.password() in first
    assert airflow.component_pid("supervisor") == pid


def test_up_on_another_port_names_the_one_it_runs_on(airflow: AirflowServer) -> None:
    said = airflow.twophase("up", "--port", "1234", fails=True)

    assert said == f"error: airflow: already running at {airflow.url}; stop it first: twophase down\n"


def test_a_dag_runs(airflow: AirflowServer) -> None:
    airflow.add_dag("noop.py", NOOP.format(name="noop"))
    run_id = airflow.trigger("noop")

    assert airflow.wait("noop", run_id) == "success"
    assert airflow.task_states("noop", run_id) == {"say": "success"}
    said = airflow.log("noop", run_id, "say")
    assert "inherited []" in said
    assert f"home {airflow.home}" in said


def test_nothing_listens_on_other_interfaces(airflow: AirflowServer) -> None:
    ours = {process.pid for process in family(airflow)}
    listening = [
        connection.laddr
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.pid in ours
    ]

    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}  # Java says it by IPv6
    assert airflow.port in {address.port for address in listening}


def test_secrets_are_in_closed_files_and_nowhere_else(airflow: AirflowServer) -> None:
    files = [path for path in (airflow.home / "airflow" / "secrets").iterdir() if path.is_file()]
    secrets = {path.read_text() for path in files if path.suffix != ".json"} | {
        airflow.password(),
        airflow.password("viewer"),
    }
    lines = " ".join(" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
    logs = "".join(path.read_text(errors="replace") for path in (airflow.home / "logs").rglob("*.log"))
    server = (airflow.home / "postgres" / "log").read_text()

    assert len(secrets) >= 7
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert (airflow.home / "airflow").stat().st_mode & 0o777 == 0o700
    assert not [secret for secret in secrets if secret in lines or secret in logs or secret in server]


def test_airflow_cannot_read_the_record(airflow: AirflowServer) -> None:
    """The role of Airflow's own database has no rights in the committer's."""
    import psycopg2

    address = (airflow.home / "airflow" / "secrets" / "database_url").read_text().replace("+psycopg2", "")
    connection = psycopg2.connect(re.sub(r"/airflow$", "/twophase", address))
    with connection, connection.cursor() as cursor, pytest.raises(psycopg2.errors.InsufficientPrivilege):
        cursor.execute("SELECT * FROM twophase.revision")
    connection.close()


def test_roles_are_told_apart(airflow: AirflowServer) -> None:
    with pytest.raises(ApiError, match=r"^403"):
        airflow.api("POST", "variables", user="viewer", key="a", value="b")
    with pytest.raises(ApiError, match=r"^401"):
        airflow.api("GET", "dags", user=None)

    assert airflow.api("GET", "dags", user="viewer")["total_entries"] >= 0


@pytest.mark.parametrize("name", ["api-server", *(pytest.param(one, marks=pytest.mark.slow) for one in COMPONENTS[3:])])
def test_a_killed_component_is_back_and_healthy(airflow: AirflowServer, name: str) -> None:
    before = airflow.components()[name]
    os.kill(before["pid"], signal.SIGKILL)
    eventually(lambda: airflow.components()[name]["pid"] not in {None, before["pid"]})
    airflow.wait_until_healthy()

    assert airflow.components()[name]["restarts"] == before["restarts"] + 1


@pytest.mark.slow
def test_a_task_of_a_killed_scheduler_ends_with_it_and_is_run_again(airflow: AirflowServer, tmp_path: Path) -> None:
    airflow.add_dag("patient.py", PATIENT.format(folder=str(tmp_path)))
    run_id = airflow.trigger("patient")
    eventually(lambda: list(tmp_path.glob("pid-*")))
    (first,) = [psutil.Process(int(path.name.removeprefix("pid-"))) for path in tmp_path.glob("pid-*")]
    os.kill(airflow.component_pid("scheduler"), signal.SIGKILL)
    eventually(lambda: gone([first]))
    (tmp_path / "go").touch()

    assert airflow.wait("patient", run_id) == "success"
    assert len(list(tmp_path.glob("pid-*"))) == 2


@pytest.mark.slow
def test_a_killed_database_is_back_on_its_port_and_dags_run(airflow: AirflowServer) -> None:
    port = airflow.status()["port"]
    before = airflow.component_pid("postgres")
    os.kill(before, signal.SIGKILL)
    eventually(lambda: airflow.components()["postgres"]["pid"] not in {None, before})
    airflow.wait_until_healthy()
    airflow.add_dag("after.py", NOOP.format(name="after"))

    assert airflow.status()["port"] == port
    assert airflow.wait("after", airflow.trigger("after")) == "success"


# --- on an Airflow of one's own --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own() -> Iterator[AirflowServer]:
    """Return a server for the tests that stop it; each starts it first, which is nothing if it runs."""
    server = AirflowServer()
    yield server
    server.stop()


def test_a_taken_port_is_named_with_the_remedy(own: AirflowServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", own.port))
        taken.listen()
        said = own.twophase("up", "--port", str(own.port), fails=True)

    assert re.fullmatch(
        rf"error: airflow: port {own.port} on 127\.0\.0\.1 .*: twophase up --port {own.port + 1}\n", said
    )
    assert own.components() == {}


@pytest.mark.slow
def test_down_leaves_nothing_and_tokens_outlive_it(own: AirflowServer) -> None:
    own.start()
    token = own.token()
    secrets = {path.name: path.read_text() for path in (own.home / "airflow" / "secrets").iterdir()}
    processes = family(own)
    said = own.twophase("down")
    left = gone(processes)
    own.start()

    assert said == "stopped\n"
    assert left
    assert {path.name: path.read_text() for path in (own.home / "airflow" / "secrets").iterdir()} == secrets
    assert own.request("GET", "/api/v2/dags", token=token)["total_entries"] == 0


@pytest.mark.slow
def test_sigterm_of_the_supervisor_stops_everything(own: AirflowServer) -> None:
    own.start()
    processes = family(own)
    os.kill(own.component_pid("supervisor"), signal.SIGTERM)

    eventually(lambda: gone(processes))
    assert own.components() == {}


@pytest.mark.slow
def test_up_after_the_supervisor_was_killed_replaces_what_it_left(own: AirflowServer) -> None:
    own.start()
    database = own.component_pid("postgres")
    old = family(own, "supervisor")
    os.kill(own.component_pid("supervisor"), signal.SIGKILL)
    own.start()

    assert healthy(own)
    assert gone([process for process in old if process.pid != database])
    assert own.component_pid("postgres") == database
