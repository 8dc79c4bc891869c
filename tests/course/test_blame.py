"""A check blames a wrong answer for the mistake that was made, and a right answer in another style for nothing.

Every wrong answer with its mistake is in the kill matrix. The answers here are near a known mistake, but not it.
"""

from __future__ import annotations

import contextlib
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from ringlab import errors
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.loading import load_exercise, load_stage
from ringlab_course.checking.positions import expect_shares
from ringlab_course.checking.reports import run_in_process
from ringlab_course.checking.subject import Measured
from ringlab_course.exercises.e07_causal_imbalance import relation as e07_relation
from ringlab_course.exercises.e07_causal_imbalance import work as e07_work
from ringlab_course.exercises.e15_choosing import choose as e15_choose
from tests.course.submissions_of import solution_code

pytestmark = pytest.mark.thorough


def failing(stage_id: str, only: str | None = None, **mine: object) -> dict[str, str | None]:
    """Return the failing checks with the mistakes that they name, if functions in `mine` replace right ones.

    only: the one check to run, in place of all checks of the stage.
    """
    stage = load_stage(stage_id)
    if only:
        stage = replace(stage, checks=(replace(stage.check(only), kind="correctness"),))
    report = run_in_process(stage, solution_code(stage_id[:2]) | mine, tier="all", seed=1)
    assert not any(check.broken for check in report.checks)
    return {check.id: check.misconception for check in report.checks if not check.ok}


class Stands:
    """A subject that gives right answers to calls with short runs, and crashes in calls with long runs."""

    function = "work_per_step"

    def __init__(self, function: str, message: str) -> None:
        self.answer, self.message = solution_code("07")[function], message

    def call(self, *args):
        if max(np.ravel([run[-1] for run in (args if isinstance(args[0], tuple) else args[0][0])])) > 5000:
            raise Crashed(self.message)
        return self.answer(*args)

    def measure(self, *args):
        return Measured(self.answer(*args), 0)


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("`f` did not end within 20 s.", "too_slow"),
        ("`f` ended its process, or used more than the 4 GiB of memory it may use.", "builds_masks"),
        ("`f` raised KeyError.", None),
    ],
)
def test_07_a_count_that_runs_out_of_time_or_memory_is_told_why(message, name) -> None:
    with pytest.raises(Failure) as failure:
        e07_work._check_million(Stands("work_per_step", message), np.random.default_rng(0))
    assert failure.value.misconception == name
    with pytest.raises(Failure) as failure:
        e07_relation._check_long(Stands("tiles_between", message), np.random.default_rng(0))
    assert failure.value.misconception == (name and "builds_the_mask")


def test_08_an_empty_array_of_floats_is_refused_and_the_remedy_told() -> None:
    with pytest.raises(Failure, match=r"dtype=np\.int64"):
        expect_shares([np.array([0, 1]), np.array([])], 2)
    assert [len(x) for x in expect_shares([np.array([0, 1]), np.zeros(0, np.int64)], 2)] == [2, 0]


@pytest.mark.parametrize(
    "answer",
    [np.full((100_000, 3), 10**6), [(0, 1, 10**9), (0, 1, 3 - 10**9)]],
    ids=["many runs", "lengths that cancel"],
)
def test_08_runs_that_nobody_could_own_cost_the_judge_no_memory(answer) -> None:
    tracemalloc.start()
    try:
        report = run_in_process(load_stage("08.runs"), {"runs": lambda *args: answer})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.earned == 0 and not any(check.broken for check in report.checks)
    assert peak < 64 << 20


def test_09_couriers_in_one_exchange_with_the_blocks_cost_nothing_but_time() -> None:
    """A program with P exchanges instead of 2P − 1 fails only the check of the clock."""
    RIGHT = solution_code("09")

    def together(ring, dout, q, k, v, out, lse, positions, window):
        P, delta = ring.world_size, RIGHT["row_delta"](dout, out)
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (q, k, v))
        for step in range(P):
            distance = positions[ring.rank][:, None] - positions[ring.origin(step)]
            mask = (distance >= 0) & (distance < window)
            if mask.any():
                part = ring.compute("step", RIGHT["block_backward"], dout, q, k, v, lse, delta, mask)
                dq, dk, dv = dq + part[0], dk + part[1], dv + part[2]
            due = len(positions[ring.origin(step + 1)])
            if step < P - 1:
                k, v, dk, dv = ring.shift(k, v, dk, dv, length=due)
            elif P > 1:
                dk, dv = ring.shift(dk, dv, length=due)
        return dq, dk, dv

    assert failing("09.couriers", ring_backward=together) == {"hidden": "nothing_hidden"}


