"""Exercise 09: its truths against the oracle and against the package's own meter, and what only a judge gets to see."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import VirtualCluster, oracle, ring_attention
from ringlab import layout as layouts
from ringlab_course.checking.answers import relative_error
from ringlab_course.checking.backward import pair, parts_of, problem, sum_over
from ringlab_course.checking.backward_mistakes import COMPARED, WINDOWS
from ringlab_course.checking.failures import Crashed, Failure, reason
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process
from ringlab_course.exercises.e09_backward_ring import contract as e09_traffic
from ringlab_course.exercises.e09_backward_ring import ring as e09_ring
from ringlab_course.judge import grade
from tests.course.submissions_of import namespace, submission

RIGHT = namespace(submission("09/right_plain"))


def drawn(seed, layout, *sizes, **how):
    return problem(np.random.default_rng(seed), layout, *sizes, **how)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 3),
    st.booleans(),
    st.none() | st.integers(1, 20),
)
def test_the_parts_of_all_ranks_add_up_to_the_gradients_of_the_oracle(seed, P, S, group, folded, window):
    case = drawn(seed, layouts.dealt(S, P, chunk=2, folded=folded), 2 * group, 2, 3, window=window)
    for rank in range(P):
        dq, dk, dv = case.truth[rank]
        own, given_away = case.parts[rank], [case.parts[r][rank] for r in range(P)]
        for right, found in zip(
            (dq, dk, dv),
            (sum_over(own, 0, dq), sum_over(given_away, 1, dk), sum_over(given_away, 2, dv)),
            strict=True,
        ):
            assert np.allclose(found, right, rtol=0, atol=1e-5)  # lse and out were rounded to float32


def test_a_row_that_sees_no_key_at_all_adds_nothing():
    q, k, dout = (np.ones((1, 1, n, 2)) for n in (2, 3, 2))
    found = pair(dout, q, k, k, np.array([[[-np.inf, 1.0]]]), np.zeros((1, 1, 2)))
    assert np.isfinite(np.concatenate([part.ravel() for part in found])).all()
    assert (found[0][0, 0, 0] == 0).all() and (found[0][0, 0, 1] != 0).all()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([(1, 1), (4, 2)]), st.sampled_from([0.0, 150.0]), st.booleans()
)
def test_the_plainest_float32_backward_keeps_well_within_the_bound(seed, heads, lift, narrow):
    case = drawn(seed, layouts.zigzag(24, 3), *heads, 8, lift=lift, narrow=narrow)
    results = (
        VirtualCluster(3)
        .run(
            lambda ring: RIGHT["ring_backward"](
                ring, *(own[ring.rank] for own in case.per_rank), case.positions, 24
            )
        )
        .results
    )
    for rank, answer in enumerate(results):
        assert relative_error(answer, case.truth[rank]) <= case.bound(rank) / 2


@pytest.mark.parametrize("mistake", (*COMPARED, *WINDOWS), ids=lambda mistake: mistake.name)
def test_every_imitation_differs_from_the_truth_and_from_every_other(mistake):
    """On a layout in which no two ranks are alike; two names for one answer would name neither."""
    case = drawn(3, layouts.dealt(60, 5, chunk=2), 1, 1, 3, window=9)
    answers = {
        other.name: [other.imitate(rank, case) for rank in range(5)] for other in (*COMPARED, *WINDOWS)
    }
    own = answers.pop(mistake.name)
    assert max(relative_error(a, b) for a, b in zip(own, case.truth, strict=True)) > 1e-3
    for name, others in answers.items():
        assert max(relative_error(a, b) for a, b in zip(own, others, strict=True)) > 1e-3, name


def test_another_mask_another_block_or_another_lse_gives_other_parts():
    case = drawn(0, layouts.contiguous(6, 3))
    for how in (
        {"see": lambda r, o: np.eye(2, dtype=bool)},
        {"here": lambda r, o: 0},
        {"lse": lambda r, o: case.lses[r] + 1},
    ):
        assert relative_error(parts_of(case, **how)[2][1], case.parts[2][1]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("S", [16, 19])
def test_the_bytes_that_are_asked_for_are_those_of_the_package(dtype, S):
    layout = layouts.zigzag(S, 4)
    q, k, v = (torch.randn(2, heads, S, 4, dtype=dtype) for heads in (4, 2, 2))

    def program(ring):
        own = [x.requires_grad_() for x in layout.shard((q, k, v), ring.rank)]
        ring_attention(*own, ring=ring, layout=layout, block="naive").sum().backward()

    trace = VirtualCluster(4).run(program).trace
    for rank in range(4):
        sent = [event.bytes_sent for event in trace.exchanges(rank)]
        measured = [sum(sent[:3]), sum(sent[3:])]
        assert e09_traffic.truth(layout.lengths, rank, 2, 2, 4, q.element_size()).tolist() == measured


def test_the_bytes_of_the_ring_check_are_those_of_the_traffic_stage():
    for layout, narrow in (
        (layouts.zigzag(13, 3), False),
        (layouts.striped(8, 4), True),
        (layouts.contiguous(3, 1), False),
    ):
        case = drawn(0, layout, 4, 2, 6, narrow=narrow)
        for rank in range(layout.P):
            blocks, couriers = e09_ring.bytes_of(case, rank)
            expected = e09_traffic.truth(case.lengths, rank, 1, 2, 6, 2 if narrow else 4)
            assert [blocks, blocks + couriers] == expected.tolist()


@pytest.mark.parametrize(
    ("message", "told", "ragged", "name"),
    [
        ("raised MismatchError", "", True, "assumes_equal_lengths"),
        ("raised MismatchError", "", False, None),
        ("raised CommError", "a receive buffer that is also sent", False, "one_buffer"),
        ("raised CommError", "a tensor that was written while it was sent", False, "writes_what_is_sent"),
        ("raised TypeError", 'can only concatenate tuple (not "Tensor") to tuple', False, "does_not_unpack"),
        ("raised DeadlockError", "", False, "leaves_the_ring"),
        ("raised UnreceivedError", "rank 0 never waited for it", False, "never_waits"),
        ("raised KeyError", "", True, None),
    ],
)
def test_a_crash_gets_the_name_of_its_reason(message, told, ragged, name):
    assert reason(Crashed(message, told), ragged=ragged) == name


def test_couriers_in_one_exchange_with_the_blocks_are_right_and_cost_nothing_but_time():
    """P exchanges instead of 2P − 1: a fair program, which only the clock finds slower."""

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

    stage = load_exercise("09").stage("09.couriers")
    report = run_in_process(stage, RIGHT | {"ring_backward": together}, tier="all", seed=1)
    assert {check.id: check.misconception for check in report.checks if not check.ok} == {
        "hidden": "nothing_hidden"
    }


NONSENSE = {
    "nothing": None,
    "text": "x",
    "a number": 3,
    "a pair": (None, None),
    "texts": ("a", "b", "c"),
    "other shapes": (torch.zeros(1), torch.zeros(2), torch.zeros(3)),
    "numbers": (1, 2, 3),
    "half a byte": (1.5, 2),
    "no bytes": (float("nan"), 1),
    "endless": (float("inf"), 1),
    "booleans": (True, False),
}


@pytest.mark.parametrize("stage", load_exercise("09").stages, ids=lambda stage: stage.id)
def test_whatever_comes_back_a_check_can_read_it(stage):
    for name, value in NONSENSE.items():
        report = run_in_process(
            stage, {stage.function: lambda *args, value=value, **kwargs: value}, tier="all"
        )
        assert report.earned == 0 and not any(check.broken for check in report.checks), (name, report)


def test_the_name_of_a_nan_is_that_of_its_check():
    with pytest.raises(Failure) as failure:
        e09_ring._check_values(_Answers(float("nan")), np.random.default_rng(0))
    assert failure.value.misconception == "reads_before_waiting"


class _Answers:
    """A subject whose ranks all answer the same number everywhere."""

    def __init__(self, value):
        self.value = value

    def run_ring(self, world_size, *per_rank, faults=None, positions=None, window=None):
        results = [
            tuple(torch.full(x[r].shape, self.value) for x in per_rank[1:4]) for r in range(world_size)
        ]
        return type("Outcome", (), {"results": results})


def written(folder, code, stage):
    cell = {"cell_type": "code", "id": "x", "metadata": {"grade": stage}, "source": code, "outputs": []}
    path = folder / "09_backward_ring.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]}))
    return path


@pytest.mark.needs_bwrap
@pytest.mark.parametrize(
    "name",
    [
        "couriers_keeps_every_block",
        "couriers_writes_what_is_sent",
        "couriers_narrow_couriers",
    ],
)
def test_the_judge_finds_in_the_sandbox_what_the_notebook_finds(tmp_path, name):
    """The judge reads memory from the system, keeps the clock and routes every message itself."""
    wrong = submission(f"09/wrong_{name}")
    expected = wrong.expected
    report = grade(written(tmp_path, wrong.source, expected.stage), "09", seed=1)
    stage = next(stage for stage in report.stages if stage.stage == expected.stage)
    check = next(check for check in stage.checks if check.id == expected.check)
    assert not check.ok and check.misconception == expected.misconception, check


@pytest.mark.needs_bwrap
def test_the_judge_gives_a_right_answer_all_points(tmp_path):
    report = grade(written(tmp_path, submission("09/right_two_buffers").source, "09.delta"), "09", seed=2)
    assert report.ok and report.earned == report.points, [
        c for s in report.stages for c in s.checks if not c.ok
    ]


def test_the_oracle_counts_the_heads_that_share_a_key():
    """dk of a shared head is the sum over its query heads: twice the same head, twice the gradient."""
    case = drawn(5, layouts.contiguous(4, 1), 1, 1, 3)
    double = [torch.cat([x, x], dim=1) for x in (case.qs[0], case.douts[0])]
    one = oracle.gradients(case.qs[0], case.ks[0], case.vs[0], case.douts[0], causal=True)
    two = oracle.gradients(double[0], case.ks[0], case.vs[0], double[1], causal=True)
    assert np.allclose(two.dk, 2 * one.dk) and np.allclose(two.dv, 2 * one.dv)


def failing(stage_id, only=None, **mine):
    """Which checks of a stage (or `only` this one) find the right answer wrong with these functions in it, and how they call it."""
    stage = load_exercise("09").stage(stage_id)
    if only:
        stage = replace(stage, checks=(replace(stage.check(only), kind="correctness"),))
    report = run_in_process(stage, RIGHT | mine, tier="all", seed=1)
    assert not any(check.broken for check in report.checks)
    return {check.id: check.misconception for check in report.checks if not check.ok}


def test_couriers_on_a_second_lap_have_right_values_and_are_told_of_the_hop_that_they_save():
    """All terms are kept until the blocks have been everywhere; then the couriers set out, empty of their owner's."""

    def second_lap(ring, dout, q, k, v, out, lse, positions, window):
        P, delta, lengths = ring.world_size, RIGHT["row_delta"](dout, out), [len(own) for own in positions]
        dq, terms = torch.zeros(q.shape, dtype=lse.dtype), {}
        for step in range(P):
            owner = ring.origin(step)
            distance = positions[ring.rank][:, None] - positions[owner]
            mask = (distance >= 0) & (distance < window)
            part, *terms[owner] = ring.compute(
                "step", RIGHT["block_backward"], dout, q, k, v, lse, delta, mask
            )
            dq += part
            if step < P - 1:
                k, v = ring.shift(k, v, length=lengths[ring.origin(step + 1)])
        sums = [torch.zeros_like(x) for x in terms[ring.origin(1)]]
        for step in range(1, P + 1):
            owner = ring.origin(step)
            sums = [x + y for x, y in zip(sums, terms[owner], strict=True)]
            if step < P:
                sums = ring.shift(*sums, length=lengths[ring.origin(step + 1)])
        return dq, *sums

    found = failing("09.couriers", ring_backward=second_lap)
    assert found["hops"] == "starts_after_the_owner"
    assert not {"values", "window", "layouts", "ragged", "bfloat16"} & set(found)


