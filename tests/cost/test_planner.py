"""A plan's figures equal those worked out by hand, and its parts agree with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ringlab.cost.hardware import Link, MeasuredBlock, hardware
from ringlab.cost.models import model
from ringlab.cost.planner import Plan, Request, plan, step_time
from ringlab.cost.planner.limits import KINDS, hidden
from ringlab.cost.planner.parallelism import Degrees, candidates, group
from ringlab.cost.planner.search import search
from ringlab.cost.planner.step_time import StepTime
from ringlab.cost.planner.suggest import fewest_nodes, fits, most_tokens
from ringlab.errors import CostError
from ringlab.layout import LAYOUTS
from tests.cost.planner_cases import ideal, small_model


def pinned(**changes: object) -> Request:
    """Return a prefill of 131,072 tokens in a ring of 8, unmasked, with as many K/V heads as query heads."""
    asked = {
        "model": small_model(),
        "tokens": 131072,
        "hardware": ideal(inside=600e9),
        "purpose": "prefill",
        "causal": False,
        "tp": 1,
        "ring": 8,
        "ulysses": 1,
        "fsdp": 1,
    }
    return Request(**(asked | changes))  # type: ignore[arg-type]


def only_pass(found: Plan):
    assert isinstance(found.best.time, StepTime)
    return found.best.time.passes[0]


def test_compute_and_transfer_of_a_ring_step_by_hand() -> None:
    """A step computes 4·D·H·c² FLOPs in 14.1 ms and sends 2·H·D·2·c bytes in 0.447 ms; 8 blocks, 7 hops."""
    it = only_pass(plan(pinned()))
    assert it.attention_s / 8 == pytest.approx(14.1e-3, rel=2e-3)
    assert it.ring_s / 7 == pytest.approx(0.447e-3, rel=2e-3)
    assert it.ring_exposed_s == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("bandwidth, least", [(600e9, 520), (300e9, 1040), (12.5e9, 24960)])
def test_tokens_that_hide_a_hop_by_hand(bandwidth: float, least: int) -> None:
    (it,) = plan(pinned(hardware=ideal(inside=bandwidth))).hidden
    assert it.least_tokens == least and it.hidden == (131072 // 8 >= least)


def test_grouped_heads_divide_the_threshold_and_a_mask_doubles_it() -> None:
    grouped = pinned(model=small_model(H=32, K=8), hardware=ideal(inside=300e9))
    assert plan(grouped).hidden[0].least_tokens == 1040 // 4
    assert plan(grouped.but(causal=True)).hidden[0].least_tokens == 2 * 1040 // 4


def test_a_ring_over_nodes_takes_the_slower_link() -> None:
    two_nodes = pinned(nodes=2, hardware=ideal(ranks_per_node=4))
    block = 131072 // 8 * 2 * 32 * 128 * 2
    assert only_pass(plan(two_nodes)).ring_s == pytest.approx(7 * block / 25e9)
    assert plan(two_nodes).hidden[0].link == "between"
    inside = two_nodes.but(ring=4, ulysses=2)
    assert plan(inside).hidden[0].link == "between"  # the ring has four ranks, two on each node
    assert plan(two_nodes.but(nodes=1, ring=4)).hidden[0].link == "inside"


def test_the_memory_of_a_training_by_hand() -> None:
    found = plan(Request("llama3-70b", 2**20, "h100", nodes=8, tp=4, ring=16, recomputation="full", fsdp=16))
    sizes, it = model("llama3-70b"), found.best.memory
    norms = 161 * 8192  # whole on each of the tp ranks
    share = (sizes.parameters - norms) / 64 + norms / 16
    assert it.of("parameters") == pytest.approx(2 * share, abs=1)
    assert it.of("gradients") == pytest.approx(4 * share, abs=1)
    assert it.of("optimizer") == pytest.approx(12 * share, abs=1)
    assert it.of("activations") == 80 * (2**20 // 16) * 8192 * 2 // 4  # tp 4 also splits these tokens
    assert it.of("logits") == (2**20 // 16) * (128256 // 4) * (
        2 + 3 * 4
    )  # 2 bytes for logits; log-softmax and both gradients are float32
    in_flight = 2 * 2 * 128 * (2**20 // 16)  # K and V, 8/4 heads of 128
    assert it.of("K/V in flight") == 2 * in_flight * 2  # one block in use, one block arriving
    assert it.of("dK and dV in float32") == 3 * in_flight * 4  # one pair held, one arriving, one added
    dout_out_product = 3 * 4 * (64 // 4) * 128 * (2**20 // 16)
    rows = 2 * 4 * (64 // 4) * (2**20 // 16)
    assert it.of("float32 accumulators") == dout_out_product - 3 * in_flight * 4 + rows
    gate_up_product = 3 * 28672 // 4
    assert it.of("gradients of the layer at work") == (2**20 // 16) * 2 * (8192 + gate_up_product)
    layer = sizes.layer_matrix_parameters * 2 // 4
    assert it.of("gathered weights") == pytest.approx(3 * layer, abs=2)


def test_collectives_by_hand() -> None:
    machine = ideal(inside=100.0, between=10.0, ranks_per_node=8)
    split = Degrees(dp=1, tp=2, ring=4, ulysses=2, fsdp=8)
    tp, ulysses, fsdp = (group(name, split, machine) for name in ("tp", "ulysses", "fsdp"))
    assert not tp.across and tp.gather_s(1000) == pytest.approx(500 / 100)
    assert not ulysses.across and ulysses.exchange_s(1000) == pytest.approx(500 / 100)
    # Four of the group's eight ranks are on each node, so four links leave it.
    assert fsdp.across and fsdp.on_a_node == 4
    assert fsdp.gather_s(1000) == pytest.approx(875 / 40)
    assert fsdp.reduce_s(1000) == pytest.approx(2 * 875 / 40)
    wide = group("ulysses", Degrees(dp=1, tp=1, ring=1, ulysses=16, fsdp=1), machine)
    assert wide.across and wide.exchange_s(1600) == pytest.approx(800 / 10)  # 8 of 16 parts leave the node
    slow = replace(machine, inside=Link("x", 1e30, 1.0, ""), between=Link("y", 1e30, 10.0, ""))
    assert group("fsdp", split, slow).gather_s(0) == pytest.approx(2 * 1 + 1 * 10)


def test_ranks_beyond_the_kv_heads_hold_copies() -> None:
    machine = replace(hardware("h100"), ranks_per_node=16)
    request = Request("llama3-70b", 2**18, machine, tp=1, ulysses=16, purpose="prefill")
    found = plan(request)
    assert found.best.degrees.kv_copies(8) == 2 and found.as_dict()["kv_copies"] == 2
    eight = plan(request.but(ulysses=8))
    ratio = found.best.memory.of("K/V cache") / eight.best.memory.of("K/V cache")
    assert ratio == 2  # with 16, each rank keeps one K/V head of all tokens; with 8, of half of the tokens


def test_an_update_reads_and_writes_every_weight_by_hand() -> None:
    """An update reads and writes 14 bytes a weight and reads 4 of gradient, divided among 64 ranks."""
    found = plan(Request("llama3-70b", 2**20, "h100", nodes=8, tp=4, ring=16, recomputation="full", fsdp=16))
    time = found.best.time
    assert isinstance(time, StepTime)
    assert time.update_s == pytest.approx((2 * (2 + 12) + 4) * 70.554e9 / 64 / 3.35e12, rel=1e-4)
    layers = 80 * sum(each.total_s for each in time.passes)
    assert time.total_s == pytest.approx(layers + time.vocabulary_s + time.update_s)
    assert plan(pinned()).best.time.update_s == 0  # type: ignore[union-attr]


def test_merging_partial_outputs_of_a_token_by_hand() -> None:
    """In each of 80 layers, 8 ranks gather out and lse of 3 sequences, 129 float32 numbers a head."""
    machine = ideal(inside=300e9, ranks_per_node=8, memory_bytes=1e12)
    timed = replace(machine, inside=Link("inside", 300e9, 2e-6, "made up"))
    request = Request("llama3-70b", 2**20, timed, nodes=1, purpose="decode", tp=1, ring=8, dp=1, batch=3)
    partial = 3 * 64 * (128 + 1) * 4
    a_layer = 3 * 2e-6 + 8 * partial * 7 / 8 / 300e9  # 3 latencies, because three doublings reach eight ranks
    assert plan(request).best.time.merge_s == pytest.approx(80 * a_layer)  # type: ignore[union-attr]


def test_utilisation_by_hand() -> None:
    """Utilisation counts 2 FLOPs a weight and token and 4·D a pair and head, without recomputation."""
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


def test_what_limits_has_each_of_its_kinds() -> None:
    slow = ideal(between=1e9, ranks_per_node=1, memory_bytes=1e12)
    few_heads = replace(slow, ranks_per_node=8, inside=Link("slow", 1e9, 0.0, "made up"))
    requests = {
        "compute": Request("llama3-8b", 2**20, "h100", nodes=4, purpose="prefill"),
        "exposed communication": Request("llama3-8b", 2**14, slow, nodes=8, purpose="prefill"),
        "imbalance": Request(
            "llama3-8b", 2**20, "h100", nodes=4, purpose="prefill", layout="contiguous", ring=32
        ),
        "memory": Request("llama3-70b", 10**6, "h100", nodes=4),
        "pipeline bubble": Request("llama3-8b", 2**13, "h100", nodes=2, batch=8, dp=1, tp=1, cp=1, pp=16),
        "memory bandwidth": Request("llama3-70b", 10**6, "h100", nodes=4, purpose="decode"),
        "K/V heads": Request(
            small_model(H=32, K=1, layers=2), 2**14, few_heads, tp=1, ulysses=1, fsdp=1, purpose="prefill"
        ),
    }
    assert set(requests) == set(KINDS)
    for kind, request in requests.items():
        assert plan(request).limit.kind == kind, plan(request).limit


def test_memory_limits_time_where_more_of_it_would_save_recomputation() -> None:
    found = plan(Request("llama3-70b", 10**6, "h100", nodes=8, logits_chunk=4096))
    assert found.fits and found.limit.kind == "memory" and 0 < found.limit.seconds < found.best.step_s


def test_the_layout_is_chosen_by_work_of_whole_tiles() -> None:
    found = plan(Request("llama3-8b", 2**20, "h100", nodes=4, ring=32))
    assert found.best.layout == "zigzag"
    assert found.best.work()[0] == pytest.approx(1.0)
    slower = {it.layout: it.step_s for it in found.layouts}
    assert set(slower) == set(LAYOUTS) - {"zigzag"}
    assert slower["contiguous"] > 1.5 * found.best.step_s
    contiguous = plan(Request("llama3-8b", 2**20, "h100", nodes=4, ring=32, layout="contiguous"))
    assert contiguous.best.work()[0] == pytest.approx(2 - 1 / 32, rel=0.01)
    assert plan(Request("llama3-8b", 2**17, "h100", causal=False)).best.layout == "contiguous"


def test_pieces_of_a_layout_and_what_would_divide_evenly() -> None:
    even = plan(Request("llama3-8b", 2**20, "h100", nodes=4, ring=32))
    assert even.chunk_tokens == 2**20 // 64 and "each 128 kernel tiles" in even.chunk_words
    ragged = plan(Request("llama3-8b", 10**6 + 1, "h100", nodes=4, ring=32))
    assert ragged.chunk_tokens == 15626 and "ragged" in ragged.chunk_words
    better = int(ragged.chunk_words.split(" tokens would")[0].split("; ")[-1].replace(",", ""))
    assert "(" not in plan(ragged.request.but(tokens=better)).chunk_words
    assert plan(Request("llama3-8b", 2**20, "h100", ring=8, layout="striped")).chunk_tokens == 1


def test_a_model_of_several_kinds_is_the_mean_of_models_of_one() -> None:
    """Each pass of Gemma 3 takes the mean of its layers with and without a window, in every part."""
    both = model("gemma3-27b")
    asked = {
        "tokens": 2**15,
        "hardware": ideal(memory_bytes=1e13),
        "tp": 1,
        "ring": 8,
        "ulysses": 1,
        "layout": "zigzag",
        "fsdp": 8,
        "recomputation": "none",
    }
    alone = [
        plan(Request(replace(both, kind=(replace(kind, layers=62),)), **asked)).best  # type: ignore[arg-type]
        for kind in both.kind
    ]
    found = plan(Request(both, **asked)).best  # type: ignore[arg-type]
    for mixed, window, everywhere in zip(*(it.time.passes for it in (found, *alone)), strict=True):  # type: ignore[union-attr]
        for name in ("linear_s", "attention_s", "ring_s", "weights_s", "exposed_s", "total_s"):
            mean = (52 * getattr(window, name) + 10 * getattr(everywhere, name)) / 62
            assert getattr(mixed, name) == pytest.approx(mean), name
        assert window.attention_s < everywhere.attention_s
    assert found.utilisation > 0 and len({it.memory.of("parameters") for it in (found, *alone)}) == 1


def test_rounds_save_memory_where_a_batch_is_large() -> None:
    found = plan(Request("llama3-8b", 2**13, "h100", nodes=1, batch=256))
    assert found.fits and found.best.rounds > 1 and found.best.recomputation == "none"
    assert found.best.time.as_dict()["rounds"] == found.best.rounds


def test_pieces_of_the_loss_save_logits() -> None:
    whole = plan(Request("llama3-8b", 2**20, "h100", nodes=4))
    pieces = plan(whole.request.but(logits_chunk=4096))
    assert pieces.best.memory.of("logits") == 4096 * 128256 * 14 < whole.best.memory.of("logits")


def test_recomputation_costs_a_forward_and_saves_activations() -> None:
    request = Request("llama3-8b", 2**17, "h100", nodes=4, ring=32)
    none, selective, full = (
        plan(request.but(recomputation=each)).best for each in ("none", "selective", "full")
    )
    assert none.step_s < selective.step_s < full.step_s
    kept = [it.memory.of("activations") for it in (none, selective, full)]
    assert kept[0] > kept[1] > kept[2]
    forward, again, _ = full.time.passes  # type: ignore[union-attr]
    assert (again.linear_s, again.attention_s) == (forward.linear_s, forward.attention_s)


def test_what_is_offloaded_must_fit_on_the_host() -> None:
    """A plan that offloads more than the host's memory does not fit, and the reason names the host."""
    machine = hardware("h100")
    asked = Request("qwen3-8b", 2**20, machine, tp=1, ring=8, offload="activations", logits_chunk=256)
    assert plan(asked).fits and plan(asked).best.memory.host_bytes == 34 * 2**17 * 4096 * 2
    assert machine.host is not None
    small = replace(machine, host=replace(machine.host, memory_bytes=36e9))
    found = plan(asked.but(hardware=small))
    assert not found.fits and "do not fit on the host" in found.limit.sentence


