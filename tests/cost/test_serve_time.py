"""The simulated serving programs send and read the formulas' bytes; plans have numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ringlab.cost.flops import attention_flops
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.planner import Request, plan
from ringlab.cost.planner import serve_time as module
from ringlab.cost.planner.memory_table import decode_memory, most_sequences, prefill_memory
from ringlab.cost.planner.search import search
from ringlab.cost.planner.serve_time import ServeRequest, chunk_s, decode_time, serve_time, serving_time
from ringlab.cost.serving import decode_heads_traffic, prefill_traffic
from ringlab.cost.simulate_serving import simulate_decode, simulate_prefill
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError, LayoutError
from ringlab.layout import contiguous, zigzag

H100 = hardware("h100")
SIZES = Attention(B=1, H=32, K=8, D=128)
RATE = H100.peak("bfloat16") * H100.reached.attention_forward


@pytest.mark.parametrize("queries", ["own", "all"])
@pytest.mark.parametrize("merge", ["all-to-all", "reduce-scatter"])
def test_a_simulated_token_sends_and_reads_what_the_formulas_say(queries: str, merge: str) -> None:
    """On links of one kind, the plan's closed form of each collective equals the program's waiting time."""
    lengths, P = (32768, 128, 16384), 8
    run = simulate_decode(SIZES, lengths, P, H100, queries=queries, merge=merge)
    expected = decode_heads_traffic(replace(SIZES, B=len(lengths)), P, queries=queries, merge=merge)
    assert run.recording.program.sent_bytes.sum() == P * expected.total_bytes
    read = SIZES.block_bytes_per_token * sum(lengths) / P / H100.memory_bytes_per_s
    assert run.free.makespan_s == pytest.approx(read, rel=1e-12)
    wide = replace(SIZES, Dv=256)
    sent = simulate_decode(wide, lengths, P, H100, queries=queries, merge=merge).recording.program.sent_bytes
    expected_of_wide = decode_heads_traffic(replace(wide, B=len(lengths)), P, queries=queries, merge=merge)
    assert sent.sum() == P * expected_of_wide.total_bytes
    wire = expected.total_bytes / H100.inside.bytes_per_s + expected.steps * H100.inside.latency_s
    assert run.exposed_s == pytest.approx(wire, rel=1e-9)
    it = model("llama3-70b")
    sharing = {"own": "dcp", "all": "helix"}[queries]
    request = ServeRequest(it, H100, len(lengths), 4096, P, 1, sharing=sharing, merge=merge)
    planned = decode_time(request).merge_s / it.layers
    of_it = decode_heads_traffic(it.attention(B=len(lengths)), P, queries=queries, merge=merge)
    wire = of_it.total_bytes / H100.inside.bytes_per_s + of_it.steps * H100.inside.latency_s
    assert planned == pytest.approx(wire, rel=1e-12)


@pytest.mark.parametrize("travels", ["kv", "q"])
def test_a_simulated_chunk_sends_and_computes_what_the_formulas_say(travels: str) -> None:
    """A chunk on free links computes all visible scores, and whole kernel tiles on the diagonal."""
    prefix, new, P = 65536, 1024, 4
    run = simulate_prefill(SIZES, prefix, new, P, H100, travels=travels)
    cached, layout = contiguous(prefix, P).lengths, zigzag(new, P)
    sent = [
        prefill_traffic(SIZES, layout, cached, travels=travels, rank=rank).total_bytes for rank in range(P)
    ]
    assert run.recording.program.sent_bytes.sum() == sum(sent)
    wide = replace(SIZES, Dv=256)
    sent = [
        prefill_traffic(wide, layout, cached, travels=travels, rank=rank).total_bytes for rank in range(P)
    ]
    of_wide = simulate_prefill(wide, prefix, new, P, H100, travels=travels)
    assert of_wide.recording.program.sent_bytes.sum() == sum(sent)
    visible = new * prefix + new * (new + 1) // 2
    least, most = (attention_flops(SIZES, n) / P / RATE for n in (visible, visible + new * 128))
    assert least <= run.free.makespan_s <= most
    if travels == "q":
        assert run.exposed_s < simulate_prefill(SIZES, prefix, new, P, H100, travels="kv").exposed_s


def test_a_planned_chunk_is_the_simulated_one() -> None:
    """A planned chunk has the simulated time on links of one kind, for hidden and for exposed hops."""
    for prefix, new, travels in ((65536, 8192, "kv"), (65536, 1024, "kv"), (65536, 1024, "q")):
        it = model("llama3-70b")
        request = ServeRequest(it, H100, 1, 8, 4, 1, travels=travels)
        planned = module._chunk_attention_s(request, prefix, new)
        run = simulate_prefill(it.attention(), prefix, new, 4, H100, travels=travels)
        visible = new * prefix + new * (new + 1) // 2
        diagonal = attention_flops(it.attention(), new * 128) / 4 / RATE
        # If queries travel, the partial of the last step goes home after all computation.
        home = it.H * new // 4 * (it.D + 1) * 4 / H100.inside.bytes_per_s + H100.inside.latency_s
        after = home if travels == "q" else 0.0
        assert planned <= run.makespan_s + 1e-12, (prefix, new, travels, visible)
        assert run.makespan_s <= planned + diagonal + after


BASE = ServeRequest("llama3-70b", "h100", 8, 131_072, token_ranks=2, head_ranks=8)


def test_the_figures_of_a_plan_by_hand() -> None:
    """For Llama 3 70B, 8 sequences of 128 Ki tokens and 16 H100s, the plan's seconds follow by hand."""
    plan = serve_time(BASE)
    token = plan.token
    assert token.cache_s == pytest.approx(327_680 * 131_072 * 8 / 16 / 3.35e12)
    of_layer = 8192 * 128 * (64 // 8 + 2 * 1 + 64 // 16) + 3 * 8192 * 28672 // 16
    weights = (
        80 * of_layer + 2 * 128256 * 8192 // 16 + 161 * 8192
    )  # including embeddings and whole norms, as in the memory table
    assert BASE.weight_bytes == 2 * weights
    assert token.weights_s == pytest.approx(weights * 2 / 3.35e12)
    partials = 8 * 64 // 8 // 2 * 129 * 4
    assert token.merge_s == pytest.approx(80 * (partials / H100.inside.bytes_per_s + H100.inside.latency_s))
    row = 8 * 8192 * 2  # 16 ranks on two nodes need three doublings inside a node and one between nodes
    gather = 3 * H100.inside.latency_s + H100.between.latency_s + row * 15 / 16 / (8 * 50e9)
    assert token.tensor_s == pytest.approx(80 * 2 * 2 * gather)
    assert plan.token_s == token.weights_s + token.cache_s + token.merge_s + token.tensor_s
    assert plan.tokens_per_s == 8 / plan.token_s
    assert len(plan.chunks_s) == 16 and plan.first_token_s == sum(plan.chunks_s)
    assert plan.as_dict()["token_s"] == plan.token_s


def test_a_short_chunk_after_a_long_prefix_takes_longer_if_keys_travel() -> None:
    kv, q, auto = (chunk_s(replace(BASE, travels=way), 1 << 20, 256) for way in ("kv", "q", "auto"))
    assert auto == q < kv


def test_to_decode_is_to_serve_with_copies() -> None:
    """Decoding with copies is serving with copies: the same seconds and the same memory on every split."""
    for tp, dp in ((1, 1), (2, 2), (8, 1), (16, 1)):
        asked = Request("llama3-70b", 2**17, "h100", nodes=4, purpose="decode", batch=4, tp=tp, dp=dp)
        decode, serve = search(asked)[0], search(asked.but(purpose="serve", sharing="copies"))[0]
        assert decode.time == serve.time and decode.step_s > 0
        books = (decode.memory, decode_memory(serve.serving))
        assert books[0].total_bytes == books[1].total_bytes


def test_copies_read_all_weights_and_add_up_among_their_tp_ranks_alone() -> None:
    """Copies read 1/8 of the weights on a GPU, all-reduce inside a node, and merge partials between nodes."""
    token = decode_time(replace(BASE, sharing="copies"))
    norms = 161 * 8192  # whole on each rank
    weights = (model("llama3-70b").parameters - norms) / 8 + norms
    assert token.weights_s == pytest.approx(weights * 2 / 3.35e12)
    row, partial = 8 * 8192 * 2, 8 * 8 * 129 * 4
    gather = 3 * H100.inside.latency_s + row * 7 / 8 / 450e9
    assert token.tensor_s == pytest.approx(80 * 4 * gather)
    assert token.merge_s == pytest.approx(80 * (H100.between.latency_s + 2 * partial / 2 / 50e9))


def test_so_many_sequences_that_computing_takes_longer_than_reading() -> None:
    """With many sequences, 2 FLOPs a weight and sequence take longer than reading 2 bytes a weight."""
    few, many = (decode_time(replace(BASE, sequences=n, context=128)) for n in (8, 4096))
    flops = BASE.weight_bytes / 2 * 2 * 4096
    assert many.weights_s == pytest.approx(flops / (H100.peak("bfloat16") * H100.reached.linear))
    assert few.weights_s == BASE.weight_bytes / 3.35e12 < many.weights_s
    for batch, kind, words in (
        (8, "memory bandwidth", "reads weights"),
        (4096, "compute", "4,096 sequences"),
    ):
        asked = Request("llama3-70b", 128, "h100", purpose="serve", batch=batch, tp=8, dp=1)
        assert plan(asked).limit.kind == kind and words in plan(asked).limit.sentence


def test_what_the_sender_of_most_sends() -> None:
    """The closed form considers only the last two ranks, and finds the most bytes that any rank sends."""
    for P, prefix, new, travels in product((2, 4, 8), (0, 9, 64, 1001), (1, 9, 21, 64), ("kv", "q")):
        request = replace(BASE, head_ranks=1, token_ranks=P)
        layout, cached = contiguous(new, P), contiguous(prefix, P).lengths
        expected = prefill_traffic(request.row_sizes, layout, cached, travels=travels).total_bytes
        assert module._most_sent_bytes(request, prefix, new, travels) == expected, (P, prefix, new, travels)


def test_the_generated_tokens_are_no_prompt() -> None:
    """If 1,024 of 131,072 tokens are generated, 127 chunks are fed, and 1,023 tokens follow the first."""
    plan = serve_time(replace(BASE, generated=1024, chunk=1024))
    assert len(plan.chunks_s) == 127 and plan.token == serve_time(BASE).token
    assert plan.answer_s == pytest.approx(plan.first_token_s + 1023 * plan.token_s)
    # Eight sequences end in the time of 1,024 tokens, and a prefill group feeds one prompt in first_token_s.
    assert plan.prefill_groups == pytest.approx(8 / (1024 * plan.token_s) * plan.first_token_s)
    assert serve_time(BASE).prefill_groups is None


def test_what_does_not_fit_is_refused_with_the_number_that_does() -> None:
    """A refusal names the sequences that fit: 100,000 of a million tokens need 2.15 PB on each GPU."""
    huge = replace(BASE, sequences=100_000, context=2**20)
    needed = (327_680 * 2**20 * 100_000 + 0.0) / 16
    with pytest.raises(CostError) as refused:
        serve_time(huge)
    assert decode_memory(huge).of("K/V cache") == needed
    assert "2.15 PB on each GPU" in refused.value.needed and "H100 has 85.5 GB" in refused.value.got
    assert "at most 3 sequences" in refused.value.remedy
    assert huge.machine.memory_bytes >= decode_memory(replace(huge, sequences=3)).total_bytes
    serve_time(replace(huge, sequences=3))
    with pytest.raises(CostError, match="4 sequences"):
        serve_time(replace(huge, sequences=4))


@pytest.mark.parametrize("sharing", ["copies", "dcp", "helix"])
@pytest.mark.parametrize("context", [1, 8191, 131_072, 2**22])
def test_one_sequence_more_than_most_does_not_fit(sharing: str, context: int) -> None:
    request = replace(BASE, sharing=sharing, context=context)
    most = most_sequences(request, 80e9)
    needed = [decode_memory(replace(request, sequences=max(1, n))).total_bytes for n in (most, most + 1)]
    assert needed[1] > 80e9 and (needed[0] <= 80e9 or most == 0)


def test_gpus_that_feed_prompts_have_a_memory_too() -> None:
    """Eight ranks that feed prompts are too few: 405B has 101 GB a GPU there, but 51 GB over 16 ranks."""
    request = replace(BASE, model="llama3-405b", sequences=1, context=8192)
    assert (
        decode_memory(request).total_bytes
        < request.machine.memory_bytes
        < prefill_memory(request).total_bytes
    )
    with pytest.raises(CostError, match="that feeds a prompt"):
        serve_time(request)
    assert serving_time(request).first_token_s > 0


def test_the_memory_of_feeding_by_hand() -> None:
    """Feeding a prompt on 2 × 8 ranks in chunks takes 1/8 of the weights and 1/16 of the cache on a GPU."""
    it = prefill_memory(BASE)
    norms = 161 * 8192  # whole on each rank
    assert it.of("parameters") == (model("llama3-70b").parameters - norms) * 2 // 8 + 2 * norms
    assert it.of("K/V cache") == 327_680 * 131_072 // 16
    # Two buffers, each for K and V of one head of one layer.
    assert it.of("K/V in flight") == 2 * 65_536 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_ranks": 3}, "share 8 heads"),
        ({"token_ranks": 0}, "token_ranks"),
        ({"travels": "v"}, "travels="),
        ({"sharing": "copies", "head_ranks": 64, "model": "qwen2.5-7b"}, "share 28 query"),
        ({"model": replace(model("llama3-70b"), d_ff=28673)}, "feed-forward"),
        ({"generated": 131_072}, "generated: an integer from 0 to 131,071"),
    ],
)
def test_what_cannot_be_planned(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CostError, match=words):
        replace(BASE, **change)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: simulate_decode(SIZES, (4,), 8, H100), CostError),
        (lambda: simulate_prefill(SIZES, 4, 2, 8, H100), CostError),
        (lambda: simulate_prefill(SIZES, 4, 16, 8, H100, layout="no-such-layout"), LayoutError),
    ],
)
def test_what_cannot_be_simulated(call: Callable[[], Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        call()
