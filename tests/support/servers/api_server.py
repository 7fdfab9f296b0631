"""Airflow's api-server alone, for tests of the pages: a metadata database, users, no scheduler."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support.servers.airflow import eventually
from twophase.local import stack

ROOT = Path(__file__).parents[3]
SIMPLE = "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager"
FAB = "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"

#: Run with Airflow's environment: users of FAB, given as {name: [password, role, [[action, resource], …]]}.
USERS = """
import json, sys
from airflow.providers.fab.auth_manager.cli_commands.utils import get_application_builder

with get_application_builder() as appbuilder:
    security = appbuilder.sm
    security.sync_roles()
    for name, (password, role, rights) in json.load(sys.stdin).items():
        found = security.find_role(role) or security.add_role(role)
        for action, resource in rights:
            security.add_permission_to_role(found, security.create_permission(action, resource))
        assert security.add_user(name, name, name, f"{name}@localhost", found, password=password)
"""


class Answer(NamedTuple):
    """What the server said."""

    status: int
    text: str
    headers: Mapping[str, str]


class ApiServer:
    """One api-server on a metadata database."""

    def __init__(self, home: Path, metadata: str, record: str, **settings: str) -> None:
        self.home = home
        self.port = stack.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.passwords: dict[str, str] = {}
        self._tokens: dict[str, str] = {}
        outside = ("AIRFLOW", "TWOPHASE_", "_AIRFLOW", "PYTHONPATH")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(outside)},
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
            "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__FERNET_KEY": "",
            "AIRFLOW__CORE__AUTH_MANAGER": SIMPLE,
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": metadata,
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW_CONN_TWOPHASE_COMMITTER": record.replace("postgresql+psycopg2://", "postgres://"),
            **settings,
        }

    def airflow(self, *arguments: str, program: tuple[str, ...] = ("-m", "airflow"), text: str = "") -> str:
        """Run a command of Airflow's, or a program in its environment, and return what it says."""
        done = subprocess.run(
            [sys.executable, *program, *arguments],
            env=self.environment,
            cwd=self.home,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, f"airflow {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def add_users(self, users: Mapping[str, tuple[str, list[tuple[str, str]]]]) -> None:
        """Make users of FAB: name → (role, rights)."""
        self.passwords = {name: secrets.token_urlsafe() for name in users}
        described = {name: [self.passwords[name], role, rights] for name, (role, rights) in users.items()}
        self.airflow(program=("-c", USERS), text=json.dumps(described))

    @contextmanager
    def running(self) -> Iterator[ApiServer]:
        """Start the server, wait until it answers, stop it at the end."""
        command = [sys.executable, "-m", "airflow", "api-server", "--host", "127.0.0.1", "--port", str(self.port)]
        log = self.home / "api-server.log"
        with log.open("w") as out:
            started = subprocess.Popen(
                [*command, "--workers", "1"],
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            try:
                eventually(lambda: self._answers(started, log), 120)
                yield self
            finally:
                started.terminate()
                started.wait(30)

    def _answers(self, started: subprocess.Popen[bytes], log: Path) -> bool:
        assert started.poll() is None, log.read_text()
        try:
            return self.get("/api/v2/version").status == 200
        except OSError:
            return False

    def get(self, path: str, user: str | None = None, *, follow: bool = True) -> Answer:
        """Ask for a page as a user; None: as nobody."""
        headers = {"Authorization": f"Bearer {self.token(user)}"} if user else {}
        return self._send(urllib.request.Request(self.url + path, headers=headers), follow=follow)

    def token(self, user: str) -> str:
        """Return a user's token, asked for once."""
        if user not in self._tokens:
            passwords = self.passwords or json.loads((self.home / "passwords.json").read_text())
            body = json.dumps({"username": user, "password": passwords[user]}).encode()
            headers = {"Content-Type": "application/json"}
            answer = self._send(urllib.request.Request(f"{self.url}/auth/token", body, headers), follow=True)
            assert answer.status == 201, answer
            self._tokens[user] = json.loads(answer.text)["access_token"]
        return self._tokens[user]

    def _send(self, request: urllib.request.Request, *, follow: bool) -> Answer:
        opener = urllib.request.build_opener() if follow else urllib.request.build_opener(Stay)
        try:
            with opener.open(request, timeout=60) as reply:
                return Answer(reply.status, reply.read().decode(), dict(reply.headers))
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read().decode(), dict(error.headers))


class Stay(urllib.request.HTTPRedirectHandler):
    """Shows a redirection instead of following it."""

    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def folder() -> Iterator[Path]:
    """Make a home for Airflow with a folder of DAGs; remove it at the end."""
    home = Path(tempfile.mkdtemp(prefix="twophase-api-server-"))
    (home / "dags").mkdir()
    yield home
    shutil.rmtree(home)
