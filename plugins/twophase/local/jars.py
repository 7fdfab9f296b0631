"""Jars that the package does not contain: fetched once from a Maven repository, checked by sha256, kept in the cache.

    ~/.cache/twophase/<name>/<jar>    appears complete or not at all; XDG_CACHE_HOME moves the cache

A jar is taken from Maven's repository on this machine if it is there. Otherwise it is fetched by HTTPS from the mirror
that Maven's settings name, else from where Spark itself fetches packages (Maven Central), through the proxy that the
settings or the environment name.
"""

from __future__ import annotations

import base64
import fnmatch
import functools
import hashlib
import os
import re
import shutil
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from twophase.core.errors import ConfigError, StoreUnavailable
from twophase.spark.submit import find_spark_home

_SECONDS = 60.0
_AT_ONCE = 8


class Jar(NamedTuple):
    """One jar as Maven calls it, `group:artifact:version` or `group:artifact:version:classifier`, and its sha256."""

    name: str
    digest: str

    @property
    def file(self) -> str:
        """Return the name of its file."""
        return "-".join(self.name.split(":")[1:]) + ".jar"

    @property
    def path(self) -> str:
        """Return where it is in a Maven repository."""
        group, artifact, version, *_ = self.name.split(":")
        return "/".join((*group.split("."), artifact, version, self.file))


@dataclass
class Settings:
    """What Maven's settings say about where artifacts come from."""

    repository: Path = field(default_factory=lambda: Path.home() / ".m2" / "repository")
    #: The mirror of Maven Central; empty: Central itself.
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    proxy: str | None = field(default=None, repr=False)
    no_proxy: tuple[str, ...] = ()


@functools.cache
def central() -> str:
    """Return where Spark fetches packages unless it is told otherwise: the default of the Ivy among Spark's jars."""
    for ivy in (find_spark_home(sys.executable) / "jars").glob("ivy-*.jar"):
        with zipfile.ZipFile(ivy) as jar:
            resolver = jar.read("org/apache/ivy/plugins/resolver/IBiblioResolver.class")
        for url in re.findall(rb"https://[\w./-]+/maven2", resolver):
            return str(url.decode())
    msg = "maven: this Spark names no repository; name a mirror of central in ~/.m2/settings.xml"
    raise ConfigError(msg)


def pinned(text: str) -> list[Jar]:
    """Return the jars of a list: each name is followed by its sha256."""
    words = text.split()
    return [Jar(name, digest) for name, digest in zip(words[::2], words[1::2], strict=True)]


def cache() -> Path:
    """Return the folder in which downloads are kept for all projects of a user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "twophase")


def fetched(name: str, text: str) -> list[Path]:
    """Return the jars of a list, in its order; those that are not in the cache yet are fetched into it."""
    folder = cache() / name
    jars = pinned(text)
    missing = [jar for jar in jars if not (folder / jar.file).exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        settings = maven_settings()
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda jar: _keep(jar, folder, settings), missing))
    return [folder / jar.file for jar in jars]


# --- one jar ---------------------------------------------------------------------------------------------------------


def _keep(jar: Jar, folder: Path, settings: Settings) -> None:
    """Put one jar into the folder, from this machine or from the repository."""
    local = settings.repository / jar.path
    if local.exists():
        content, whence = local.read_bytes(), str(local)
    else:
        whence = f"{settings.url}/{jar.path}"
        content = _download(jar, whence, settings)
    found = hashlib.sha256(content).hexdigest()
    if found != jar.digest:
        msg = f"jar {jar.name}: expected sha256 {jar.digest}, found {found} in {whence}; remove it there"
        raise ConfigError(msg)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{jar.file}-", delete=False) as new:
        new.write(content)
    Path(new.name).chmod(0o644)
    Path(new.name).replace(folder / jar.file)


def _download(jar: Jar, url: str, settings: Settings) -> bytes:
    request = urllib.request.Request(url, headers=settings.headers)  # noqa: S310 - Maven's settings name the scheme
    try:
        with _opener(settings).open(request, timeout=_SECONDS) as reply:
            content: bytes = reply.read()
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        remedy = f"name a mirror or a proxy in ~/.m2/settings.xml, or: mvn dependency:get -Dartifact={jar.name}"
        msg = f"jar {jar.name}: cannot be had from {settings.url} ({why}); {remedy}"
        raise StoreUnavailable(msg) from error
    return content


def _opener(settings: Settings) -> urllib.request.OpenerDirector:
    """Return an HTTP client that goes through the proxy of Maven's settings, else through the environment's."""
    host = urllib.parse.urlsplit(settings.url).hostname or ""
    if settings.proxy is None or any(fnmatch.fnmatch(host, pattern) for pattern in settings.no_proxy):
        return urllib.request.build_opener()
    return urllib.request.build_opener(urllib.request.ProxyHandler({"http": settings.proxy, "https": settings.proxy}))


# --- Maven's settings ------------------------------------------------------------------------------------------------


def maven_settings() -> Settings:
    """Read Maven's settings: the user's, and where those are silent the installation's."""
    settings = Settings()
    for path in (*_of_installation(), Path.home() / ".m2" / "settings.xml"):
        if path.exists():
            _read(path, settings)
    settings.url = settings.url or central()
    return settings


