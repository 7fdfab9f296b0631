"""A real Iceberg REST catalog for the tests: the server that Iceberg tests its own clients with, from Maven Central.

Its jars are fetched once, checked, and kept in the user's cache; what else it needs is among Spark's own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark

from support.faults.processes import polls
from twophase.local import jars
from twophase.spark.submit import find_java

CONN_ID = "lake_rest"
#: What Maven calls each, and its sha256.
JARS = """
com.github.ben-manes.caffeine:caffeine:2.9.3
    1e0a7bbef1dd791653143f3f05d0e489934bf5481e58a87c9e619cd46b68729b
org.apache.httpcomponents.client5:httpclient5:5.5
    496b4b0e8d5f3a8139a5d2638486d304758bac3a9c39d76989f663cfd9354fc9
org.apache.httpcomponents.core5:httpcore5-h2:5.3.4
    1fb4f34e4b612e7c127ad693335583587850b17ce9b1c366f9de1ca49fe2c781
org.apache.httpcomponents.core5:httpcore5:5.3.4
    f2b2fd7a0164e8c3120cd8437bc9fea439239e165c17262b3e907daa7e979f80
org.apache.iceberg:iceberg-api:1.10.1
    9c806b96f20882d1e5e7a4b9a8d7bc1fa32917b509af4e6d139afaa09a288396
org.apache.iceberg:iceberg-bundled-guava:1.10.1
    05b79072e19071b1bcf7a4e382d624b3b2ccad6eaf79627676219bb48e4e834d
org.apache.iceberg:iceberg-common:1.10.1
    167791c08975f299ebae6c508ea872b899673c33dc2911e4c265f95b96a656f1
org.apache.iceberg:iceberg-core:1.10.1:tests
    8c18111a61ea40ba23114e10e33bacfceca6cf36d2c9a932d880e0100f14af1e
org.apache.iceberg:iceberg-core:1.10.1
    5dc1472e3a393d9d5a713aedee7007cebdf62cabbe82c72feb6d3da8e50d7216
org.apache.iceberg:iceberg-open-api:1.10.1:test-fixtures
    ec4dce1663933e3520227da8238a980d52b7eccac532c1953f337dc1e6ee597b
org.eclipse.jetty:jetty-http:11.0.25
    7ae3f8055557e6cea13980eaa37eaf9d546cd57a2d358aa7cb2e5de7c4946169
org.eclipse.jetty:jetty-io:11.0.25
    6d5859f4ce88156c86aac0fa62d27a768d8f100aa6da5c13a82ec3c9ea16a349
org.eclipse.jetty:jetty-security:11.0.25
    861a0be80a4dfa7935a89113d4ac4ed76505f079b22c9e2f1a84017908bbcd57
org.eclipse.jetty:jetty-server:11.0.25
    710652a7dccc0590cd0af2798dd3c4c93a777e7fb591d89d7cf02a4839bf0dd8
org.eclipse.jetty:jetty-servlet:11.0.25
    641eb7725c8aa27ff4f35e71b826f6c3fff5ce745d6997e520eafb887e3623ec
org.eclipse.jetty:jetty-util:11.0.25
    801ce0baaaf9a269fade7172dadd290c707f3bcdaf22b4292c323f6548b05959
org.eclipse.jetty.toolchain:jetty-jakarta-servlet-api:5.0.2
    efb20997729f32bfa6c8a8319037c353f7ad460d5d49f336bf232998ea2358db
org.xerial:sqlite-jdbc:3.50.3.0
    a3f53a2aa15ae9425a9e793bbe9c8e5288febeb4b65ef5c1a4e80d4c2045cf08
"""


def connection(port: int) -> str:
    """Return the Airflow connection, as an environment variable has it."""
    return json.dumps({"conn_type": "iceberg", "host": f"http://127.0.0.1:{port}"})


@contextmanager
def serving() -> Iterator[int]:
    """Start a server with a catalog of its own; yield its port."""
    home = Path(tempfile.mkdtemp(prefix="twophase-rest-"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    settings = {
        "CATALOG_REST_PORT": str(port),
        "CATALOG_URI": f"jdbc:sqlite:{home}/catalog.db",
        "CATALOG_WAREHOUSE": str(home / "warehouse"),
    }
    java, _ = find_java(sys.executable)
    classes = ":".join(
        [*map(str, jars.fetched("iceberg-rest-1.10.1", JARS)), f"{Path(pyspark.__file__).parent}/jars/*"]
    )
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(java), "-Xmx256m", "-cp", classes, "org.apache.iceberg.rest.RESTCatalogServer"],
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
        )
    try:
        _wait(process, port, home / "log")
        yield port
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(home)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in polls(60):
        assert process.poll() is None, log.read_text()
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/config", timeout=5):
            return
    msg = f"the catalog did not start: {log.read_text()}"
    raise AssertionError(msg)