COSTS = {check.id for check in load_exercise("09").stage("09.couriers").checks if check.kind != "correctness"}


def test_messages_work_and_memory_earn_nothing_with_wrong_values():
    """Zeros after the right messages, everywhere or only where a check measures: each run that is measured is compared."""
    right = RIGHT["ring_backward"]

    def zeros(*inputs, **others):
        return tuple(0 * part for part in right(*inputs, **others))

    def zeros_if_large(*inputs, **others):
        return (zeros if inputs[2].shape[-1] > 1000 else right)(*inputs, **others)

    assert COSTS <= set(failing("09.couriers", ring_backward=zeros))
    assert set(failing("09.couriers", ring_backward=zeros_if_large)) == {"memory"}


def test_a_wrong_block_is_not_called_a_rounded_courier():
    """Without the scale everything is off by much; bfloat16 couriers are off by little, and dq is right."""
    block, ring = RIGHT["block_backward"], RIGHT["ring_backward"]

    def unscaled(dout, q, k, v, lse, delta, mask=None):
        return block(dout, 4 * q, k, v, lse, delta, mask)

    def rounded(*inputs, **others):
        dq, dk, dv = ring(*inputs, **others)
        return dq, dk.bfloat16().float(), dv.bfloat16().float()

    def rounded_dq(*inputs, **others):
        dq, dk, dv = ring(*inputs, **others)
        return dq.bfloat16().float(), dk, dv

    space = RIGHT["ring_backward"].__globals__
    space["block_backward"] = unscaled
    try:
        assert failing("09.couriers", "bfloat16", block_backward=unscaled) == {"bfloat16": None}
    finally:
        space["block_backward"] = block
    assert failing("09.couriers", "bfloat16", ring_backward=rounded) == {"bfloat16": "narrow_couriers"}
    assert failing("09.couriers", "bfloat16", ring_backward=rounded_dq) == {"bfloat16": None}


