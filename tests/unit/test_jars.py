"""Jars come from this machine or from the repository of Maven's settings, and only if they are the right ones."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from twophase.core.errors import ConfigError, StoreUnavailable
from twophase.local import jars, kafka_jars

CONTENT = b"a jar"
NAME = "org.example.tools:tool_2.13:1.0"
PATH = "org/example/tools/tool_2.13/1.0/tool_2.13-1.0.jar"
PINNED = f"{NAME}\n    {hashlib.sha256(CONTENT).hexdigest()}"


class Repository(ThreadingHTTPServer):
    """A mirror or a proxy: answers every request with the same bytes, and keeps what it was asked."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.asked: list[tuple[str, str | None, str | None]] = []
        repository = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                head = self.headers
                repository.asked.append((self.path, head["Authorization"], head["Proxy-Authorization"]))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def repository() -> Iterator[Repository]:
    with Repository() as serving:
        yield serving
        serving.shutdown()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment of a user whose home and Maven have nothing in them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MAVEN_HOME", str(tmp_path / "maven"))
    for name in ("XDG_CACHE_HOME", "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".m2").mkdir()
    return tmp_path


def settings(home: Path, text: str) -> None:
    namespace = 'xmlns="http://maven.apache.org/SETTINGS/1.2.0"'
    (home / ".m2" / "settings.xml").write_text(f"<settings {namespace}>{text}</settings>")


def mirror(url: str, of: str = "central") -> str:
    return f"<mirrors><mirror><id>near</id><mirrorOf>{of}</mirrorOf><url>{url}</url></mirror></mirrors>"


def test_a_jar_is_fetched_once_from_the_mirror_with_its_account(
    home: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXUS_PASSWORD", "hidden")
    account = "<username>ci</username><password>${env.NEXUS_PASSWORD}</password>"
    settings(home, mirror(repository.url + "/maven/") + f"<servers><server><id>near</id>{account}</server></servers>")

    (first,), (again,) = jars.fetched("tool", PINNED), jars.fetched("tool", PINNED)

    assert first == again == home / ".cache" / "twophase" / "tool" / "tool_2.13-1.0.jar"
    assert first.read_bytes() == CONTENT
    assert repository.asked == [(f"/maven/{PATH}", "Basic Y2k6aGlkZGVu", None)]


def test_a_jar_that_maven_has_is_not_fetched(home: Path, repository: Repository) -> None:
    settings(home, f"<localRepository>${{user.home}}/mine</localRepository>{mirror(repository.url)}")
    (home / "mine" / PATH).parent.mkdir(parents=True)
    (home / "mine" / PATH).write_bytes(CONTENT)

    assert jars.fetched("tool", PINNED)[0].read_bytes() == CONTENT
    assert repository.asked == []


def test_the_proxy_of_the_settings_is_used(home: Path, repository: Repository) -> None:
    account = "<username>u</username><password>p</password>"
    proxy = f"<host>127.0.0.1</host><port>{repository.server_port}</port>{account}<nonProxyHosts>*.near</nonProxyHosts>"
    settings(home, mirror("http://far.example", "*") + f"<proxies><proxy>{proxy}</proxy></proxies>")

    jars.fetched("tool", PINNED)

    assert repository.asked == [(f"http://far.example/{PATH}", None, "Basic dTpw")]


def test_other_bytes_are_refused_and_not_kept(home: Path) -> None:
    with Repository(b"another jar") as other:
        settings(home, mirror(other.url))
        with pytest.raises(ConfigError, match=f"jar {NAME}: expected sha256 .* found .* in http"):
            jars.fetched("tool", PINNED)
        other.shutdown()

    assert list((home / ".cache" / "twophase" / "tool").iterdir()) == []


def test_a_repository_that_does_not_answer_is_named_with_the_remedy(home: Path) -> None:
    settings(home, mirror("http://127.0.0.1:1"))

    with pytest.raises(
        StoreUnavailable, match=r"jar .*: cannot be had from http://127.0.0.1:1 .*settings.xml"
    ) as failed:
        jars.fetched("tool", PINNED)
    assert f"mvn dependency:get -Dartifact={NAME}" in str(failed.value)


def test_settings_that_cannot_be_read_are_named(home: Path) -> None:
    settings(home, "<mirrors>")

    with pytest.raises(ConfigError, match=r"settings.xml: expected Maven's settings"):
        jars.fetched("tool", PINNED)


@pytest.mark.parametrize(
    ("of", "stands"), [("*", True), ("external:*", True), ("a,central", True), ("*,!central", False), ("a", False)]
)
def test_a_mirror_counts_only_if_it_stands_for_central(home: Path, of: str, stands: bool) -> None:
    settings(home, mirror("https://near.example", of))

    assert (jars.maven_settings().url == "https://near.example") is stands


def test_every_jar_of_kafka_is_pinned_once() -> None:
    broker, connector = jars.pinned(kafka_jars.BROKER), jars.pinned(kafka_jars.CONNECTOR)

    assert (len(broker), len(connector)) == (46, 4)
    assert len({jar.file for jar in broker}) == 46
    assert all(len(jar.digest) == 64 for jar in [*broker, *connector])


def test_without_a_mirror_jars_come_from_where_spark_fetches_packages() -> None:
    """No repository is written down here: Spark's own Ivy names it."""
    found = jars.maven_settings().url

    assert found.startswith("https://")
    assert found.endswith("/maven2")
