"""The memory formulas agree with bytes counted tensor by tensor, and with published bytes.

The planner's bytes of attention are compared with the bytes that the ring program uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringlab.comm.memory import MemoryMeter
from ringlab.cost import memory
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import attention_work
from ringlab.cost.models import Layer, Model, model, model_names
from ringlab.cost.planner import Request
from ringlab.cost.planner.memory_table import step_memory
from ringlab.cost.planner.parallelism import Degrees
from ringlab.cost.simulate import simulate
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError
from ringlab.layout import zigzag
from ringlab.nn import loss_share
from tests.cost.planner_cases import small_model

SEVENTY = model("llama3-70b")
EIGHT = model("llama3-8b")
some_model = st.sampled_from(model_names()).map(model)


def test_published_kv_cache() -> None:
    """The K/V cache of 70B at 1M tokens is 327.68 GB in bf16; a published 163 GB leaves out V."""
    assert memory.kv_cache_bytes(SEVENTY, 10**6, "bfloat16") == 327_680_000_000


@given(
    B=st.integers(1, 3),
    K=st.integers(1, 4),
    group=st.integers(1, 4),
    D=st.integers(1, 8),
    Dv=st.integers(1, 8),
    tokens=st.integers(1, 50),
    P=st.integers(2, 9),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_attention_bytes_tensor_by_tensor(
    B: int, K: int, group: int, D: int, Dv: int, tokens: int, P: int, dtype: str
) -> None:
    sizes = Attention(B=B, H=K * group, K=K, D=D, dtype=dtype, Dv=Dv)
    size = 2 if dtype == "bfloat16" else 4
    q, out = (B * K * group * tokens * dim * size for dim in (D, Dv))
    k, v = (B * K * tokens * dim * size for dim in (D, Dv))
    assert memory.attention_bytes(sizes, tokens, P) == q + out + (k + v) + (k + v)
    assert memory.attention_bytes(sizes, tokens, 1) == q + out + k + v
    assert memory.attention_bytes(sizes, tokens, P, "allgather") == q + out + P * (k + v)
    scores = B * K * group * tokens * (tokens * P) * size
    assert memory.attention_bytes(sizes, tokens, P, "materialised") == q + out + P * (k + v) + scores


def test_saved_bytes_tensor_by_tensor() -> None:
    """The saved bytes of a layer of Llama 3 8B are the sum of its tensors, for one token in bfloat16."""
    d, heads, kv, ff = 4096, 4096, 1024, 14336
    inputs_and_norms = 4 * d
    flash = heads + 2 * kv + heads
    swiglu = 3 * ff
    lse = 32 * 4
    assert memory.saved_bytes(EIGHT, 1) == 2 * (inputs_and_norms + flash + swiglu) + lse
    assert memory.saved_bytes(EIGHT, 1, recomputation="selective") == 2 * (
        inputs_and_norms + heads + 2 * kv + swiglu
    )
    assert memory.saved_bytes(EIGHT, 1, recomputation="full") == 2 * d
    halved = 2 * inputs_and_norms + (2 * (flash + swiglu) + lse) // 2
    assert memory.saved_bytes(EIGHT, 1, tp=2) == halved


def test_saved_bytes_of_each_kind_of_layer_tensor_by_tensor() -> None:
    """Experts keep what they get and return, a latent is kept twice, and a delta rule keeps q, k and v twice."""
    (sparse,) = model("qwen3-30b-a3b").kinds
    within = 2 * 8 * 2048 + 8 * 3 * 768
    attention = 2 * 4096 + 2 * 512
    assert memory.saved_bytes(sparse, 1) == 2 * (4 * 2048 + attention + within) + 4 * 32 + 4 * 128
    dense = model("deepseek-v3").kinds[0]
    latents, heads = 2 * (512 + 64 + 1536), 128 * (192 + 128)
    assert memory.saved_bytes(dense, 1) == 2 * (4 * 7168 + latents + heads + 3 * 18432) + 4 * 128
    linear, gated = model("qwen3-next-80b-a3b").kinds
    mixed, values = 2 * 16 * 128 + 32 * 128, 32 * 128
    within, router = 2 * 10 * 2048 + 3 * 512 * (10 + 1), 4 * 512
    assert (
        memory.saved_bytes(linear, 1)
        == 2 * (4 * 2048 + 2 * mixed + 3 * values + within) + 2 * 4 * 32 + router
    )
    heads = 16 * 256 * (2 + 2) + 2 * 2 * 256  # q and out, the gate and the gated output, k and v
    assert memory.saved_bytes(gated, 1) == 2 * (4 * 2048 + heads + within) + 4 * 16 + router


@given(it=some_model, tokens=st.integers(1, 1000), fed=st.integers(1, 1000))
def test_a_tiled_feed_forward_keeps_its_input_alone(it: Model, tokens: int, fed: int) -> None:
    for layer in it.kinds:
        whole, tiled = (memory.saved_bytes(layer, tokens, tiled=each) for each in (False, True))
        assert whole - tiled == memory.feed_forward_bytes(layer, tokens)
        most = memory.layer_gradient_bytes(layer, tokens)
        assert memory.layer_gradient_bytes(layer, tokens, fed=tokens) == most
        assert memory.layer_gradient_bytes(layer, tokens, fed=min(fed, tokens)) <= most
    assert memory.feed_forward_bytes(EIGHT.kinds[0], 10) == 10 * 2 * 3 * 14336
    few = memory.layer_gradient_bytes(EIGHT, 1000, fed=10)
    assert few == 1000 * 2 * (
        4096 + 2 * 4096 + 2 * 1024
    )  # attention's gradients are larger than the feed-forward's for ten tokens


def test_caches_of_models_of_several_kinds() -> None:
    """A token of DeepSeek-V3 has 70 KB, Gemma 3 caches windows of 1,024 tokens, and Qwen3-Next 24 KB and states."""
    assert memory.kv_cache_bytes(model("deepseek-v3"), 1000, B=2) == 2 * 1000 * 61 * 576 * 2
    of_a_layer = 2 * 16 * 128 * 2
    for tokens in (100, 10**6):
        layers = 10 * tokens + 52 * min(tokens, 1024)
        assert memory.kv_cache_bytes(model("gemma3-27b"), tokens) == layers * of_a_layer
    states = 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)
    assert memory.kv_cache_bytes(model("qwen3-next-80b-a3b"), 1000, B=3) == 3 * (
        1000 * 12 * 2 * 2 * 256 * 2 + states
    )
    shared = memory.kv_cache_bytes(model("deepseek-v3"), 1000, parts=4, tp=8)
    assert shared == 250 * 61 * 576 * 2  # the latent is whole on each of the tp ranks


def test_training_state_is_16_bytes_a_weight_and_shared_out() -> None:
    """The training state takes 18 bytes a weight (2 + 4 + 12) with bf16 weights, and 16 in float32."""
    weights = EIGHT.parameters
    assert memory.optimizer_bytes(EIGHT) == 12 * weights
    assert memory.optimizer_bytes(EIGHT, "float32") == 8 * weights
    assert memory.state_bytes(EIGHT) == 18 * weights
    assert memory.state_bytes(EIGHT, "float32") == 16 * weights
    layer = 2 * EIGHT.layer_matrix_parameters * 2
    assert memory.gathered_bytes(EIGHT, fsdp=64) == layer
    assert memory.state_bytes(EIGHT, fsdp=64) == pytest.approx(18 * weights / 64 + layer, abs=3)


@given(it=some_model, fsdp=st.integers(1, 1024))
def test_shares_add_up(it: Model, fsdp: int) -> None:
    for part in (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes):
        whole, share = part(it), part(it, fsdp=fsdp)
        assert whole <= share * fsdp < whole + fsdp


def parts_of(it: Layer) -> list[tuple[int, int]]:
    """Return (parts, size) of each matrix outside of experts: the parts that ranks can share, and the size of a part."""
    d, plain = it.d_model, 0 if it.experts else it.d_ff
    found = [(1, d * (it.experts or 0)), (plain or 1, it.ffn_matrices * d * bool(plain))]
    found += [(it.shared_d_ff, it.ffn_matrices * d)] if it.shared_d_ff else []
    if it.linear:
        # q and k of each of their heads, then v, the gate, two numbers and the output of each head of v.
        taps = it.convolution or 0
        return [*found, (it.K, 2 * it.D * (d + taps)), (it.H, it.value_dim * (3 * d + taps) + 2 * d)]
    found += [(it.H, it.value_dim * d)]
    if not it.kv_latent:
        return [*found, (it.H, d * it.D * (1 + it.output_gate)), (it.K, d * (it.D + it.value_dim))]
    asked = [(1, d * it.q_latent), (it.H, it.q_latent * it.D)] if it.q_latent else [(it.H, d * it.D)]
    rope = it.rope or 0
    return [
        *found,
        *asked,
        (1, d * (it.kv_latent + rope)),
        (it.H, it.kv_latent * (it.D - rope + it.value_dim)),
    ]


def allowed(it: Model) -> list[int]:
    """Return the degrees of tensor parallelism up to 64 that divide the heads and the feed-forwards of a model."""
    found = []
    for tp in range(1, 65):
        fits = all(k.H % tp == 0 and (k.dealt_heads % tp == 0 or tp % k.dealt_heads == 0) for k in it.kinds)
        if fits and not any(width % tp for k in it.kinds for width in k.widths):
            found.append(tp)
    return found


@pytest.mark.parametrize("name", model_names())
def test_a_rank_of_tensor_parallelism_has_whole_heads_latents_routers_words_and_norms(name: str) -> None:
    it, before = model(name), 0
    whole = it.parameters
    for tp in allowed(it):
        weights = it.d_model * (2 * it.layers + 1)
        weights += (1 if it.tied_embeddings else 2) * -(-it.vocabulary // tp) * it.d_model
        for kind in it.kinds:
            weights += kind.layers * sum(-(-parts // tp) * size for parts, size in parts_of(kind))
            weights += kind.layers * kind.expert_parameters // tp
        assert memory.parameter_bytes(it, tp=tp) == 2 * weights, tp
        assert memory.gradient_bytes(it, tp=tp) == 4 * weights
        assert memory.optimizer_bytes(it, tp=tp) == 12 * weights
        assert weights * tp >= whole and (weights <= before or tp == 1)
        assert weights >= max(size for kind in it.kinds for _, size in parts_of(kind))
        assert memory.parameter_bytes(it, fsdp=8, tp=tp) * 8 >= 2 * weights
        largest = max(
            sum(-(-parts // tp) * size for parts, size in parts_of(kind)) + kind.expert_parameters // tp
            for kind in it.kinds
        )
        assert memory.gathered_bytes(it, fsdp=8, tp=tp) == 2 * 2 * largest
        before = weights


@pytest.mark.parametrize("name", model_names())
def test_a_rank_caches_whole_heads(name: str) -> None:
    it = model(name)
    for tp in allowed(it):
        held = memory.kv_cache_bytes(it, 1000, tp=tp)
        assert held * tp >= memory.kv_cache_bytes(it, 1000)
        numbers = 0
        for kind in it.kinds:
            heads, dims, tokens = -(-kind.K // tp), kind.D + kind.value_dim, min(1000, kind.window or 1000)
            if kind.linear:
                mixed = 2 * heads * kind.D + kind.H // tp * kind.value_dim
                numbers += kind.layers * (2 * kind.H // tp * kind.D * kind.value_dim)  # in float32
                numbers += kind.layers * mixed * ((kind.convolution or 1) - 1)
            else:
                numbers += kind.layers * tokens * (kind.latent or heads * dims)
        assert held == 2 * numbers, tp


def test_by_hand_a_rank_of_sixteen_has_a_whole_kv_head_of_llama() -> None:
    """Llama 3 70B over TP 16 takes 9.0 GB a rank, and 8.8 if its 8 K/V heads could be cut in halves."""
    d = 8192
    attention = d * (4 * 128 + 2 * 128) + 4 * 128 * d  # four of 64 query heads, one K/V head
    weights = 80 * (attention + 3 * d * 28672 // 16) + 2 * 128256 // 16 * d + 161 * d
    assert memory.parameter_bytes(SEVENTY, tp=16) == 2 * weights == 8_989_458_432
    assert round(2 * SEVENTY.parameters / 16 / 1e9, 1) == 8.8


def measured_loss_bytes(dtype: str, tokens: int, words: int) -> int:
    """Return the peak bytes of this package's loss with its gradient, from logits that the caller holds."""
    hidden = torch.randn(1, tokens, 8, dtype=getattr(torch, dtype), requires_grad=True)
    head = torch.randn(words, 8, dtype=hidden.dtype)
    labels = torch.randint(words, (1, tokens))
    meter = MemoryMeter()
    with meter.watch():
        logits = hidden @ head.T
        loss_share(logits, labels, tokens).backward()
    return meter.report().peak_bytes


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", 14), ("float16", 14), ("float32", 16)])
def test_the_loss_holds_what_is_counted(dtype: str, each: int) -> None:
    """The loss uses the counted bytes and a few scalars, more than three float32 copies of the logits."""
    sizes = small_model(vocabulary=2000)
    for tokens in (256, 500):
        counted = memory.loss_bytes(sizes, tokens, dtype)
        assert counted == tokens * 2000 * each
        measured = measured_loss_bytes(dtype, tokens, 2000)
        assert counted <= measured <= counted + 64
        assert 3 * memory.logits_bytes(sizes, tokens) < measured
        assert memory.loss_bytes(sizes, tokens, dtype, tp=4) == counted // 4


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: memory.attention_bytes(Attention(), 8, 2, "magic"), "ring, allgather"),
        (lambda: memory.saved_bytes(EIGHT, 8, recomputation="some"), "selective"),
        (lambda: memory.saved_bytes(EIGHT, 8, tp=3), "32 query heads of llama3-8b"),
        (lambda: memory.saved_bytes(model("qwen2.5-7b"), 8, tp=14), "4 key/value heads"),
        (lambda: memory.parameter_bytes(EIGHT, fsdp=0), "FSDP degree"),
        (lambda: memory.parameter_bytes(EIGHT, "int4"), "one of the dtypes"),
    ],
)
def test_what_cannot_be_counted_is_refused(call: Callable[[], int], told: str) -> None:
    with pytest.raises(CostError, match=told):
        call()


