"""Keep the secrets that this process has read out of logs, errors and the record; whoever reads a secret calls `hide`.

Any text of another library may repeat a secret, so texts are cleaned just before they are shown.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

#: Names of settings whose values are secret; Spark calls a key `access.key`, Iceberg `access-key`, Kafka `ssl.key.pem`.
NAMES = re.compile(r"secret|token|password|credential|access[.-]?key|key\.pem|jaas|oauthbearer", re.IGNORECASE)

#: Shorter secrets are not hidden: they would match ordinary words.
_SHORTEST = 6
_known: set[str] = set()


def hide(secrets: Iterable[object]) -> None:
    """Hide these values from now on; if one has several lines, each of its lines too."""
    for secret in filter(None, secrets):
        written = str(secret)
        _known.update(part for part in (written, *written.splitlines()) if len(part) >= _SHORTEST)


def hide_named(values: Iterable[tuple[str, object]]) -> None:
    """Hide the values whose names say that they are secrets."""
    hide(value for name, value in values if NAMES.search(name))


def without_secrets(text: str) -> str:
    """Return a text without the secrets, whether plain, quoted for a URL, in JSON or as a Python repr."""
    for secret in sorted(_known, key=len, reverse=True):
        in_urls = (quote(secret, safe=""), quote(secret), quote_plus(secret))
        for written in (secret, *in_urls, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            text = text.replace(written, "***")
    return text


class SecretFilter(logging.Filter):
    """Keeps secrets out of log entries and their tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove secrets from an entry; every entry passes."""
        if _known:
            told = [record.getMessage()]
            if record.exc_info:
                told += ["".join(traceback.format_exception(*record.exc_info)).rstrip()]
            record.msg, record.args, record.exc_info = without_secrets("\n".join(told)), None, None
        return True


logging.getLogger("twophase").addFilter(SecretFilter())  # at import: whatever knows a secret imports this module