def test_the_fewest_nodes_and_the_longest_context_are_just_that() -> None:
    request = Request("llama3-70b", 10**6, "h100", nodes=4)
    nodes, most = fewest_nodes(request), most_tokens(request)
    assert nodes is not None and most is not None
    assert fits(request.but(nodes=nodes)) and not any(fits(request.but(nodes=n)) for n in range(1, nodes))
    assert fits(request.but(tokens=most)) and not fits(request.but(tokens=most + 1000))


def test_a_plan_is_json_and_says_the_same_as_its_parts() -> None:
    found = plan(Request("llama3-70b", 10**6, "h100", nodes=8, logits_chunk=4096))
    told = json.loads(json.dumps(found.as_dict()))
    assert told["answer"].startswith("Fits: 64 × H100") and told["gpus"] == 64
    assert sum(entry["bytes"] for entry in told["memory"]["entries"]) == told["memory"]["total_bytes"]
    assert told["step_s"] == found.best.step_s and told["tokens_per_s"] * told["step_s"] == pytest.approx(
        10**6
    )
    assert told["limit"]["kind"] in KINDS and told["assumptions"] and told["alternatives"]
    assert told["hidden"] == all(each["hidden"] for each in told["communication"])
    assert 0 < told["utilisation"] < 1


def test_measured_blocks_are_used_instead_of_the_peak() -> None:
    block = MeasuredBlock("bfloat16", "forward", 0.0, 1e-12, 0.0, 128, "made up")
    machine = ideal(block_times=(block,))
    assert only_pass(plan(pinned(hardware=machine))).attention_s == pytest.approx(
        131072 * 131072 / 8 * 32 * 1e-12
    )


