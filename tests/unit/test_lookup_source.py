"""A lookup table: read as it stands, fixed by nobody. And what a plan carries of an input. No Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twophase import Pipeline, sinks, sources
from twophase.core.checkpoint import Input, InputFile, Key, Output
from twophase.core.errors import BadRecord, ConfigError, InputChanged
from twophase.sources import Lookup
from twophase.sources.base import Source
from twophase.spark.plan import Plan, PlannedRead, PlannedWrite


@pytest.fixture
def countries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOPHASE_HOME", str(tmp_path))
    folder = tmp_path / "data" / "reference" / "countries"
    folder.mkdir(parents=True)
    return folder


def lookup(**arguments: Any) -> Lookup:
    return Lookup("reference/countries", **arguments)


def test_the_declaration_builds_an_equal_source(countries: Path) -> None:
    table = lookup(format="csv", schema="code string", options={"sep": ";"})

    again = Source.load(json.loads(json.dumps(table.declaration())))

    assert (
        again.config()
        == table.config()
        == {
            "path": str(countries),
            "format": "csv",
            "schema": "code string",
            "options": {"sep": ";"},
        }
    )


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="lookup source reference/countries: format 'orc': expected one of"):
        lookup(format="orc")


def test_it_is_not_fixed_and_brings_no_new_input(countries: Path) -> None:
    table = lookup()

    fixed = table.fix(None, None)  # type: ignore[arg-type]

    assert fixed == Input(unversioned=str(countries))
    assert not fixed
    assert (table.unversioned, table.slotted, table.per_revision, table.settles) == (True, False, False, False)


def test_a_missing_table_is_named(countries: Path) -> None:
    lookup().prepare()
    countries.rmdir()

    with pytest.raises(ConfigError, match=f"no file or folder {countries}; create it"):
        lookup().prepare()
    with pytest.raises(InputChanged, match=f"expected a file or folder {countries}, found nothing"):
        lookup().check(Input())


def test_its_content_may_change(countries: Path) -> None:
    (countries / "a.json").write_text("{}")
    fixed = Input(unversioned=str(countries))
    (countries / "a.json").write_text("{} {}")

    lookup(format="json").check(fixed)


def test_a_pipeline_cannot_write_into_what_it_looks_things_up_in(countries: Path) -> None:
    landing = sources.Files("landing", format="json")

    with pytest.raises(ConfigError, match="overlap at"):
        Pipeline(
            "orders",
            reads={"orders": landing, "countries": lookup()},
            transform="orders:transform",
            writes={"lake": sinks.Files("reference/countries")},
        )


@pytest.mark.parametrize("alone", [True, False])
def test_a_bad_record_is_named_by_file_and_line(countries: Path, alone: bool) -> None:
    if alone:
        countries.rmdir()
    file = countries if alone else countries / "a.json"
    file.write_text('{"code": "de"}\n{"code": \n')

    found = lookup(format="json").explain(Input(), RuntimeError("[MALFORMED_RECORD_IN_PARSING]"))

    assert isinstance(found, BadRecord)
    assert f"file reference/countries{'' if alone else '/a.json'}, line 2: not JSON" in str(found)


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_carries_every_kind_of_input(tmp_path: Path) -> None:
    expected = {
        "landed": Input(files=(InputFile("a.json", 1, 2),), checkpoint_id=1),
        "topic": Input(ranges={"0": (3, 4)}, marks={"0": {"epoch": 5}}, checkpoint_id=1),
        "versions": Input(files=(InputFile("b.parquet", 1, 2, "x"),), table={"version": 7}, checkpoint_id=1),
        "nothing": Input(checkpoint_id=1),
        "table": Input(
            ranges={"commit_seq": (1, 3)},
            outputs=(Output(Key("up", 17, 2), 3, {"name": "x"}, {"rows": 5}),),
            upstream={"sink": {"class": "twophase.sinks:Files", "path": "/lake"}, "schema": None},
            checkpoint_id=1,
        ),
        "names": Input(unversioned="/reference", checkpoint_id=1),
    }
    plan = Plan(
        *Key("wc", 1, 1),
        attempt=1,
        slot=None,
        transform=None,
        reads={name: PlannedRead({"class": name}, fixed) for name, fixed in expected.items()},
        writes={
            "lake": PlannedWrite({"class": "Files"}, {"name": "x"}),
            "other": PlannedWrite({}, None, [["a", "int"]], "landed"),
        },
    )
    plan.write(tmp_path / "plan.json")

    again = Plan.load(tmp_path / "plan.json")

    assert again == plan
    assert {name: again.fixed(name) for name in again.reads} == expected
