"""Exercise 09: its expected values agree with the oracle and the package's meter; mistakes are told apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlab import VirtualCluster, ring_attention
from ringlab import layout as layouts
from ringlab_course.checking.backward import problem, sum_over
from ringlab_course.checking.loading import load_exercise
from ringlab_course.checking.reports import run_in_process
from ringlab_course.exercises.e09_backward_ring import traffic
from tests.course.submissions_of import namespace, submission

pytestmark = pytest.mark.thorough

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
        assert traffic.truth(layout.lengths, rank, 2, 2, 4, q.element_size()).tolist() == measured


def test_couriers_in_one_exchange_with_the_blocks_are_right_and_cost_nothing_but_time():
    """A program with P exchanges instead of 2P − 1 fails only the check of the clock."""

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


def failing(stage_id, only=None, **mine):
    """Return the failing checks, and the mistakes that they name, if functions in `mine` replace right ones.

    only: the one check to run, in place of all checks of the stage.
    """
    stage = load_exercise("09").stage(stage_id)
    if only:
        stage = replace(stage, checks=(replace(stage.check(only), kind="correctness"),))
    report = run_in_process(stage, RIGHT | mine, tier="all", seed=1)
    assert not any(check.broken for check in report.checks)
    return {check.id: check.misconception for check in report.checks if not check.ok}


def test_a_wrong_block_is_not_called_a_rounded_courier():
    """Large errors are not blamed on bfloat16 couriers, whose errors are small and leave dq right."""
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
    """bfloat16 is blamed for a wrong dtype, a crash over dtypes or small errors, but not for large errors."""
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
