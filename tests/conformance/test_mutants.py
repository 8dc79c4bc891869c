"""Every wrong ring is found by the check that is named for it; the plain rings pass them all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ringlab.conformance import checks, plain_ring
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.mutants.mutant import Mutant
from ringlab.conformance.runner import check


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    report = check(mutant.target(), quick=True, only=(mutant.found_by,), isolate=False)
    assert report.failed == [mutant.found_by], report.findings[-1].evidence


def test_the_plain_ring_passes() -> None:
    """With one seed; the committed sweep has it pass fifty."""
    report = check(plain_ring.attend, quick=True, isolate=False)
    assert report.failed == []
    assert all(finding.applies for finding in report.findings)


def test_there_are_mutants_of_all_kinds() -> None:
    kinds = Counter(mutant.kind for mutant in MUTANTS.values())
    assert len(MUTANTS) >= 18 + 20
    assert set(kinds) == {"forward", "mask", "backward", "communication", "memory", "precision", "behaviour"}
    assert min(kinds.values()) >= 4


def test_every_check_finds_a_mutant_that_is_named_for_it() -> None:
    finders = {mutant.found_by for mutant in MUTANTS.values()}
    assert {each.name for each in checks.CHECKS} - finders == set()


def test_a_change_that_does_not_apply_once_is_an_error() -> None:
    with pytest.raises(ValueError, match="got 0 times"):
        Mutant("absent", "forward", "", (("nothing like this", ""),), "forward").source()
    with pytest.raises(ValueError, match="got [1-9][0-9]* times"):
        Mutant("often", "forward", "", (("return", ""),), "forward").source()


def test_a_mutant_can_be_named_on_the_command_line() -> None:
    import ringlab.conformance.mutants as mutants

    assert mutants.averages_blocks.name == "averages_blocks"
    with pytest.raises(AttributeError):
        mutants.no_such_mutant


def test_the_plain_ring_is_the_text_that_is_changed() -> None:
    from ringlab.conformance.mutants.mutant import SOURCE

    assert Path(plain_ring.__file__).read_text(encoding="utf-8") == SOURCE
