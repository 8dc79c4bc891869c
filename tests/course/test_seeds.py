"""Right answers pass and wrong ones fail by their mistake, whatever probes are drawn.

The judge in its sandbox reports the same about a submission as `check()` does in the notebook.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringlab_course.checking.wrong_answers import WrongAnswer
from tests.course import sandboxed, seeds
from tests.course.submissions_of import cases, submission

CHEAP = ("00",)
"""The exercise that runs here with all seeds. The committed sweep has the results of the others."""


@pytest.mark.thorough
@pytest.mark.parametrize("exercise_id", cases(CHEAP))
def test_on_twenty_draws_right_answers_hold_and_wrong_ones_fall_for_their_reason(exercise_id):
    assert len(set(seeds.SEEDS)) == 20
    names = [name for name in seeds.wants() if name.startswith(exercise_id)]
    assert f"{exercise_id}/solution" in names
    found = {name: seeds.over_seeds(name, seeds.SEEDS)["faults"] for name in names}
    assert not any(found.values()), {name: lines for name, lines in found.items() if lines}


def test_what_was_swept_had_no_fault():
    """The sweep over seeds is fresh and has no fault; `python -m tests.course.seeds` renews it."""
    entries = seeds.read(seeds.RESULTS)
    assert set(entries) <= set(seeds.wants())
    right = {name for name in seeds.wants() if "/wrong_" not in name}
    assert right <= set(entries), f"not swept: {sorted(right - set(entries))}: python -m tests.course.seeds"
    for name, entry in entries.items():
        assert entry["seeds"] >= seeds.FEWEST and not entry["faults"], name
        assert entry["submission"] == seeds.digest(name), f"{name} was changed: python -m tests.course.seeds"


def test_a_sweep_sees_a_right_answer_that_is_not_and_a_wrong_one_that_falls_otherwise(monkeypatch):
    named = WrongAnswer("not_so", "00.axes", "batch", "one_sequence", "solution", "")
    split = "def split_heads(x, heads):\n    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)\n"
    given = {
        "00/right_no_ring": SimpleNamespace(source="def ring_sum(ring, x):\n    return x\n"),
        "00/wrong_not_so": SimpleNamespace(source=split, expected=named),
    }
    for name, each in given.items():
        each.name = name
    monkeypatch.setattr(seeds, "submission", given.__getitem__)
    found = seeds.over_seeds("00/right_no_ring", seeds.SEEDS[:2])["faults"]
    assert len(found) == 2 and any("00.ring:sum" in line for lines in found.values() for line in lines)
    (lines,) = seeds.over_seeds("00/wrong_not_so", seeds.SEEDS[:1])["faults"].values()
    assert lines == ["00.axes:batch: holds"]


def test_an_entry_is_stale_when_the_submission_or_its_contract_changes(monkeypatch):
    entry = {
        "submission": seeds.digest("00/right_otherwise"),
        "contract": seeds.contract_digest("00"),
        "seeds": 20,
        "faults": {},
    }
    assert seeds.is_fresh("00/right_otherwise", entry, 20)
    assert not seeds.is_fresh("00/right_otherwise", {**entry, "contract": "another"}, 20)
    assert not seeds.is_fresh("00/right_otherwise", {**entry, "submission": "another"}, 20)
    assert not seeds.is_fresh("00/right_otherwise", {**entry, "seeds": 3}, 20)
    assert not seeds.is_fresh("00/right_otherwise", {**entry, "faults": {"1": ["x"]}}, 20)
    assert not seeds.is_fresh("00/right_otherwise", None, 20)


@pytest.mark.parametrize("change, stays", [("# Another comment.\n", True), ("another = 1\n", False)])
def test_a_digest_changes_with_the_code_alone(monkeypatch, change, stays):
    before = seeds.digest("00/right_otherwise"), seeds.digest("00/solution")
    source = seeds.source
    monkeypatch.setattr(seeds, "source", lambda name: source(name) + change)
    after = seeds.digest("00/right_otherwise"), seeds.digest("00/solution")
    assert [old == new for old, new in zip(before, after, strict=True)] == [stays, stays]


SAMPLE = (
    "00/wrong_dealt_heads",
    "01/wrong_lse_in_base_two",
    "02/right_merge",
    "04/wrong_visits_hidden_tiles",
    "05/wrong_forward_keeps_every_block",
    "05/wrong_step_drops_the_state",
    "06/wrong_overlap_keeps_old_pieces",
    "07/wrong_work_builds_masks",
    "07/wrong_ring_computes_hidden_blocks",
    "08/wrong_balance_half_the_square",
    "09/wrong_couriers_keeps_every_block",
    "09/wrong_couriers_writes_what_is_sent",
    "10/wrong_by_own_size",
    "13/wrong_straggler_ignores_clocks",
    "14/right_by_hand",
    "14/wrong_step_computes_everything",
    "15/wrong_decode_empty_stays_away",
    "17/wrong_forward_branch",
)
"""Submissions whose values, memory, clocks or messages the judge measures in its own way. `python -m
tests.course.sandboxed` grades all submissions.
"""


@pytest.mark.thorough
@pytest.mark.needs_bwrap
@pytest.mark.parametrize("given", cases(map(submission, SAMPLE)))
def test_the_judge_and_the_notebook_say_the_same(given):
    assert sandboxed.differences(given.name) == []


@pytest.mark.needs_bwrap
def test_a_difference_is_seen(monkeypatch):
    monkeypatch.setattr(sandboxed, "namespace_of", lambda name: seeds.namespace_of("00/right_otherwise"))
    told = sandboxed.differences("00/wrong_dealt_heads")
    assert any("00.axes:shape: holds, judge dealt_heads" in line for line in told), told


def test_what_was_graded_differed_in_nothing():
    """The judge's record is fresh and has no difference; `python -m tests.course.sandboxed` renews it."""
    entries = seeds.read(sandboxed.RESULTS)
    assert entries and set(entries) <= set(seeds.wants())
    for name, entry in entries.items():
        assert not entry["faults"], name
        current = entry["submission"] == seeds.digest(name)
        assert current, f"{name} was changed: python -m tests.course.sandboxed"
