"""Times of a plan that no other test looks at one by one: the update, the merge of a token, the utilisation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringlab.cost.hardware import Link
from ringlab.cost.models import model
from ringlab.cost.planner import Request, plan
from ringlab.cost.planner.step_time import StepTime
from tests.cost.planner_cases import ideal
from tests.cost.test_planner import pinned


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