HEADS = [(32, 32), (32, 16), (32, 8), (32, 4), (8, 1)]
RANKS = [1, 2, 3, 4, 8]
OF_ATTENTION = ("K/V in flight", "dK and dV in float32", "float32 accumulators")


@pytest.fixture(autouse=True, scope="module")
def first_backward() -> None:
    """Run one backward first, since torch keeps some tensors of a process's first backward for a while."""
    simulate(Attention(1, 2, 2, 8), zigzag(16, 2), hardware("h100"), backward=True)


def measured_bytes(
    H: int, K: int, P: int, backward: bool, tokens: int = 256, dtype: str = "bfloat16", Dv: int = 128
) -> int:
    """Return the peak bytes of the rank that needs most memory, plus the bytes of its own q, k and v."""
    sizes = Attention(1, H, K, 128, dtype, Dv=Dv)
    peak = simulate(sizes, zigzag(tokens * P, P), hardware("h100"), backward=backward).peak_bytes
    return int(peak.max()) + own_bytes(sizes, tokens)


def own_bytes(sizes: Attention, tokens: int) -> int:
    numbers = (sizes.H + sizes.K) * sizes.D + sizes.K * sizes.value_dim
    return numbers * tokens * (2 if sizes.dtype == "bfloat16" else 4)