@pytest.mark.parametrize(
    "changes, needed, got",
    [
        ({"tile": (0, 128)}, "tile >= 1", "tile=0"),
        ({"reserve": 1.0}, "reserve", "1.0"),
        ({"recomputation": "some"}, "recomputation among", "some"),
        ({"hardware": "h1000"}, "a known hardware", "h1000"),
        ({"dp": 3}, "batch divisible by dp", "batch=1, dp=3"),
        ({"ring": 4, "ulysses": 4, "cp": 8}, "ring × ulysses = cp", "4 × 4 = 16, cp=8"),
        ({"tp": 8, "cp": 8, "dp": 1}, "dp × tp × cp = 32 GPUs", "product 64"),
        ({"cp": 5}, "dp × tp × cp = 32 GPUs", "product 5"),
        ({"tokens": 20, "tp": 1}, "at least one token per rank: cp <= 20", "cp=32"),
        ({"tokens": 2**31 + 1}, "tokens <= 2,147,483,648", "2,147,483,649"),
        ({"ring": 2048, "nodes": 256}, "rings of at most 1024 ranks", "ring=2048"),
        ({"nodes": 10**40}, "nodes <= 1,048,576", "over 30 digits"),
        ({"tile": (2**40, 1)}, "tile <= 1,048,576", "1,099,511,627,776"),
        ({"ulysses": 8, "purpose": "decode"}, "decode without ulysses", "ulysses=8"),
        ({"hardware": "a100", "dtype": "float8"}, "a dtype that a100 computes in", "float8"),
        ({"sharing": "ÿ", "purpose": "serve"}, "sharing among", "ÿ"),
        ({"offload": "ÿ"}, "offload among", "ÿ"),
        ({"offload": "optimizer,ÿ"}, "offload among", "optimizer,ÿ"),
        ({"ffn_chunk": 0}, "ffn_chunk >= 1", "0"),
        ({"ffn_chunk": 4096, "purpose": "prefill"}, "ffn_chunk for training only", "4096"),
        ({"ep": 2}, "ep for a model with experts", "ep=2"),
        ({"ep": 3, "model": "qwen3-30b-a3b"}, "ep that divides the 128 experts", "ep=3"),
        ({"ep": 64, "model": "qwen3-30b-a3b"}, "ep that divides dp × cp", "ep=64"),
        ({"ep": 2, "model": "qwen3-30b-a3b", "purpose": "decode"}, "decode without ep", "ep=2"),
        ({"ep": 8, "fsdp": 12, "nodes": 3, "model": "qwen3-30b-a3b"}, "ep that divides fsdp", "fsdp=12"),
        ({"ulysses": 2, "model": "deepseek-v3"}, "a ring: latent attention has no K/V heads", "ulysses=2"),
        ({"layout": "striped", "model": "qwen3-next-80b-a3b"}, "consecutive tokens", "striped"),
        ({"tp": 3, "model": "qwen3-next-80b-a3b"}, "tp that divides the H=32 heads of v", "tp = 3"),
        ({"offload": "activations", "purpose": "decode"}, "offload for training only", "decode"),
        ({"purpose": "serve", "chunk": 1}, "at most 4,096 chunks", "1"),
        ({"purpose": "serve", "chunk": 0}, "chunk >= 1", "chunk=0"),
        ({"purpose": "serve", "generated": 10**6}, "generated", "1000000"),
        ({"logits_chunk": 0}, "logits_chunk >= 1", "0"),
        ({"tokens": 2**40}, "tokens <=", "1,099,511,627,776"),
        *(
            ({name: bad}, f"{name} ", "")
            for name in ("nodes", "batch", "dp", "fsdp", "tp", "cp", "ring", "ulysses", "pp", "interleave")
            for bad in (0, -1, 2**21, True, 1.5)
        ),
    ],
    ids=str,
)
def test_impossible_requests_name_the_constraint_and_a_remedy(
    changes: dict[str, object], needed: str, got: str
) -> None:
    """Errors name the constraint and a remedy; tests/cli/test_plan.py has more cases, as typed commands."""
    asked = {"model": "llama3-70b", "tokens": 10**6, "hardware": "h100", "nodes": 4} | changes
    with pytest.raises(CostError) as caught:
        plan(Request(**asked))  # type: ignore[arg-type]
    assert needed in caught.value.needed and got in caught.value.got, caught.value
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("sizes", "changes", "needed", "got"),
    [
        ({}, {"ulysses": 2, "purpose": "decode"}, "decode without ulysses", "ulysses=2"),
        ({}, {"tp": 3}, "tp that divides the H=32 query heads", "tp = 3"),
        ({}, {"tp": 2, "ulysses": 3}, "tp × ulysses that divides the H=32 query heads", "tp × ulysses = 6"),
        ({"H": 12, "K": 4}, {"tp": 6}, "tp that divides the K=4 K/V heads", "tp = 6"),
        ({"H": 12, "K": 4}, {"tp": 6, "ulysses": 2}, "tp that divides the K=4 K/V heads", "tp = 6"),
        ({"H": 12, "K": 4}, {"tp": 2, "ulysses": 3}, "tp × ulysses that divides the K=4", "tp × ulysses = 6"),
        ({"d_ff": 1001}, {"tp": 2}, "tp that divides the feed-forward width 1001", "tp = 2"),
    ],
    ids=str,
)
def test_degrees_that_cannot_share_the_heads_are_refused_by_their_own_names(
    sizes: dict[str, int], changes: dict[str, object], needed: str, got: str
) -> None:
    """The error begins with the degree that does not fit: tp alone, or tp × ulysses.

    tp = 6 cannot share 4 K/V heads, although tp × ulysses = 12 can.
    """
    with pytest.raises(CostError) as caught:
        candidates(Request(small_model(**sizes), 131072, "h100", nodes=6, **changes))  # type: ignore[arg-type]
    assert caught.value.needed.startswith(needed) and caught.value.got == got
    assert caught.value.remedy