def _of_installation() -> Iterator[Path]:
    home = os.environ.get("MAVEN_HOME") or os.environ.get("M2_HOME")
    program = shutil.which("mvn")
    if home is None and program is not None:
        home = str(Path(program).resolve().parents[1])
    if home is not None:
        yield Path(home, "conf", "settings.xml")


def _read(path: Path, settings: Settings) -> None:
    try:
        root = ET.parse(path).getroot()  # noqa: S314 - the user's own file
    except (OSError, ET.ParseError) as error:
        msg = f"{path}: expected Maven's settings, found what cannot be read ({error})"
        raise ConfigError(msg) from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if repository := _text(root, "localRepository"):
        settings.repository = Path(repository)
    for mirror in root.iterfind("mirrors/mirror"):
        if _stands_for_central(_text(mirror, "mirrorOf")):
            settings.url = _text(mirror, "url").rstrip("/")
            settings.headers = _credentials(root, _text(mirror, "id"))
            break
    for proxy in root.iterfind("proxies/proxy"):
        if _text(proxy, "active") != "false":
            settings.proxy = _proxy(proxy)
            settings.no_proxy = tuple(filter(None, _text(proxy, "nonProxyHosts").split("|")))
            break


def _stands_for_central(pattern: str) -> bool:
    words = [word.strip() for word in pattern.split(",")]
    return "!central" not in words and not {"central", "*", "external:*"}.isdisjoint(words)


def _credentials(root: ET.Element, server: str) -> dict[str, str]:
    """Return the header with the account of a server; a password that Maven encrypted is of no use here."""
    for one in root.iterfind("servers/server"):
        if _text(one, "id") == server and (login := _text(one, "username")):
            token = base64.b64encode(f"{login}:{_text(one, 'password')}".encode()).decode()
            return {"Authorization": f"Basic {token}"}
    return {}


def _proxy(proxy: ET.Element) -> str:
    login = urllib.parse.quote(_text(proxy, "username"), safe="")
    if login:
        login += ":" + urllib.parse.quote(_text(proxy, "password"), safe="") + "@"
    return f"http://{login}{_text(proxy, 'host')}:{_text(proxy, 'port') or 8080}"


def _text(element: ET.Element, name: str) -> str:
    """Return the text of a child, with what Maven puts in: the environment and the home folder."""
    text = (element.findtext(name) or "").strip()
    text = re.sub(r"\$\{env\.(\w+)\}", lambda found: os.environ.get(found[1], ""), text)
    return text.replace("${user.home}", str(Path.home()))