def counted_bytes(H: int, K: int, P: int, backward: bool, tokens: int = 256) -> int:
    """Return attention's bytes in the memory table, with q, k, v, out and lse that the layer holds."""
    request = Request(
        small_model(H=H, K=K), tokens * P, replace(hardware("h100"), ranks_per_node=P), tp=1, ring=P, ulysses=1,
        fsdp=1, purpose="training" if backward else "prefill",
    )  # fmt: skip
    book = step_memory(request, Degrees(1, 1, P, 1, 1), "none")
    lse = 4 * H * tokens
    held = own_bytes(request.attention, tokens) + 2 * H * 128 * tokens + lse
    return held + sum(book.of(name) for name in OF_ATTENTION)


def misses(counted: Callable[[int, int, int, bool], int]) -> list[tuple[int, int, int, bool]]:
    """Return the cases whose counted bytes are below the measured bytes, or above 1.3 times those bytes."""
    return [
        (H, K, P, backward)
        for H, K in HEADS
        for P in RANKS
        for backward in (False, True)
        if not 1 <= counted(H, K, P, backward) / measured_bytes(H, K, P, backward) <= 1.3
    ]


def test_the_memory_table_holds_what_the_ring_takes_and_little_more() -> None:
    assert misses(counted_bytes) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("P", RANKS)