def test_degrees_asked_for_are_kept_and_the_rest_is_open() -> None:
    request = Request("llama3-70b", 10**6, "h100", nodes=4, batch=4)
    for changes in ({"tp": 4}, {"ulysses": 2}, {"dp": 2}, {"cp": 8}, {"ring": 2}, {"fsdp": 8}):
        found = candidates(request.but(**changes))
        assert found and all(getattr(it, name) == value for it in found for name, value in changes.items())
        assert len(set(found)) == len(found)


def test_left_open_tp_and_ulysses_stay_inside_a_node_and_divide_the_kv_heads() -> None:
    for it in candidates(Request("llama3-70b", 10**6, "h100", nodes=4)):
        assert not it.crosses("tp", 8) and not it.crosses("ulysses", 8)
        assert 8 % (it.tp * it.ulysses) == 0 and it.kv_copies(8) == 1


def test_hidden_has_a_row_for_each_pass_and_none_without_a_ring() -> None:
    ring = search(Request("llama3-70b", 10**6, "h100", nodes=8))[0]
    assert [it.name for it in hidden(ring)] == ["forward", "full recomputation", "backward"]
    assert hidden(search(Request("llama3-8b", 8192, "h100", gpus_per_node=1, purpose="prefill"))[0]) == []


def test_rounds_of_a_single_sequence_are_said_so() -> None:
    asked = Request("llama3-8b", 2**17, "h100", batch=2, dp=1, cp=8)
    best = search(asked)[0]
    found = replace(plan(asked), best=replace(best, rounds=2))
    assert "2 rounds of 1 sequence" in found.answer and "1 sequences" not in found.answer


