"""The command `reconcile`: show and record what a restored record has forgotten and its sinks hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from twophase.cli.output import Json, complain, listing, print_json, say, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twophase.reconciliation import Survey

Name = Annotated[str, typer.Argument(metavar="PIPELINE", help="The pipeline's name.", show_default=False)]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(rich_help_panel="Decide")(reconcile)


def reconcile(
    pipeline: Name,
    *,
    apply: Annotated[bool, typer.Option("--apply", help="Record it, and finish it.")] = False,
    reason: Annotated[
        str | None, typer.Option(help="Why; it is kept in the events. With --apply.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the sinks hold and the record has forgotten, after it was restored; with --apply, record it.

    Exits 1 while something is missing in the record, or a sink cannot be asked.
    """
    from twophase import reconciliation
    from twophase.cli.record_access import opened
    from twophase.core.record_behind import ahead
    from twophase.wiring import coordinator_of, load

    if apply and not reason:
        msg = "--apply wants a --reason: it is kept in the events"
        raise typer.BadParameter(msg)
    with opened() as record:
        declared = load(record, pipeline)
        coordinator = coordinator_of(record, declared)
        if apply:
            found, _ = reconciliation.reconcile(record, declared, coordinator, str(reason))
        else:
            found = reconciliation.survey(record, declared, coordinator)
        left = [one for one in coordinator.transact(lambda tx: tx.unfinished(pipeline)) if one.parked_reason]
        ahead(coordinator)  # refreshes the note at the pipeline
    told = found.told()
    _tell(pipeline, found, told, as_json=as_json)
    if not apply and found:
        if not as_json:
            complain(
                f"nothing was changed; to record it: twophase reconcile {pipeline} --apply --reason …", style="dim"
            )
        raise typer.Exit(1)
    if apply:
        _applied(pipeline, told, [str(one.key) for one in left], quiet=as_json)
    if found.silent:
        raise typer.Exit(1)


def _tell(pipeline: str, found: Survey, told: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Show what was found, and which sinks could not be asked."""
    if as_json:
        print_json(told)
    elif found:
        _show(told)
    elif not found.silent:
        say(f"{pipeline}: the record knows all that its sinks hold")
    for problem in found.silent:
        complain(f"{pipeline}: not asked: {problem}; reconcile again once it answers: it may know of more")


def _applied(pipeline: str, told: Sequence[Mapping[str, Any]], left: Sequence[str], *, quiet: bool) -> None:
    if told and not quiet:
        say(f"{pipeline}: {len(told)} decision{'' if len(told) == 1 else 's'} recorded again")
    if left:
        complain(f"{', '.join(left)}: parked, it needs a person: `twophase pending {pipeline}` says what to do")
        raise typer.Exit(1)


def _show(told: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        {
            **one,
            "held by": ", ".join(name for name, why in one["sinks"].items() if why is None),
            "missing": "; ".join(f"{name}: {why}" for name, why in one["sinks"].items() if why is not None),
            "input": _input(one),
        }
        for one in told
    ]
    columns = ("checkpoint_id", "revision", "commit_seq", "slot", "rows", "input", "held by", "missing", "becomes")
    names = {"checkpoint_id": "checkpoint", "revision": "rev", "commit_seq": "seq"}
    listing(rows, [(names.get(column, column), column) for column in (*columns, "problem")])


def _input(one: Mapping[str, Any]) -> str:
    """Say in a few words what a forgotten revision has read."""
    parts = []
    for source, fixed in (one.get("inputs") or {}).items():
        if "ranges" in fixed:
            ranges = ", ".join(f"{part} [{start}, {end})" for part, (start, end) in fixed["ranges"].items())
            parts.append(f"{source}: {ranges}")
        elif "files" in fixed:
            parts.append(f"{source}: {fixed['files']} file{'' if fixed['files'] == 1 else 's'}, {size(fixed['bytes'])}")
    return "; ".join(parts)
