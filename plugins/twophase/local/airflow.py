"""The local Airflow of `twophase up`: its settings, secrets, database, and the components to keep running.

    airflow/            AIRFLOW_HOME
    airflow/secrets/    keys, passwords and the database's URL, each in a file that only its owner can read
    logs/               one file per component, and the logs of tasks in `logs/tasks`

Nothing here imports Airflow: its commands are run by the same interpreter. It listens on 127.0.0.1 only. Its database
is in the embedded PostgreSQL, with a role of its own that cannot read the record. Airflow reads secrets from files, so
no task inherits them in its environment, and no command line shows them.

Settings `AIRFLOW__…` in the environment of `twophase up` are kept, unless they would lead this Airflow to another one's
database, folders or port.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from twophase.core import settings
from twophase.core.errors import ConfigError, StoreUnavailable, TwophaseError
from twophase.local import kafka_component, postgres, processes, shared_files, supervisor
from twophase.local.committer_database import CONNECTION, DRIVER, resolve

HOST = "127.0.0.1"
ROLE = DATABASE = "airflow"
ADMIN = "admin"
#: Component → its command. Log servers stay off: they would listen on every interface, and all logs are on this disk.
COMMANDS = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
#: Settings for the demo and for tests, in the environment of `up`: Airflow then notices in seconds, not minutes.
QUICK = {
    "AIRFLOW__CORE__KILLED_TASK_CLEANUP_TIME": "5",
    "AIRFLOW__CORE__PARALLELISM": "6",
    "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "120",  # changed files do not wait for it
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "1",
    "AIRFLOW__SCHEDULER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "3",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "10",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "1",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "15",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
}

_MIGRATE_SECONDS = 600.0
_USERS = "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"
#: Settings for one person's machine, where speed matters more than load; the environment overrides them.
_DEFAULTS = {
    "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
    "AIRFLOW__CORE__HOSTNAME_CALLABLE": "socket.gethostname",
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL": "1",
    "AIRFLOW__CORE__PARALLELISM": "8",
    _USERS: f"{ADMIN}:admin,viewer:viewer",
    "AIRFLOW__DAG_PROCESSOR__BUNDLE_REFRESH_CHECK_INTERVAL": "1",
    "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "2",
    "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
    # Showing the log of a running task also asks a log server; that there is none must not log a traceback.
    "AIRFLOW__LOGGING__NAMESPACE_LEVELS": "airflow.utils.log.file_task_handler=CRITICAL",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "15",
    "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
}
#: Other variables that would change what is set here.
_ELSEWHERE = ("AIRFLOW_CONFIG", "AIRFLOW__CORE__SQL_ALCHEMY_CONN", "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC")
#: A port that nobody listens on, so that no other server is asked for our logs.
_NOBODY = "1"
_SPARK = '{"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}'


def home() -> Path:
    """Return AIRFLOW_HOME."""
    return settings.home() / "airflow"


def logs() -> Path:
    """Return the folder of all logs."""
    return settings.home() / "logs"


def installed() -> str:
    """Return the version of Airflow; raise ConfigError if it is not installed."""
    try:
        return version("apache-airflow")
    except PackageNotFoundError:
        msg = "airflow: it is not installed; pip install 'twophase[airflow]', or leave it out: --no-airflow"
        raise ConfigError(msg) from None


def passwords_file() -> Path:
    """Return the file of the users' passwords."""
    return _secret("passwords.json")


def passwords() -> dict[str, str]:
    """Return each user's password."""
    found: dict[str, str] = json.loads(passwords_file().read_text(encoding="utf-8"))
    return found


# --- the environment -------------------------------------------------------------------------------------------------


def environment(port: int) -> dict[str, str]:
    """Return the environment of Airflow's processes."""
    return {**_surroundings(os.environ), **_connections(os.environ), **_settings(port)}


def beside() -> dict[str, str]:
    """Return the environment of a program that asks this Airflow's database, without our connections."""
    return {**_surroundings(os.environ), **_settings(0)}