def test_of_a_given_ulysses_degree_only_splits_whose_heads_can_be_shared_are_weighed() -> None:
    """If the Ulysses degree is fixed at 8, the tp degrees are 1, 2 and 4, because tp × 8 has to divide 32 heads."""
    found = candidates(Request("llama3-8b", 131072, "h100", nodes=8, ulysses=8))
    assert {each.tp for each in found} == {1, 2, 4}


def test_a_rank_fetches_only_its_own_experts_from_the_host() -> None:
    """With 8-fold expert parallelism and no FSDP, a rank fetches an eighth of the experts and all other weights.

    With tp 2 it fetches half of each matrix, but the whole router and the whole matrices that make latents.
    """
    layer = model("deepseek-v3").kinds[1]
    host = SimpleNamespace(latency_s=0.0, bytes_per_s=1.0)
    request: Any = SimpleNamespace(
        machine=SimpleNamespace(host=host), offloads=("weights",), dtype="bfloat16"
    )
    degrees: Any = SimpleNamespace(fsdp=1, tp=2, ep=8)
    fetched = step_time._from_host_s(request, degrees, layer)
    whole = 7168 * (256 + 1536 + 512 + 64)
    assert fetched == 2 * whole + (layer.common_parameters - whole + layer.expert_parameters / 8)
