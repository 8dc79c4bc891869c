"""The checks of this file notice every common mistake of planners, each made on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import ringlab.cost.planner.memory_table as memory_table
import ringlab.cost.planner.ring_time as ring_time
import ringlab.cost.planner.search as search
import ringlab.cost.planner.serve_request as serve_request
import ringlab.cost.planner.stages as stages
import ringlab.cost.planner.step_time as step_time
import ringlab.cost.planner.suggest as suggest
from ringlab.cost import memory
from ringlab.cost.hardware import Host
from ringlab.cost.memory import logits_bytes
from ringlab.cost.models import Layer, model
from ringlab.cost.planner import Request, plan
from ringlab.cost.planner.parallelism import Degrees, Group
from ringlab.cost.planner.search import Candidate
from ringlab.cost.scan_traffic import LinearAttention, attend_flops, passage_flops
from tests.cost import test_planner
from tests.cost.planner_cases import fails, ideal, small_model

SPLIT = {"dp": 1, "tp": 2, "ring": 8, "ulysses": 2, "fsdp": 8}
GQA = Request(
    small_model(H=32, K=8, layers=4),
    2**17,
    ideal(),
    4,
    layout="zigzag",
    recomputation="full",
    batch=1,
    **SPLIT,
)  # type: ignore[arg-type]


def best(request: Request) -> Candidate:
    return plan(request).best


def check_cache() -> None:
    """All GPUs of a replica together hold each K and V once: 327.68 GB for a million tokens."""
    for nodes, tp in ((1, 8), (4, 4), (4, 2)):
        it = best(Request("llama3-70b", 10**6, "h100", nodes=nodes, purpose="decode", tp=tp))
        assert it.memory.of("K/V cache") * 8 * nodes == 327_680_000_000


def check_hops() -> None:
    """A hop sends K and V of two of 8 heads at 25 GB/s, 2 bytes a number, and 4 bytes for gradients."""
    block = 2**17 // 8 * 2 * 2 * 128 * 2
    forward, _, backward = best(GQA).time.passes  # type: ignore[union-attr]
    assert forward.ring_s == pytest.approx(7 * block / 25e9)
    assert backward.ring_s == pytest.approx((7 * block + 8 * 2 * block) / 25e9)


def check_attention() -> None:
    """Attention takes half of 4·D·S² FLOPs a head, on 8 ranks with 8 heads each; backward 2.5 times that."""
    forward, again, backward = best(GQA).time.passes  # type: ignore[union-attr]
    pairs = (2**17) ** 2 / 2 / 8
    assert forward.attention_s == pytest.approx(4 * 128 * 8 * pairs / 312e12, rel=2e-3)
    assert again.attention_s == forward.attention_s
    exact = backward.attention_s - 2.5 * forward.attention_s
    assert abs(exact) < 1e-6 * forward.attention_s


def check_matrices() -> None:
    """Matrices take 2 FLOPs a weight and token, divided by 16 ranks and tp 2; backward twice as many."""
    forward, _, backward = best(GQA).time.passes  # type: ignore[union-attr]
    flops = 2 * GQA.sized.layer_matrix_parameters * 2**17 / 32
    assert (forward.linear_s, backward.linear_s) == pytest.approx((flops / 312e12, 2 * flops / 312e12))


def check_collectives() -> None:
    """All-reduces, all-to-alls and weight gathers take the seconds that follow from their bytes by hand."""
    forward, _, backward = best(GQA).time.passes  # type: ignore[union-attr]
    tokens = 2**17 // 16
    assert forward.tensor_s == pytest.approx(4 * tokens * 4096 * 2 / 2 / 300e9)
    heads = 2 * 32 // 2 + 2 * 8 // 2
    assert forward.ulysses_s == pytest.approx(tokens * heads * 128 * 2 / 2 / 300e9)
    weights = GQA.sized.layer_matrix_parameters * 2 / 2
    gather = weights * 7 / 8 / 100e9
    between_copies = 2 * weights / 8 / 2 / 25e9  # the group has one rank on each of two nodes
    assert forward.weights_s == pytest.approx(gather)
    assert backward.weights_s == pytest.approx(2 * gather + between_copies)


def check_decode() -> None:
    """Each GPU reads its part of the weights, all norms, and its part of the cache once per token."""
    it = best(Request("llama3-70b", 10**6, ideal(ranks_per_node=8), nodes=4, purpose="decode", tp=4))
    norms = 161 * 8192
    read = (model("llama3-70b").parameters - norms) * 2 / 4 + 2 * norms + 327.68e9 / 32
    assert it.time.weights_s + it.time.cache_s == pytest.approx(read / 2039e9)  # type: ignore[union-attr]
    assert it.tokens_per_s == pytest.approx(1 / it.step_s)


PIPE = Request(
    small_model(H=32, K=8, layers=18), 2**14, ideal(), 2, batch=8, dp=1, tp=1, ring=4, ulysses=1, fsdp=4, pp=4,
    recomputation="full",
)  # fmt: skip


def check_whole_heads() -> None:
    """If 16 ranks share 8 K/V heads, each rank holds a whole head: its projections, gradients and cache."""
    node = ideal(ranks_per_node=16, memory_bytes=1e13)
    asked = {"dp": 1, "tp": 16, "ring": 1, "ulysses": 1, "fsdp": 1}
    it = Request(small_model(H=32, K=8, layers=4), 2**14, node, batch=1, **asked)  # type: ignore[arg-type]
    d, split = 4096, 2 * 63 + 4 * 3 * it.sized.d_ff // 16  # of 1,000 words, a rank has 63
    weights = 4 * d * (2 * 2 * 128 + 2 * 128) + d * split + 9 * d  # q and out of two heads, k and v of one
    trained = best(it).memory
    assert (trained.of("parameters"), trained.of("gradients")) == (2 * weights, 4 * weights)
    cached = best(it.but(purpose="decode")).memory
    assert cached.of("K/V cache") == 4 * 2**14 * 2 * 128 * 2


def check_heads_of_a_latent() -> None:
    """If K and V of all heads travel, a hop and the cache are 128·(192 + 128) / 576 = 71 times a latent's.

    The heads, unlike a latent, may be shared out.
    """
    asked = {"dp": 1, "tp": 1, "ring": 8, "ulysses": 1, "fsdp": 8, "ep": 8}
    latent = Request("deepseek-v3", 2**17, ideal(memory_bytes=1e13), purpose="prefill", **asked)  # type: ignore[arg-type]
    heads = latent.but(model="deepseek-v3-heads")
    hops = [pass_of(it).ring_s for it in (heads, latent)]
    held = [best(it).memory.of("K/V cache") for it in (heads, latent)]
    assert hops[0] / hops[1] == pytest.approx(128 * 320 / 576) == held[0] / held[1]
    assert heads.sized.parameters == latent.sized.parameters
    assert best(heads).memory.of("K and V of a latent") == 0 < best(latent).memory.of("K and V of a latent")
    made = best(latent).time.passes[0].balanced_s - best(heads).time.passes[0].balanced_s  # type: ignore[union-attr]
    assert made == pytest.approx(7 * 2 * 512 * 128 * 256 * 2**14 / 312e12)
    assert best(heads.but(ring=2, ulysses=4)).degrees.ulysses == 4
    tokens, kept = 2**14, 128 * 320 * 2**14 * 2
    saved = [memory.saved_bytes(it.sized.kinds[0], tokens) for it in (heads, latent)]
    assert saved[0] - saved[1] == kept


def check_pipeline() -> None:
    """18 layers on four stages are split 4, 5, 5, 4, and the second stage holds three micro-batches."""
    found = best(PIPE)
    a_layer = 2**14 // 4 * 4096 * 2
    assert found.memory.of("activations") == 5 * 3 * a_layer
    assert found.memory.of("parameters") == 2 * (5 * (PIPE.sized.layer_matrix_parameters + 2 * 4096)) // 4
    time = found.time
    stage = 5 * sum(it.total_s for it in time.passes)  # type: ignore[union-attr]
    send = 2**14 // 4 * 4096 * 2 / 25e9
    assert time.total_s == pytest.approx(8 * stage + 3 * stage + 6 * send + time.update_s)  # type: ignore[union-attr]
    twice = best(PIPE.but(interleave=2)).time
    assert twice.bubble_s == pytest.approx(3 * stage / 2 + 6 * send)  # type: ignore[union-attr]


def check_offload() -> None:
    """Offloaded inputs of two layers leave at 0.1 GB/s, so a layer takes as long as its transfer."""
    slow = replace(ideal(), host=Host("slow", 0.1e9, 0.0, "made up", 1e12))
    there, here = best(GQA.but(hardware=slow, offload="activations")), best(GQA.but(hardware=slow))
    a_layer = (2**17 // 16) * 4096 * 2 // 2
    assert there.memory.of("activations") == 2 * a_layer == there.memory.host_bytes
    forward, again, backward = there.time.passes  # type: ignore[union-attr]
    assert forward.host_s == backward.host_s == pytest.approx(a_layer / 0.1e9)
    assert forward.total_s == pytest.approx(max(a_layer / 0.1e9, here.time.passes[0].total_s))  # type: ignore[union-attr]
    later = sum(it.total_s for it in here.time.passes[1:])  # type: ignore[union-attr]
    assert again.total_s + backward.total_s == pytest.approx(max(a_layer / 0.1e9, later))
    assert there.step_s > here.step_s and again.host_s == 0
    fast = replace(ideal(), host=Host("fast", 10e9, 0.0, "made up", 1e12))
    assert best(GQA.but(hardware=fast, offload="activations")).step_s == here.step_s


def pass_of(request: Request, name: str = "forward") -> step_time.Pass:
    return next(it for it in best(request).time.passes if it.name == name)  # type: ignore[union-attr]


EXPERTS = Request(
    "qwen3-30b-a3b", 2**17, ideal(memory_bytes=1e12), 2, dp=1, tp=1, ring=16, ulysses=1, fsdp=16, ep=8,
    recomputation="none", layout="zigzag",
)  # fmt: skip


def check_experts() -> None:
    """Tokens go to 8 of 128 experts on 8 ranks and back, and two ranks share each expert between nodes."""
    tokens, expert = 2**17 // 16, 3 * 2048 * 768
    common = 2048 * 128 * (2 * 32 + 2 * 4) + 2048 * 128
    forward, backward = pass_of(EXPERTS), pass_of(EXPERTS, "backward")
    assert forward.dispatch_s == pytest.approx(2 * tokens * 8 * 2048 * 2 * 7 / 8 / 300e9)
    assert backward.dispatch_s == forward.dispatch_s
    assert forward.linear_s == pytest.approx(2 * tokens * (common + 8 * expert) / 312e12)
    gathered = 2 * common * 15 / 16 / 200e9 + 2 * 128 * expert / 8 / 2 / 25e9
    assert (forward.weights_s, backward.weights_s) == pytest.approx((gathered, 2 * gathered))
    weights = model("qwen3-30b-a3b").parameters
    assert best(EXPERTS).memory.of("optimizer") == 12 * weights / 16
    few = best(EXPERTS.but(fsdp=8, ep=16)).memory
    all_experts = 48 * 128 * expert
    assert few.of("optimizer") == pytest.approx(
        12 * (weights - all_experts) / 8 + 12 * all_experts / 16, abs=2
    )
    assert few.of("gathered weights") == max(3 * common, 2 * 151936 * 2048) * 2
    alone = pass_of(EXPERTS.but(ep=1))
    assert alone.dispatch_s == 0 and alone.weights_s == pytest.approx(
        2 * (common + 128 * expert) * 15 / 16 / 200e9
    )


LATENT = Request(
    "deepseek-v3", 2**17, ideal(memory_bytes=1e13), 1, dp=1, tp=1, ring=8, fsdp=8, ep=8, purpose="prefill", layout="zigzag"
)  # fmt: skip


def check_latent() -> None:
    """A hop and a cached token are 576 numbers, from which each rank makes K and V of 7 blocks that arrive."""
    it, tokens = pass_of(LATENT), 2**17 // 8
    assert it.ring_s == pytest.approx(7 * tokens * 576 * 2 / 300e9)
    made = 7 * 2 * tokens * 512 * 128 * (128 + 128) / 312e12
    pairs = (2**17) ** 2 / 2 / 8
    assert it.attention_s - made == pytest.approx(2 * (192 + 128) * 128 * pairs / 312e12, rel=2e-3)
    assert best(LATENT).memory.of("K/V cache") == 61 * tokens * 576 * 2
    assert best(LATENT).memory.of("K and V of a latent") == tokens * 128 * (192 + 128) * 2
    split = best(
        LATENT.but(tp=2, ring=4, fsdp=4, ep=4)
    ).memory  # each rank of tp has the latent of twice the tokens
    assert split.of("K/V cache") == 2 * 61 * tokens * 576 * 2


WINDOW = Request(
    "gemma3-27b", 2**15, ideal(memory_bytes=1e12), 1, dp=1, tp=1, ring=8, ulysses=1, fsdp=8, purpose="prefill", tile=(1, 1),
    layout="zigzag",
)  # fmt: skip


def check_window() -> None:
    """52 of 62 layers see 1,024 tokens, send K and V twice, and cache the window alone."""
    it, S, tokens = pass_of(WINDOW), 2**15, 2**15 // 8
    pairs = (52 * S * 1024 + 10 * S**2 / 2) / 62 / 8
    assert it.attention_s == pytest.approx(4 * 128 * 32 * pairs / 312e12, rel=0.01)
    a_hop = tokens * 2 * 16 * 128 * 2 / 300e9
    assert it.ring_s == pytest.approx((52 * 2 + 10 * 7) / 62 * a_hop)
    assert best(WINDOW).memory.of("K/V cache") == (10 * tokens + 52 * 1024 // 8) * 2 * 16 * 128 * 2


STATES = Request(
    "qwen3-next-80b-a3b", 2**17, ideal(memory_bytes=1e12), 1, dp=1, tp=1, ring=8, ulysses=1, fsdp=8, ep=1, purpose="prefill",
    layout="contiguous",
)  # fmt: skip


def check_states() -> None:
    """36 of 48 layers pass at most five states of 2 MiB per rank by doubling, and cache only their state."""
    it, tokens, state = pass_of(STATES), 2**17 // 8, 32 * 128 * 128 * 4
    a_hop = tokens * 2 * 2 * 256 * 2 / 300e9
    assert it.ring_s == pytest.approx((36 * 5 * state / 300e9 + 12 * 7 * a_hop) / 48)
    sizes = LinearAttention(1, 32, 128, 128)
    work = (passage_flops(sizes, tokens) + attend_flops(sizes, tokens)) / 312e12
    full = 4 * 256 * 16 * (2**17) ** 2 / 8 / 312e12 * (2 - 1 / 8) / 2
    assert it.attention_s == pytest.approx((36 * work + 12 * full) / 48, rel=2e-3)
    convolution = 3 * (2 * 16 * 128 + 32 * 128) * 2
    cached = 12 * tokens * 2 * 2 * 256 * 2 + 36 * (state + convolution)
    assert best(STATES).memory.of("K/V cache") == cached
    twice = pass_of(STATES.but(layout="zigzag")).ring_s  # each rank owns two stretches
    assert twice == pytest.approx((36 * 2 * 5 * state / 300e9 + 12 * 7 * a_hop) / 48)


def check_experts_read() -> None:
    """If each token has 8 of 128 experts, 16 tokens read 128·(1 − (15/16)^16) experts, and each computes with 8."""
    asked = Request("qwen3-30b-a3b", 2**12, ideal(), purpose="decode", batch=16, dp=1, tp=4, cp=2)
    time = best(asked).time
    it, experts = model("qwen3-30b-a3b"), 48 * 128 * 3 * 2048 * 768
    whole = 48 * 2048 * 128 + 97 * 2048  # routers and norms, on each of the tp ranks
    read = (it.parameters - whole - experts * (15 / 16) ** 16) * 2 / 4 + 2 * whole
    assert time.weights_s == pytest.approx(read / 2039e9, rel=1e-6)  # type: ignore[union-attr]


TILED = Request(
    "llama3-8b", 2**19, ideal(host=Host("host", 64e9, 0.0, "made up", 250e9)), dp=1, tp=1, ring=8, ulysses=1, fsdp=8,
    recomputation="full", logits_chunk=1024, ffn_chunk=2048, offload="activations,optimizer,weights",
)  # fmt: skip


def check_tiled_and_offloaded() -> None:
    """The feed-forward holds 2,048 tokens; the optimizer, gradients and most weights are on the host."""
    it, tokens, d = best(TILED), 2**19 // 8, 4096
    weights, vocabulary = TILED.sized.parameters, 128256 * 4096
    layer = 2 * d * 128 * (32 + 8) + 3 * d * 14336
    assert it.memory.of("optimizer") == 0
    assert it.memory.of("gradients") == vocabulary * 4 // 8  # more than those of two layers
    assert it.memory.of("parameters") == vocabulary * 2 // 8
    away = 30 * tokens * d * 2 + 12 * weights // 8 + (weights - vocabulary) * (4 + 2) // 8
    assert it.memory.host_bytes == pytest.approx(away, abs=8)
    kept_of_a_layer = tokens * (4 * d + d + 2 * 1024 + d) * 2 + tokens * 32 * 4
    assert it.memory.of("layer at work") == kept_of_a_layer - tokens * d * 2 + 2048 * 3 * 14336 * 2
    attention = 2 * (32 + 8) * 128
    assert it.memory.of("gradients of the layer at work") == tokens * 2 * (d + attention)
    forward, _, backward = it.time.passes  # type: ignore[union-attr]
    assert backward.linear_s / forward.linear_s == pytest.approx(2 + 3 * d * 14336 / layer)
    assert it.time.update_s == pytest.approx(16 * weights / 8 / 64e9, rel=1e-6)  # type: ignore[union-attr]
    at_home = best(TILED.but(offload="activations")).time.passes[0]  # type: ignore[union-attr]
    assert forward.weights_s - at_home.weights_s == pytest.approx(layer * 2 / 8 / 64e9)


CHECKS = (
    check_heads_of_a_latent,
    check_whole_heads,
    check_experts,
    check_latent,
    check_window,
    check_states,
    check_experts_read,
    check_tiled_and_offloaded,
    check_cache,
    check_hops,
    check_attention,
    check_matrices,
    check_collectives,
    check_decode,
    check_pipeline,
    check_offload,
    test_planner.test_the_memory_of_a_training_by_hand,
    test_planner.test_pieces_of_the_loss_save_logits,
    test_planner.test_the_fewest_nodes_and_the_longest_context_are_just_that,
    test_planner.test_a_plan_is_json_and_says_the_same_as_its_parts,
)


def without(function: Callable[..., int], position: int) -> Callable[..., int]:
    """Return the function with one of its degrees (an argument by position) replaced by 1."""

    def mutant(*arguments: object) -> int:
        changed = [*arguments]
        changed[position] = 1
        return function(*changed)

    return mutant


def alike_links(_: np.ndarray, machine: object) -> tuple[np.ndarray, np.ndarray]:
    inside = machine.inside  # type: ignore[attr-defined]
    return np.full(len(_), inside.bytes_per_s), np.full(len(_), inside.latency_s)


def scaled(function: Callable[..., float], factor: float) -> Callable[..., float]:
    return lambda *arguments, **options: factor * function(*arguments, **options)


def whole_group(name: str, degrees: Degrees, machine: object) -> Group:
    return Group(getattr(degrees, name), getattr(degrees, name), False, machine)  # type: ignore[arg-type]


BUBBLE, PARAMETERS = step_time.StepTime.bubble_s.fget, stages.Stage.rank_parameters  # type: ignore[attr-defined]
WITH_OFFLOAD = step_time._with_offload


def beside_nothing(*asked: object) -> tuple[step_time.Pass, ...]:
    return tuple(replace(it, host_exposed_s=it.host_s) for it in WITH_OFFLOAD(*asked))  # type: ignore[arg-type]


TOTAL = memory_table.MemoryTable.total_bytes.fget
assert TOTAL is not None

MUTANTS: dict[str, tuple[object, str, object]] = {
    "forgets TP in the parameters": (memory_table, "parameter_bytes", without(memory_table.parameter_bytes, 3)),
    "forgets FSDP in the optimizer": (memory_table, "optimizer_bytes", without(memory_table.optimizer_bytes, 2)),
    "forgets the float32 copy": (memory_table, "optimizer_bytes", scaled(memory_table.optimizer_bytes, 8 / 12)),
    "counts memory per node": (memory_table.MemoryTable, "total_bytes", property(lambda self: 8 * TOTAL(self))),
    "counts memory shared by a node": (memory_table.MemoryTable, "total_bytes", property(lambda self: TOTAL(self) // 8)),
    "takes NVLink across nodes": (step_time, "ring_links", alike_links),
    "counts both directions of a link": (
        step_time,
        "ring_links",
        lambda ranks, machine: (2 * ring_time.ring_links(ranks, machine)[0], ring_time.ring_links(ranks, machine)[1]),
    ),
    "divides K/V by H": (Degrees, "kv_heads", lambda self, K: max(1, K // (4 * self.tp * self.ulysses))),
    "gives every query head its own K/V": (Degrees, "kv_heads", lambda self, K: 4 * K // (self.tp * self.ulysses)),
    "counts K only in the cache": (memory_table, "kv_cache_bytes", lambda *a: 0.5 * KV_CACHE(*a)),
    "sends dK and dV in 16 bits": (step_time, "gradient_bytes_per_token", lambda s: s.block_bytes_per_token),
    "takes a backward for a second forward": (
        step_time, "block_seconds", lambda *a: SECONDS(*a[:4], False),
    ),
    "ignores the mask": (step_time, "ring_work", lambda layout, S, P, causal, tile: WORK(layout, S, P, False, tile)),
    "forgets the ranks of the sequence in the matrices": (step_time, "rank_tokens", lambda r, d: r.tokens),
    "forgets TP in the matrices": (Layer, "rank_active_parameters", lambda self, tp: 2 * ACTIVE(self, tp)),
    "computes with all experts": (Layer, "rank_active_parameters", lambda self, tp: self.matrix_parameters // tp),
    "sends a latent where heads travel": (Layer, "latent", property(lambda self: self.latent_numbers)),
    "makes K and V of arrived heads": (step_time, "_making_s", lambda *a: MAKING(a[0], replace(a[1], heads_travel=False), *a[2:])),
    "divides a K/V head that more ranks share": (Layer, "kv_copies", lambda self, ranks: 1),
    "dispatches one copy of a token": (
        step_time, "_dispatch_s", lambda request, degrees, it: DISPATCH(request, degrees, it) / (it.active_experts or 1),
    ),
    "sends no token to experts": (step_time, "_dispatch_s", lambda *a: 0.0),
    "gathers the experts of all ranks": (Layer, "gathered_parameters", lambda self, fsdp, ep, tp=1: self.matrix_parameters),
    "shares experts over fsdp alone": (memory_table, "optimizer_bytes", without(memory_table.optimizer_bytes, 4)),
    "sends K and V of a latent": (Layer, "latent", property(lambda self: self.H * 320 if self.kv_latent else 0)),
    "makes K and V of own tokens alone": (step_time, "_making_s", lambda *a: np.zeros(a[4])),
    "sees all tokens in a window": (
        step_time, "window_work", lambda layout, S, P, causal, tile, window: WORK(layout, S, P, causal, tile),
    ),
    "sends a window all around": (
        step_time, "window_work", lambda *a: (np.pad(WINDOWED(*a)[0], ((0, 0), (0, 5))), WINDOWED(*a)[1]),
    ),
    "caches all tokens of a window": (
        memory_table, "kv_cache_bytes", lambda it, *a: KV_CACHE(replace(it, kind=tuple(replace(k, window=None) for k in it.kind)), *a),
    ),
    "passes a state to all ranks in a row": (step_time, "SCANS", ("relay",)),
    "takes a delta rule for attention": (step_time, "scan_flops", lambda sizes, tokens, backward=False: 4 * 128 * 32 * tokens**2),
    "reads all experts for any token": (
        serve_request.ServeRequest, "read_bytes", lambda self, tokens: self.weight_bytes,
    ),
    "tiles without computing again": (
        step_time, "_linear_s", lambda request, *a: LINEAR(request.but(ffn_chunk=None), *a),
    ),
    "holds the whole feed-forward though it is tiled": (
        memory_table, "feed_forward_bytes", lambda it, fed, dtype, tp: FEED_FORWARD(it, 32 * fed, dtype, tp),
    ),
    "updates on the GPU what is on the host": (search, "host_update_bytes", lambda *a: 0),
    "leaves the offloaded state on the GPU": (memory_table, "_offloaded_state", lambda entries, *a: (entries, 0)),
    "takes weights to come from the host in no time": (step_time, "_from_host_s", lambda *a: 0.0),
    "two products in a linear backward, not twice two": (step_time, "linear_backward_flops", lambda flops: flops),
    "keeps activations of the whole sequence": (memory_table, "rank_tokens", lambda r, d: r.tokens),
    "gathers weights over the slowest link alone": (
        Group, "bytes_per_s", property(lambda self: self.link.bytes_per_s),
    ),
    "takes collectives to stay in a node": (step_time, "group", whole_group),
    "sends everything in an all-to-all, its own part too": (
        Group, "exchange_s", lambda self, n: n / self.machine.inside.bytes_per_s,
    ),
    "reads all weights on each GPU": (serve_request, "parameter_bytes", without(serve_request.parameter_bytes, 3)),
    "holds one micro-batch in a pipeline": (stages, "chunks_held", lambda *a: a[2]),
    "holds all micro-batches in a pipeline": (stages, "chunks_held", lambda *a: a[2] * a[3]),
    "forgets the bubble": (step_time.StepTime, "bubble_s", property(lambda self: 0.0)),
    "leaves the bubble as it is where stages interleave": (
        step_time.StepTime, "bubble_s", property(lambda self: self.pipeline.interleave * BUBBLE(self) if self.pipeline else 0.0),
    ),
    "gives all stages the whole vocabulary": (
        stages.Stage, "rank_parameters", lambda self, tp: PARAMETERS(self, tp) + self.model.vocabulary * self.model.d_model,
    ),
    "offloads nothing": (memory_table, "ON_THE_GPU", 10**6),
    "offloads in no time": (step_time, "_with_offload", lambda passes, *a: passes),
    "offloads beside nothing": (step_time, "_with_offload", lambda *a: beside_nothing(*a)),
    "counts float32 logits alone": (memory_table, "loss_bytes", lambda m, tokens, dtype, tp: logits_bytes(m, tokens, "float32", tp)),
    "suggests without planning": (suggest, "fits", lambda request, shrinking=False: True),
}  # fmt: skip
KV_CACHE, SECONDS, WORK = memory_table.kv_cache_bytes, step_time.block_seconds, step_time.ring_work
ACTIVE, DISPATCH, WINDOWED = Layer.rank_active_parameters, step_time._dispatch_s, step_time.window_work
LINEAR, FEED_FORWARD, MAKING = step_time._linear_s, memory_table.feed_forward_bytes, step_time._making_s


def test_the_planner_passes_all_checks() -> None:
    for check in CHECKS:
        check()


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_mistake_is_noticed(name: str) -> None:
    assert fails(CHECKS, MUTANTS[name]), f"nobody noticed: {name}"


def test_a_plan_for_one_gpu_needs_no_group() -> None:
    alone = replace(ideal(), ranks_per_node=1)
    it = best(Request(small_model(), 4096, alone))
    assert it.degrees == Degrees(1, 1, 1, 1, 1) and it.time.exposed_s == 0