def _surroundings(parent: Mapping[str, str]) -> dict[str, str]:
    """Return what Airflow inherits: all variables but those of another Airflow; our interpreter is first on PATH."""
    fixed = {name.removesuffix("_CMD") for name in _settings(0)}
    hidden = {*_ELSEWHERE, *(name + suffix for name in fixed for suffix in ("", "_CMD", "_SECRET"))}
    kept = {name: value for name, value in parent.items() if name not in hidden}
    path = [str(Path(sys.executable).parent), parent.get("PATH", os.defpath)]
    return {**_DEFAULTS, **kept, "PATH": os.pathsep.join(path)}


def _settings(port: int) -> dict[str, str]:
    """Return the settings that cannot be overridden: where everything is."""
    found = {
        "AIRFLOW_HOME": str(home()),
        "AIRFLOW__API__BASE_URL": url(port),
        "AIRFLOW__API__HOST": HOST,
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__SECRET_KEY_CMD": _read_command("api_secret_key"),
        "AIRFLOW__API_AUTH__JWT_SECRET_CMD": _read_command("jwt_secret"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(settings.dags()),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url(port)}/execution/",
        "AIRFLOW__CORE__FERNET_KEY_CMD": _read_command("fernet_key"),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords_file()),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_CMD": _read_command("database_url"),
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(logs() / "tasks"),
        "AIRFLOW__LOGGING__DAG_PROCESSOR_CHILD_PROCESS_LOG_DIRECTORY": str(logs() / "dag-files"),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": _NOBODY,
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": _NOBODY,
        "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "False",
        "TWOPHASE_DAGS": str(settings.dags()),
        "TWOPHASE_HOME": str(settings.home()),
        "TWOPHASE_SPARK_JOBS": str(settings.spark_jobs()),
    }
    beside = Path(__file__).parents[2]
    if (beside / ".airflowignore").exists():  # a checkout; an installed package registers its plugin itself
        found["AIRFLOW__CORE__PLUGINS_FOLDER"] = str(beside)
    return found


def _connections(parent: Mapping[str, str]) -> dict[str, str]:
    """Return the connections: the committer database that every command uses, and a local Spark unless there is one."""
    committer = resolve(may_start=True).dsn.replace(DRIVER, "postgres", 1)
    spark = "AIRFLOW_CONN_SPARK_DEFAULT"
    return {f"AIRFLOW_CONN_{CONNECTION.upper()}": committer, spark: parent.get(spark) or _SPARK}


def url(port: int) -> str:
    """Return the address for the browser."""
    return f"http://{HOST}:{port}"


# --- secrets ---------------------------------------------------------------------------------------------------------


def _secret(name: str) -> Path:
    return home() / "secrets" / name


def _read_command(name: str) -> str:
    """Return the command by which Airflow reads a secret."""
    return f"cat {shlex.quote(str(_secret(name)))}"


def make_secrets() -> None:
    """Make the keys and passwords that do not exist yet; they stay, so sessions and connections survive a restart."""
    _secret("").mkdir(mode=0o700, parents=True, exist_ok=True)
    home().chmod(0o700)
    for name in ("api_secret_key", "jwt_secret", "database_password"):
        _keep(name, secrets.token_urlsafe(32))
    _keep("fernet_key", base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())
    users = os.environ.get(_USERS) or _DEFAULTS[_USERS]
    names = [user.partition(":")[0].strip() for user in users.split(",")]
    known = passwords() if passwords_file().exists() else {}
    if missing := {name: secrets.token_urlsafe(12) for name in names if name not in known}:
        shared_files.write(passwords_file(), json.dumps(known | missing))


def _keep(name: str, value: str) -> None:
    if not _secret(name).exists():
        shared_files.write(_secret(name), value)


# --- the database ----------------------------------------------------------------------------------------------------


