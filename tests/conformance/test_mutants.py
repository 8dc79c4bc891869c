"""Every wrong ring is found by the check that is named for it; the plain rings pass them all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ringlab import plain_ring
from ringlab.conformance import checks
from ringlab.conformance.mutants import FILES, MUTANTS
from ringlab.conformance.mutants.mutant import SOURCE, Mutant, read
from ringlab.conformance.runner import check
from ringlab.errors import EditError


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


def test_a_hunk_that_does_not_apply_once_is_an_error_that_names_the_wrong_ring() -> None:
    with pytest.raises(EditError, match=r"wrong ring 'absent', hunk 1(.|\n)*got: 0 times"):
        Mutant("absent", "forward", "", "-nothing like this", "forward").source()
    with pytest.raises(EditError, match=r"wrong ring 'often', hunk 1(.|\n)*got: [1-9][0-9]* times"):
        Mutant("often", "forward", "", "-    return out, lse", "forward").source()


def test_every_wrong_ring_has_a_name_and_a_text_of_its_own() -> None:
    assert len(MUTANTS) == sum(len(read(path)) for path in FILES)
    texts = Counter(mutant.source() for mutant in MUTANTS.values() if not mutant.dtypes)
    assert SOURCE not in texts and set(texts.values()) == {1}


def test_a_mutant_can_be_named_on_the_command_line() -> None:
    import ringlab.conformance.mutants as mutants

    assert mutants.averages_blocks.name == "averages_blocks"
    with pytest.raises(AttributeError):
        mutants.no_such_mutant


def test_the_plain_ring_is_the_text_that_is_changed() -> None:
    assert Path(plain_ring.__file__).read_text(encoding="utf-8") == SOURCE