def test_09_bfloat16_is_blamed_for_small_errors_and_a_wrong_type_alone() -> None:
    block, ring = solution_code("09")["block_backward"], solution_code("09")["ring_backward"]

    def only_here(factor):
        return lambda *inputs: tuple(
            part * (factor if inputs[1].dtype == torch.bfloat16 else 1) for part in block(*inputs)
        )

    def rounded(dq=False):
        def ring_backward(*inputs, **others):
            grads = ring(*inputs, **others)
            return tuple(x.bfloat16().float() if (n == 0) == dq else x for n, x in enumerate(grads))

        return ring_backward

    assert failing("09.block", block_backward=only_here(1.005)) == {"bfloat16": "block_in_bfloat16"}
    assert failing("09.block", block_backward=only_here(1.5)) == {"bfloat16": None}
    assert failing("09.couriers", "bfloat16", ring_backward=rounded()) == {"bfloat16": "narrow_couriers"}
    assert failing("09.couriers", "bfloat16", ring_backward=rounded(dq=True)) == {"bfloat16": None}


def test_11_a_ring_that_asks_for_lengths_has_no_mismatch_to_let_through() -> None:
    """A ring that exchanges lengths first is right for unequal blocks, and passes the check of other errors."""
    RIGHT = solution_code("11")

    def asks(ring, q, k, v):
        told = [k.shape[-2]] * ring.world_size
        with contextlib.suppress(errors.PeerDiedError):
            told = [int(n) for n in ring.all_gather(torch.tensor([k.shape[-2]]))]
        (out, lse), seen = RIGHT["nothing_seen"](q), []
        for step in range(ring.world_size):
            out, lse = RIGHT["attend"](q, k, v, out, lse)
            seen.append(ring.origin(step))
            if step < ring.world_size - 1:
                k, v = ring.shift(k, v, length=told[ring.origin(step + 1)])
        return out, lse, seen

    assert "other_errors" not in failing("11.lost", ring_with_losses=asks)


def drawn(seed: int):
    return e15_choose._drawn(
        np.random.default_rng(seed), lambda x: e15_choose._problem((8, 4), 8, 128, ratio=2 * x)
    )


def test_15_what_hangs_on_rounding_is_not_asked() -> None:
    """Problems that rounding decides are not drawn: ties, a hop as long as its block, memory exact to the byte."""
    clear = drawn(2)
    assert e15_choose.is_clear(clear)
    tie = e15_choose._problem((8, 8), 2, 128, ratio=2.0)
    even = e15_choose._problem((8, 4), 8, 128, ratio=1.0)
    exact = e15_choose._tight(clear, "ring", 1, 1.0)
    assert not any(map(e15_choose.is_clear, (tie, even, exact)))


def test_15_a_report_out_of_order_or_with_strange_rows_is_told_so() -> None:
    given = e15_choose._tight(drawn(3), "ring", 1, 0.98 * 1.5)
    report = solution_code("15")["choose"](given.layer, given.S, given.P, given.machine)
    e15_choose.read(report, given)
    for wrong, told in (
        (report[::-1], "comes before one that can"),
        (report + report[:1], "twice"),
        ([*report[:-1], report[-1] | {"ulysses": 5}], "an option that does not exist"),
        ([report[0] | {"exposed_s": float("nan")}, *report[1:]], "finite"),
        ([report[0] | {"note": ""}, *report[1:]], "should have the keys"),
        (report[1:], "missing"),
    ):
        with pytest.raises(Failure, match=told):
            e15_choose.read(wrong, given)


def test_21_shares_that_are_right_but_not_ascending_are_told_so() -> None:
    """The message about shares that do not ascend does not call an owner wrong, because every owner is right."""
    from ringlab_course.checking.in_process import InProcessSubject
    from ringlab_course.exercises.e21_capstone import parts

    def owned(layout: str, S: int, P: int) -> list[torch.Tensor]:
        return [torch.tensor(part).flip(0) for part in parts.owned(layout, S, P)]

    for check in load_exercise("21").stage("21.owned").checks:
        with pytest.raises(Failure, match="not in ascending order"):
            check.run(InProcessSubject(load_stage("21.owned"), {"owned": owned}), np.random.default_rng(3))
