"""The secrets that this process has come across, kept out of what is shown: any text of others may repeat one."""

from __future__ import annotations

import json
import logging
import re
import traceback
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

#: Names of values that nobody may see; Spark calls a key `access.key`, Iceberg `access-key`.
NAMES = re.compile(r"secret|token|password|credential|access[.-]?key", re.IGNORECASE)

#: What is shorter is in any text.
_SHORTEST = 6
_known: set[str] = set()


def hide(secrets: Iterable[object]) -> None:
    """Let nobody see these from now on; of one with several lines, none of them."""
    for secret in filter(None, secrets):
        written = str(secret)
        _known.update(part for part in (written, *written.splitlines()) if len(part) >= _SHORTEST)


def hide_named(values: Iterable[tuple[str, object]]) -> None:
    """Let nobody see those whose names say that they are secrets."""
    hide(value for name, value in values if NAMES.search(name))


def without_secrets(text: str) -> str:
    """Return a text without the secrets, however it writes them: plainly, in a URL, in JSON, as Python shows them."""
    for secret in sorted(_known, key=len, reverse=True):
        in_urls = (quote(secret, safe=""), quote(secret), quote_plus(secret))
        for written in (secret, *in_urls, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            text = text.replace(written, "***")
    return text


class SecretFilter(logging.Filter):
    """Keeps secrets out of a log, out of the tracebacks in it too."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every entry pass, without secrets."""
        if _known:
            told = [record.getMessage()]
            if record.exc_info:
                told += ["".join(traceback.format_exception(*record.exc_info)).rstrip()]
            record.msg, record.args, record.exc_info = without_secrets("\n".join(told)), None, None
        return True


logging.getLogger("twophase").addFilter(SecretFilter())  # whoever can raise with a secret imports this module