class Database:
    """The embedded PostgreSQL as a component, with Airflow's database in it, of the version of this Airflow."""

    name = "postgres"
    needs: tuple[str, ...] = ()
    session: int | None = None  # it outlives whoever started it

    def __init__(self, port: int) -> None:
        """Remember the port of Airflow, and nothing of the database's: it may come back elsewhere."""
        self._port = port
        self._ready: int | None = None
        self.dependents: list[supervisor.Child] = []

    def start(self) -> None:
        """Start the server and make the database ready; if its address has changed, its users are started again."""
        postgres.ensure()
        link = logs() / f"{self.name}.log"
        if not link.is_symlink():
            link.symlink_to(settings.home() / "postgres" / "log")
        address = prepare_database()
        place = _secret("database_url")
        if not place.exists() or place.read_text(encoding="utf-8") != address:
            shared_files.write(place, address)
            for child in self.dependents:
                child.stop()
        migrate(self._port)
        self._ready = postgres.pid()

    def pid(self) -> int | None:
        """Return the pid of the server that was made ready; one that somebody else has started is not."""
        return self._ready if self._ready == postgres.pid() else None

    def ask_to_stop(self) -> None:
        """Wait for the others, which use it to the end."""

    def stop(self) -> None:
        """Stop the server."""
        postgres.stop()


def prepare_database() -> str:
    """Make Airflow's role and database unless they are there, and return the database's URL."""
    import psycopg2
    from psycopg2.sql import SQL, Identifier

    password = _secret("database_password").read_text(encoding="utf-8")
    address = postgres.create_database(DATABASE)
    connection = psycopg2.connect(address.replace(DRIVER, "postgresql", 1))
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "SET log_min_error_statement = 'panic'"
            )  # no statement of these is to be in the server's log
            cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (ROLE,))
            verb = SQL("ALTER") if cursor.fetchone() else SQL("CREATE")
            cursor.execute(SQL("{} ROLE {} LOGIN PASSWORD %s").format(verb, Identifier(ROLE)), (password,))
            cursor.execute(SQL("ALTER DATABASE {} OWNER TO {}").format(Identifier(DATABASE), Identifier(ROLE)))
    finally:
        connection.close()
    place = address.rpartition("@")[2]
    return f"{DRIVER}://{ROLE}:{password}@{place}"


def migrate(port: int) -> None:
    """Bring the database to the version of this Airflow; the database itself says when that was done."""
    import psycopg2

    address = _secret("database_url").read_text(encoding="utf-8").replace(DRIVER, "postgresql", 1)
    done = f"migrated by Airflow {installed()}"
    connection = psycopg2.connect(address)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = %s", (DATABASE,)
            )
            if cursor.fetchone() == (done,):
                return
            _run_migration(port)
            cursor.execute(f"COMMENT ON DATABASE {DATABASE} IS %s", (done,))
    finally:
        connection.close()


def _run_migration(port: int) -> None:
    path = logs() / "db-migrate.log"
    with supervisor.open_log(path) as output:
        code = subprocess.run(
            [*_airflow(), "db", "migrate"],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(port),
            timeout=_MIGRATE_SECONDS,
            preexec_fn=processes.dies_with_parent(signal.SIGTERM),
        ).returncode
    if code != 0:
        msg = f"airflow db migrate ended with exit code {code}; see {path}"
        raise StoreUnavailable(msg)


# --- the components --------------------------------------------------------------------------------------------------


def _airflow() -> list[str]:
    """Return the command of this interpreter's Airflow; the current folder is kept out of its imports."""
    return [sys.executable, "-P", "-m", "airflow"]


def components(port: int, topics: Sequence[str] | None = None) -> list[supervisor.Component]:
    """Return the database and Airflow's components, in the order of their start; before them a broker with `topics`."""
    database = Database(port)
    broker = None if topics is None else kafka_component.KafkaComponent(topics)
    needs = (database.name, *([broker.name] if broker else []))

    def surroundings() -> dict[str, str]:
        return {**environment(port), **(kafka_component.environment() if broker else {})}

    children = [
        supervisor.Child(
            name=name,
            command=[*_airflow(), *command],
            environment=surroundings,
            log=logs() / f"{name}.log",
            needs=needs,
        )
        for name, command in COMMANDS.items()
    ]
    database.dependents = children
    return [database, *([broker] if broker else []), *children]


def folder() -> Path:
    """Return the folder of the supervisor."""
    return settings.home() / "supervisor"


def main() -> None:
    """Supervise a local Airflow until told to stop: what `twophase up` leaves running."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kafka", nargs="*", metavar="TOPIC", help="start a broker, too, with these topics")
    arguments = parser.parse_args()
    port: int = arguments.port
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        make_secrets()
        supervisor.Supervisor(folder(), components(port, arguments.kafka), {"port": port}).run()
    except TwophaseError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
