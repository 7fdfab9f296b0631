"""Put an object into an S3-compatible store only if none has its name; `S3.create` uses it, since pyarrow cannot.

One request, signed as Amazon describes (Signature Version 4), with `If-None-Match: *`. The store decides between two
writers, so nobody has to look first.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

#: Times that a request is sent: a store that is busy with the same name asks to try again.
TRIES = 3
_AGAIN = frozenset({HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS})


class Keys(NamedTuple):
    """What a request is signed with; it is never printed."""

    key: str
    secret: str
    token: str | None = None

    def __repr__(self) -> str:
        """Show nothing of it."""
        return "Keys(…)"


@dataclass(frozen=True)
class Store:
    """Where the store is."""

    endpoint: str | None
    region: str
    #: Seconds that one request may take.
    patience: float

    def url(self, path: str) -> str:
        """Return the address of an object `bucket/key`."""
        home = self.endpoint or f"s3.{self.region}.amazonaws.com{'.cn' if self.region.startswith('cn-') else ''}"
        if not home.startswith(("http://", "https://")):
            home = f"https://{home}"
        return f"{home.rstrip('/')}/{quote(path, safe='/-_.~')}"


def put_if_absent(store: Store, keys: Keys, path: str, content: bytes) -> bool:
    """Put an object; return False if there is one of that name. Raise OSError if the store fails or refuses."""
    for left in reversed(range(TRIES)):
        try:
            with urlopen(_request(store, keys, path, content), timeout=store.patience):  # noqa: S310 - as below
                return True
        except HTTPError as error:
            error.close()
            if error.code == HTTPStatus.PRECONDITION_FAILED:
                return False
            if not left or (error.code not in _AGAIN and error.code < HTTPStatus.INTERNAL_SERVER_ERROR):
                msg = f"the object store answered {error.code} {error.reason} to a conditional PUT of s3://{path}"
                raise OSError(msg) from None
    raise AssertionError


def _request(store: Store, keys: Keys, path: str, content: bytes) -> Request:
    address = urlsplit(store.url(path))
    now = datetime.now(UTC)
    headers = {
        "host": address.netloc,
        "if-none-match": "*",
        "x-amz-content-sha256": hashlib.sha256(content).hexdigest(),
        "x-amz-date": f"{now:%Y%m%dT%H%M%SZ}",
        **({"x-amz-security-token": keys.token} if keys.token else {}),
    }
    signed = {**headers, "authorization": _authorization(store.region, keys, address.path, headers)}
    return Request(address.geturl(), data=content, headers=signed, method="PUT")  # noqa: S310 - `url` begins with http


def _authorization(region: str, keys: Keys, path: str, headers: Mapping[str, str]) -> str:
    """Return the signature of a PUT without a query."""
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = f"PUT\n{path}\n\n{lines}\n{names}\n{headers['x-amz-content-sha256']}"
    moment = headers["x-amz-date"]
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    signing = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{keys.secret}".encode()
    for part in (*scope.split("/"), signing):
        key = hmac.digest(key, part.encode(), "sha256")
    return f"AWS4-HMAC-SHA256 Credential={keys.key}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