def test_work_of_either_dtype_is_counted(dtype: str, P: int) -> None:
    for (H, K), Dv in (*((heads, 128) for heads in HEADS[::2]), ((32, 8), 48), ((32, 32), 192)):
        sizes = Attention(1, H, K, 128, dtype, Dv=Dv)
        out = H * Dv * 256 * (2 if dtype == "bfloat16" else 4) + 4 * H * 256
        for backward in (False, True):
            counted = own_bytes(sizes, 256) + out + attention_work(sizes, 256, P, backward).total_bytes
            assert 1 <= counted / measured_bytes(H, K, P, backward, dtype=dtype, Dv=Dv) <= 1.3, (
                H,
                K,
                Dv,
                backward,
            )


def test_a_backward_sums_dq_in_float32_between_steps() -> None:
    """A backward on three ranks peaks at 19 blocks: dq 2, out 1, slots 4, and three pairs dK/dV of 4 each."""
    block, rows = 32 * 128 * 256 * 2, 2 * 32 * 256 * 4
    own = 3 * block
    assert measured_bytes(32, 32, 3, True) == own + 19 * block + rows


def test_logits() -> None:
    assert memory.logits_bytes(EIGHT, 1000) == 1000 * 128256 * 4
    assert memory.logits_bytes(EIGHT, 1000, "bfloat16", tp=8) == 1000 * 16032 * 2
