"""The end of a fixture with the last test of a folder: pytest knows the session's, and a package's, but no folder's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def finish_at_the_end_of_its_folder(name: str, item: Any, nextitem: pytest.Item | None) -> None:
    """Tear a fixture down, with all that was built on it, if the next test lies elsewhere.

    Whoever asks for it again gets a new one.
    """
    if nextitem is not None and nextitem.path.parent == item.path.parent:
        return
    for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
        fixture.finish(item._request)
