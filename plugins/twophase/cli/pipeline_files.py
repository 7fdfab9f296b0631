"""Find the pipeline that `FILE[:NAME]` names; `twophase run` calls it."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from twophase.core.errors import ConfigError, TwophaseError

if TYPE_CHECKING:
    from twophase.pipeline import Pipeline


def load(target: str) -> Pipeline:
    """Return the only pipeline of a file, or the one whose variable or own name is NAME."""
    file, name = split(target)
    found = pipelines(_execute(file))
    if name is not None:
        return _named(file, name, found)
    if not found:
        msg = f"{file}: no pipeline in it; assign one to a variable of the module"
        raise ConfigError(msg)
    distinct = {id(pipeline): pipeline for pipeline in found.values()}
    if len(distinct) > 1:
        msg = f"{file}: expected one pipeline, found {_listed(found)}; say which: {file}:{next(iter(found))}"
        raise ConfigError(msg)
    return next(iter(distinct.values()))


def split(target: str) -> tuple[Path, str | None]:
    """Split FILE[:NAME] and check that the file exists; a file's own name may contain colons."""
    whole, (file, _, name) = Path(target), target.rpartition(":")
    path = whole if whole.exists() or not file else Path(file)
    if path.is_dir():
        msg = f"{path}: it is a folder, expected a Python file"
        raise ConfigError(msg)
    if not path.exists():
        msg = f"{path}: no such file"
        raise ConfigError(msg)
    return path, None if path is whole else name


def pipelines(module: ModuleType) -> dict[str, Pipeline]:
    """Return the pipelines of a module by variable."""
    from twophase.pipeline import Pipeline

    return {name: value for name, value in vars(module).items() if isinstance(value, Pipeline)}


def _named(file: Path, name: str, found: dict[str, Pipeline]) -> Pipeline:
    if name in found:
        return found[name]
    matches = {id(pipeline): pipeline for pipeline in found.values() if pipeline.name == name}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        msg = f"{file}: {len(matches)} pipelines are named {name!r}; give the variable instead"
        raise ConfigError(msg)
    msg = f"{file}: no pipeline {name!r}, found {_listed(found) if found else 'none'}"
    raise ConfigError(msg)


def _listed(found: dict[str, Pipeline]) -> str:
    return ", ".join(var if var == p.name else f"{var} ({p.name})" for var, p in found.items())


def _execute(file: Path) -> ModuleType:
    """Execute a file as Python would, with its folder on the path; no bytecode is left beside it."""
    full = str(file.absolute())
    module = ModuleType(f"twophase_file_{file.stem}")
    module.__file__ = full
    sys.modules[module.__name__] = module
    folder = str(Path(full).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        exec(compile(Path(full).read_bytes(), full, "exec"), vars(module))  # noqa: S102 - the user's own file
    except (Exception, SystemExit) as error:
        raise ConfigError(_failure(file, full, error)) from error
    return module


def _failure(file: Path, full: str, error: BaseException) -> str:
    """Say what failed and in which line of the file."""
    if isinstance(error, SyntaxError) and error.filename == full:
        return f"{file}:{error.lineno}: {type(error).__name__}: {error.msg}"
    if isinstance(error, OSError) and error.__traceback__ and not _line(full, error):
        return f"{file}: cannot be read: {error.strerror}"
    line = _line(full, error)
    kind = "" if isinstance(error, TwophaseError) else f"{type(error).__name__}: "
    return f"{file}{f':{line}' if line else ''}: {kind}{' '.join(str(error).split()) or 'no message'}"


def _line(full: str, error: BaseException) -> int | None:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == full]
    return lines[-1] if lines else None
