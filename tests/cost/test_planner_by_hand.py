"""Times of a plan that no other test looks at one by one: the update, the merge of a token, the utilisation.

The planner's quick makespans against the simulator, which runs the ring program itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringlab.cost.flops import layout_work
from ringlab.cost.hardware import Hardware, Link, hardware
from ringlab.cost.models import model
from ringlab.cost.planner import Request, plan, ring_time
from ringlab.cost.planner.ring_time import (
    FORMULAS,
    by_formula,
    counted,
    ring_backward_s,
    ring_forward_s,
    ring_links,
)
from ringlab.cost.planner.step_time import StepTime
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import gradient_bytes_per_token
from ringlab.layout import LAYOUTS, get_layout
from tests.cost.planner_cases import ideal
from tests.cost.test_closed_form import backward_uniform_s, ring_s
from tests.cost.test_planner import pinned

NAMED = [name for name, make in LAYOUTS.items() if make in FORMULAS]


def test_an_update_reads_and_writes_every_weight_by_hand() -> None:
    """Per weight: 2 bytes and Adam's 12, read and written, and 4 of gradient read; over the 64 that share."""
    found = plan(Request("llama3-70b", 2**20, "h100", nodes=8, tp=4, ring=16, recomputation="full", fsdp=16))
    time = found.best.time
    assert isinstance(time, StepTime)
    assert time.update_s == pytest.approx((2 * (2 + 12) + 4) * 70.554e9 / 64 / 3.35e12, rel=1e-4)
    layers = 80 * sum(each.total_s for each in time.passes)
    assert time.total_s == pytest.approx(layers + time.vocabulary_s + time.update_s)
    assert plan(pinned()).best.time.update_s == 0  # type: ignore[union-attr]


def test_merging_partial_outputs_of_a_token_by_hand() -> None:
    """Each of 80 layers: 8 ranks gather 32 heads' outputs and log-sum-exps, 129 float32 a head, of 3 sequences."""
    machine = ideal(inside=300e9, ranks_per_node=8, memory_bytes=1e12)
    timed = replace(machine, inside=Link("inside", 300e9, 2e-6, "made up"))
    request = Request("llama3-70b", 2**20, timed, nodes=1, purpose="decode", tp=1, ring=8, dp=1, batch=3)
    partial = 3 * 64 * (128 + 1) * 4
    a_layer = 3 * 2e-6 + 8 * partial * 7 / 8 / 300e9  # three doublings make eight ranks
    assert plan(request).best.time.merge_s == pytest.approx(80 * a_layer)  # type: ignore[union-attr]


def test_utilisation_by_hand() -> None:
    """2 FLOPs a weight and token, 4·D a visible pair and head; a backward twice as many, computed again none."""
    sizes, S = model("llama3-8b"), 2**17
    pairs = S * (S + 1) // 2
    matrix = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    layers = 32 * (2 * matrix * S + 4 * 128 * 32 * pairs)
    logits = 2 * 128256 * 4096 * S
    for recomputation in ("none", "full"):
        it = plan(
            Request(sizes, S, "h100", nodes=4, ring=32, recomputation=recomputation, batch=2, dp=1)
        ).best
        assert it.utilisation == pytest.approx(2 * 3 * (layers + logits) / (32 * 989.4e12 * it.step_s))
    prefill = plan(Request(sizes, S, "h100", nodes=1, purpose="prefill")).best
    assert prefill.utilisation == pytest.approx(layers / (8 * 989.4e12 * prefill.step_s))
    unmasked = plan(pinned()).best
    flops = 4 * 128 * 32 * 131072**2 + 2 * 131072 * unmasked.request.sized.layer_matrix_parameters
    assert unmasked.utilisation == pytest.approx(flops / (8 * 312e12 * unmasked.step_s))


def test_a_sliding_window_is_left_out_and_said_to_be() -> None:
    found = plan(Request("mistral-7b", 2**15, "h100", purpose="prefill"))
    assert any("no sliding window" in each for each in found.as_dict()["assumptions"])  # type: ignore[attr-defined]
    assert "sliding window of 4096" in model("mistral-7b").source


def quick_s(sizes: Attention, layout: str, S: int, P: int, machine: Hardware, backward: bool) -> float:
    """Forward, and backward after it where asked for, in seconds."""
    work, tokens = counted(layout, S, P, sizes.causal, (128, 128))
    rate, latency = ring_links(np.arange(P), machine)
    peak, block = machine.peak(sizes.dtype), sizes.block_bytes_per_token * tokens
    score = sizes.B * sizes.H * sizes.D / peak
    seconds = ring_forward_s(4 * work * score / machine.reached.attention_forward, block / rate, latency)
    if backward:
        home = gradient_bytes_per_token(sizes) * tokens
        compute = 10 * work * score / machine.reached.attention_backward
        seconds += ring_backward_s(compute, block / rate, home / rate, latency)
    return seconds


