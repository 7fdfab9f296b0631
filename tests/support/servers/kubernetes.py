"""A real Kubernetes API server, without a node: pods are created, listed and deleted, and run nowhere.

It is built once from Kubernetes' own Go modules, with an etcd in the same process, and kept in the user's cache.
`python -m support.servers.kubernetes` builds it: before the tests, whose time limits would end it on a busy machine.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from support.faults.processes import polls
from twophase.local import processes, stack

SOURCE = Path(__file__).parents[2] / "kubernetes" / "apiserver"
VERSION = "v1.34.4"


class Kubernetes(NamedTuple):
    """An API server that runs."""

    folder: Path
    url: str
    token: str

    @property
    def authority(self) -> Path:
        """Return the certificate that its own was signed with."""
        return self.folder / "certificates" / "apiserver.crt"

    @property
    def config(self) -> Path:
        """Return what `KUBECONFIG` names."""
        return self.folder / "config"

    def get(self, path: str) -> Any:
        asked = urllib.request.Request(f"{self.url}/api/v1/{path}", headers={"Authorization": f"Bearer {self.token}"})
        trusted = ssl.create_default_context(cafile=str(self.authority))
        with urllib.request.urlopen(asked, timeout=30, context=trusted) as reply:
            return json.load(reply)

    def pods(self) -> dict[str, dict[str, str]]:
        """Map each pod to its labels."""
        found = self.get("namespaces/default/pods")["items"]
        return {pod["metadata"]["name"]: pod["metadata"]["labels"] for pod in found}


@contextmanager
def running(folder: Path) -> Iterator[Kubernetes]:
    """Start the server; it dies with this process."""
    port, token = stack.free_port(), secrets.token_hex()
    kubernetes = Kubernetes(folder, f"https://127.0.0.1:{port}", token)
    (folder / "token").write_text(token)
    (folder / "tokens").write_text(f"{token},tester,1,system:masters\n")
    _write_key(folder / "accounts.pem")
    _write_config(kubernetes)
    settings = {
        "secure-port": str(port),
        "bind-address": "127.0.0.1",
        "cert-dir": str(kubernetes.authority.parent),
        "token-auth-file": str(folder / "tokens"),
        "authorization-mode": "AlwaysAllow",
        "disable-admission-plugins": "ServiceAccount",  # no controller makes the accounts that it would ask for
        "endpoint-reconciler-type": "none",
        "service-account-issuer": "https://localhost",
        "service-account-key-file": str(folder / "accounts.pem"),
        "service-account-signing-key-file": str(folder / "accounts.pem"),
    }
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen(
            [
                built(),
                folder / "etcd",
                str(stack.free_port()),
                *(f"--{name}={value}" for name, value in settings.items()),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=processes.dies_with_parent(signal.SIGKILL),  # noqa: PLW1509 - one system call
        )
    try:
        _wait(kubernetes, started)
        yield kubernetes
    finally:
        started.kill()
        started.wait()


def built() -> Path:
    """Return the server, built at the first call: that takes five to twenty minutes, longer on a busy machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "twophase")
    program = cache / f"kube-apiserver-{VERSION}"
    if not program.exists():
        go = shutil.which("go") or shutil.which("go", path=Path(sys.executable).parent)
        assert go, "the tests on Kubernetes need Go; `make` installs one where there is none"
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as folder:
            new = Path(folder, "apiserver")
            subprocess.run(["nice", go, "build", "-trimpath", "-ldflags", "-s -w", "-o", new], cwd=SOURCE, check=True)
            new.replace(program)
    return program


def _write_key(path: Path) -> None:
    """Write the key that tokens of service accounts are signed with."""
    made = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    path.write_bytes(text)


def _write_config(kubernetes: Kubernetes) -> None:
    """Write what clients read: JSON is YAML, too."""
    cluster = {"server": kubernetes.url, "certificate-authority": str(kubernetes.authority)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "tester", "user": {"token": kubernetes.token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "tester"}}],
    }
    kubernetes.config.write_text(json.dumps(config))


def _wait(kubernetes: Kubernetes, started: subprocess.Popen[bytes]) -> None:
    for _ in polls(180):
        assert started.poll() is None, (kubernetes.folder / "log").read_text()[-3000:]
        try:
            kubernetes.get("namespaces/default")
        except (OSError, urllib.error.HTTPError):  # not there yet, its certificate neither
            continue
        return
    msg = f"Kubernetes did not start: {(kubernetes.folder / 'log').read_text()[-3000:]}"
    raise AssertionError(msg)


if __name__ == "__main__":
    built()
