"""The judge in its sandbox says of a submission what `check()` says in the notebook."""

from __future__ import annotations

import pytest

from tests.course import sandboxed, seeds

SAMPLE = (
    "00/wrong_dealt_heads",
    "01/wrong_lse_in_base_two",
    "02/right_merge",
    "03/wrong_forward_no_rescale",
    "05/wrong_step_drops_the_state",
    "08/wrong_balance_half_the_square",
    "10/wrong_by_own_size",
)
"""Of 04, 06, 07 and 12 other tests grade some; `python -m tests.course.sandboxed` grades all of all."""


@pytest.mark.needs_bwrap
@pytest.mark.parametrize("name", SAMPLE)
def test_the_judge_and_the_notebook_say_the_same(name):
    assert sandboxed.differences(name) == []


@pytest.mark.needs_bwrap
def test_a_difference_is_seen(monkeypatch):
    monkeypatch.setattr(sandboxed, "namespace_of", lambda name: seeds.namespace_of("00/right_plain"))
    told = sandboxed.differences("00/wrong_dealt_heads")
    assert any("00.axes:one-sequence: holds, judge dealt_heads" in line for line in told), told


def test_what_was_graded_differed_in_nothing():
    """`python -m tests.course.sandboxed` grades what is not there, or was changed since."""
    entries = seeds.read(sandboxed.RESULTS)
    assert entries and set(entries) <= set(seeds.wants())
    for name, entry in entries.items():
        assert not entry["faults"], name
        assert name.endswith("/solution") or entry["submission"] == seeds.digest(name), (
            f"{name} was changed: python -m tests.course.sandboxed"
        )