def machine(ranks_per_node: int, between: float) -> Hardware:
    here = hardware("h100")
    link = Link("slow", between, 10e-6, "made up")
    return replace(here, ranks_per_node=ranks_per_node, between=link)


@pytest.mark.parametrize("layout", NAMED)
@pytest.mark.parametrize("P", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("ranks_per_node", [2, 3, 8])
@pytest.mark.parametrize("between", [50e9, 2e9])
def test_the_same_makespan_as_the_simulator(layout: str, P: int, ranks_per_node: int, between: float) -> None:
    """Causal and not, forward alone and with backward, hops that hide and hops that do not."""
    here, S = machine(ranks_per_node, between), 512 * P
    for causal in (True, False):
        sizes = Attention(1, 8, 2, 128, "bfloat16", causal)
        for backward in (False, True):
            simulated = simulate(sizes, get_layout(layout, S, P), here, backward=backward).makespan_s
            assert quick_s(sizes, layout, S, P, here, backward) == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize("later, hop", [(1.0, 0.5), (1.0, 3.0), (0.2, 0.9)])
@pytest.mark.parametrize("P", [1, 2, 7, 300])
def test_links_all_alike_give_the_closed_form(P: int, later: float, hop: float) -> None:
    compute = np.full((P, P), later)
    compute[:, 0] = 2.0
    same = np.ones(P)
    assert ring_forward_s(compute, hop * same, 0 * same) == pytest.approx(ring_s(P, 2.0, later, hop))


def test_a_hidden_backward_gives_the_closed_form() -> None:
    for P in (1, 2, 5, 300):
        same = np.ones(P)
        seconds = ring_backward_s(np.ones((P, P)), 0.2 * same, 0.4 * same, 0 * same)
        assert seconds == pytest.approx(backward_uniform_s(P, 1.0, 0.2, 0.4))


def test_the_short_cut_and_the_bound_for_large_rings(monkeypatch) -> None:
    """Without the short cut the same comes out; the bound is never below, and slower links make it no tighter lie."""
    rng = np.random.default_rng(5)
    P = 12
    slow = np.where(np.arange(P) % 4 == 3, 0.9, 0.1)
    for _ in range(20):
        compute = np.tile(rng.uniform(0.2, 2.0, P), (P, 1))
        exact = ring_forward_s(compute, slow, 0.01 * slow), ring_backward_s(compute, slow, slow, 0.01 * slow)
        with monkeypatch.context() as patched:
            patched.setattr(ring_time, "_alike", lambda _: False)
            followed = (
                ring_forward_s(compute, slow, 0.01 * slow),
                ring_backward_s(compute, slow, slow, 0.01 * slow),
            )
            patched.setattr(ring_time, "LARGEST_FOLLOWED", 4)
            bound = (
                ring_forward_s(compute, slow, 0.01 * slow),
                ring_backward_s(compute, slow, slow, 0.01 * slow),
            )
        assert exact == pytest.approx(followed)
        assert all(b >= e * (1 - 1e-12) for b, e in zip(bound, exact, strict=True))


@pytest.mark.parametrize("layout", NAMED)
@pytest.mark.parametrize("tile", [(128, 128), (64, 128), (256, 64)])
@pytest.mark.parametrize("P", [1, 2, 3, 8])
def test_the_formulas_of_work_equal_the_count(layout: str, tile: tuple[int, int], P: int) -> None:
    for causal in (True, False):
        S = 2 * P * 256 * 3
        counts, tokens = counted(layout, S, P, causal, tile)
        formula, same = by_formula(layout, S, P, causal, tile)
        assert np.array_equal(np.broadcast_to(counts, (P, P)), np.broadcast_to(formula, (P, P)))
        assert tokens == same
        assert np.array_equal(
            np.broadcast_to(counts, (P, P)), layout_work(get_layout(layout, S, P), causal, tile)
        )


def test_where_tiles_do_not_divide_the_formulas_are_close() -> None:
    for layout in NAMED:
        counts, _ = counted(layout, 100_000, 6, True, (128, 128))
        formula, _ = by_formula(layout, 100_000, 6, True, (128, 128))
        assert formula.mean() == pytest.approx(counts.mean(), rel=0.01)
