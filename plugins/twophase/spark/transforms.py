"""Check from its source that a transform exists and can be called with its reads, before anything begins.

The runner and the stage task call it. The source is parsed, never run: this process may hold credentials that users'
code must not see. What the source does not show is left to Spark, which calls the transform.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

from twophase.core.errors import ConfigError
from twophase.core.settings import spark_jobs

#: What a transform may ask for besides its reads.
GIVEN = frozenset({"spark", "context"})
#: What the transform of a pipeline with state may ask for, too.
STATE = "state"
#: Names that no read may have.
RESERVED = GIVEN | {STATE}

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def check(pipeline: str, transform: str, reads: Collection[str], *, here: bool, state: bool = False) -> None:
    """Refuse a transform that cannot be found or called; with `state` it may ask for that.

    `here` says that Spark's driver has the interpreter and the path of this process: then what is not found here is not
    found there either.
    """
    module, _, name = transform.partition(":")
    which = f"pipeline {pipeline}: import path {transform!r}"
    looked = f"looked in {spark_jobs()} (TWOPHASE_SPARK_JOBS) and on Python's path"
    file = _file(module)
    if file is None:
        top = module.partition(".")[0]
        if here and top not in sys.modules and find_spec(top) is None:
            msg = f"{which}: no module {top!r}; is its folder on the path?; {looked}"
            raise ConfigError(msg)
        return
    try:
        parsed = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        if not here:  # Spark's Python may be newer, and know the syntax
            return
        said = f"{file.name}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}"
        msg = f"{which}: {said}; correct the file"
        raise ConfigError(msg) from error
    bound = [*_bindings(parsed.body), *_assigned_in_functions(parsed)]
    first = name.partition(".")[0]
    if not any(one in {first, "*", "__getattr__"} for one, _ in bound):
        msg = f"{which}: module {module!r} has no {name!r}; {looked}"
        raise ConfigError(msg)
    found = [what for one, what in bound if one == name]
    if len(found) == 1 and isinstance(found[0], _FUNCTION) and not found[0].decorator_list:
        _check_parameters(found[0], {*reads, *GIVEN, *([STATE] if state else [])})


def no_such_read(name: str, parameter: str, there: Collection[str]) -> ConfigError:
    """Return the error for a parameter that is neither a read nor given otherwise."""
    return ConfigError(f"transform {name}: no read named {parameter!r}; there is {', '.join(sorted(there))}")


def _file(module: str) -> Path | None:
    """Return the source file of a module in spark_jobs/; None: it is not there."""
    path = spark_jobs().joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _bindings(body: Collection[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield each name that a module may bind, and by what; `*`: any name."""
    for statement in body:
        if isinstance(statement, (*_FUNCTION, ast.ClassDef)):
            yield statement.name, statement
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], statement) for alias in statement.names)
            continue
        for part in ast.walk(statement):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id, part
            elif isinstance(part, ast.Name) and part.id in {"globals", "exec", "vars", "setattr"}:
                yield "*", part
            elif isinstance(part, ast.stmt) and part is not statement:
                yield from _bindings([part])


def _assigned_in_functions(parsed: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the module's names that its functions may bind by `global`."""
    for part in ast.walk(parsed):
        if isinstance(part, ast.Global):
            yield from ((name, part) for name in part.names)


def _check_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, there: Collection[str]) -> None:
    """Raise ConfigError for a parameter without a default that is neither a read nor given otherwise."""
    taken = function.args
    positional = [*taken.posonlyargs, *taken.args]
    wanted = positional[: len(positional) - len(taken.defaults)]
    wanted += [one for one, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default is None]
    for parameter in wanted:
        if parameter.arg not in there:
            raise no_such_read(function.name, parameter.arg, there)