def test_bytes_may_be_numbers_of_numpy_or_torch():
    count = RIGHT["bytes_sent"]

    def as_array(*inputs):
        return tuple(np.array(part) for part in count(*inputs))

    for kind in (np.int64, torch.tensor, float):
        assert not failing("09.traffic", bytes_sent=lambda *x, kind=kind: tuple(map(kind, count(*x))))
    assert not failing("09.traffic", bytes_sent=as_array)


def test_bfloat16_is_blamed_for_what_it_does_and_for_nothing_else():
    """For a dtype, for a crash over dtypes and for small errors; a float64 result or a large error has another reason."""
    block, delta = RIGHT["block_backward"], RIGHT["row_delta"]

    def converted(dtype):
        return lambda *inputs: tuple(part.to(dtype) for part in block(*inputs))

    def mixed(dout, q, k, v, lse, own, mask=None):
        return block(dout, q, k, v, lse, own, mask)[0] + 0 * (lse[..., None].mT @ dout).sum(), None, None

    def only_here(factor):
        return lambda *inputs: tuple(
            part * (factor if inputs[1].dtype == torch.bfloat16 else 1) for part in block(*inputs)
        )

    assert failing("09.block", block_backward=converted(torch.bfloat16))["bfloat16"] == "block_in_bfloat16"
    assert failing("09.block", block_backward=mixed)["bfloat16"] == "block_in_bfloat16"
    assert failing("09.block", block_backward=only_here(1.005)) == {"bfloat16": "block_in_bfloat16"}
    assert failing("09.block", block_backward=only_here(1.5)) == {"bfloat16": None}
    assert failing("09.block", block_backward=converted(torch.float64)) == {"bfloat16": None}
    assert failing("09.delta", row_delta=lambda dout, out: delta(dout, out).double()) == {"bfloat16": None}
    assert (
        failing("09.delta", row_delta=lambda dout, out: delta(dout, out).bfloat16())["bfloat16"]
        == "delta_in_bfloat16"
    )
