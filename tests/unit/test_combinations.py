"""The matrices of crashes: what `make chaos` leaves out of them is tried in other combinations."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product

from support.crashes import sink_matrix
from support.crashes.combinations import Case, covering, marks, pairs


def test_every_pair_of_values_is_met_by_fewer_cases() -> None:
    cases = list(product("abcdef", range(5), ("kill", "raise")))

    taken = covering(cases, pairs)

    assert {pair for case in taken for pair in pairs(case)} == {pair for case in cases for pair in pairs(case)}
    assert len(taken) < len(cases) * 0.7


def test_usual_cases_count_and_the_same_cases_are_chosen_in_whatever_order_they_come() -> None:
    cases = list(product("abcd", range(4), ("kill", "raise")))
    usual = [("a", 0, "kill"), ("b", 1, "raise")]

    taken = covering(cases, pairs, usual)

    assert taken.issuperset(usual)
    assert covering(cases[::-1], pairs, usual) == taken
    assert [len(marks(case, taken, usual)) for case in usual] == [0, 0]
    assert {len(marks(case, taken, usual)) for case in cases if case not in taken} == {2}


def test_a_new_value_is_met_with_each_of_the_others() -> None:
    old = list(product("abcd", range(4)))

    taken = covering([*old, *product("e", range(4))], pairs, old)

    assert taken.issuperset(product("e", range(4)))


def test_every_failpoint_way_to_die_sink_and_mode_is_met_with_each_other() -> None:
    """What the crash tests promise of sinks is tried for each pair that there is, whatever is left out."""
    chosen = sink_matrix.CHOSEN

    for first, second in ((2, 3), (0, 1), (1, 3), (0, 2), (0, 3)):
        there = {(case[first], case[second]) for case in sink_matrix.CASES}
        assert {(case[first], case[second]) for case in chosen} == there
    assert _points_of_single_sinks(chosen) == _points_of_single_sinks(sink_matrix.CASES)
    assert len(chosen) < len(sink_matrix.CASES) / 3


def test_where_a_sink_is_at_work_it_is_met_whatever_the_process_is_about() -> None:
    inside = {case[:3] for case in sink_matrix.CASES if case[2] in sink_matrix.OF_SINKS}

    assert {case[:3] for case in sink_matrix.CHOSEN} >= inside


def _points_of_single_sinks(cases: Collection[Case]) -> set[tuple[str, str]]:
    return {(kinds, point) for _, kinds, point, _ in cases if "+" not in kinds}
