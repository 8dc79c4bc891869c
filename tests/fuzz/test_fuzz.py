"""A short run of the fuzzer in every test run; `python -m tests.fuzz` makes longer ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz.bugs import PARSER, READER
from tests.fuzz.engine import TARGETS, fuzz, fuzz_beside, input_of

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
INPUTS = 6000
BUGS = [("protocol", name) for name in PARSER] + [("notebooks", name) for name in READER]


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_makes_it_crash_or_hang(target) -> None:
    fuzzed = fuzz(target, 7, range(INPUTS))
    assert not fuzzed.findings and fuzzed.inputs == INPUTS
    assert set(fuzzed.outcomes) >= {"read", "refused"}
    assert min(fuzzed.outcomes["read"], fuzzed.outcomes["refused"]) > INPUTS // 10, "inputs of one kind only"


@pytest.mark.parametrize(("target", "bug"), BUGS, ids=[bug for _, bug in BUGS])
def test_every_planted_bug_is_found(target, bug, monkeypatch) -> None:
    (PARSER if target == "protocol" else READER)[bug](monkeypatch)
    assert fuzz(target, 7, range(INPUTS), hang_s=0.5, enough=1).findings


def test_an_input_can_be_had_again() -> None:
    for target in TARGETS:
        assert input_of(target, 3, 11) == input_of(target, 3, 11) != input_of(target, 4, 11)


def test_a_process_that_ends_is_a_finding(monkeypatch) -> None:
    beside = fuzz_beside("protocol", 1, 40, 2)
    assert (beside.inputs, beside.findings) == (40, [])


def test_the_long_run_found_nothing() -> None:
    """The recorded long run found nothing; the record names the sources that it ran on."""
    record = json.loads((CHECKOUT / "benchmarks/results/fuzz/judge.json").read_text())
    assert set(record["targets"]) == {"protocol", "notebooks"}
    for run in record["targets"].values():
        assert run["inputs"] == sum(run["outcomes"].values()) >= 1_000_000 and run["findings"] == []
        assert min(run["outcomes"][what] for what in ("read", "refused")) > 100_000
    assert all((CHECKOUT / source).is_file() for source in record["sources"])
