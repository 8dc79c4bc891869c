"""The simulated serving programs send what the formulas say and read what the cache holds; the plan is counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ringlab.cost.flops import attention_flops
from ringlab.cost.hardware import hardware
from ringlab.cost.models import model
from ringlab.cost.planner import serve_time as module
from ringlab.cost.planner.serve_time import ServeRequest, chunk_s, serve_time, weights_of_rank
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
    """On links of one kind the closed form of the plan, collective by collective, is what the program waits for."""
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
    request = ServeRequest(it, H100, len(lengths), 4096, P, 1, queries=queries, merge=merge)
    planned = serve_time(request).partials_s / it.layers
    of_it = decode_heads_traffic(it.attention(B=len(lengths)), P, queries=queries, merge=merge)
    wire = of_it.total_bytes / H100.inside.bytes_per_s + of_it.steps * H100.inside.latency_s
    assert planned == pytest.approx(wire, rel=1e-12)


@pytest.mark.parametrize("travels", ["kv", "q"])
def test_a_simulated_chunk_sends_and_computes_what_the_formulas_say(travels: str) -> None:
    """Scores on free links: all that are visible, and of a kernel tile on the diagonal the whole."""
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
    """Its attention on links of one kind: hops that computation hides, and hops that it does not."""
    for prefix, new, travels in ((65536, 8192, "kv"), (65536, 1024, "kv"), (65536, 1024, "q")):
        it = model("llama3-70b")
        request = ServeRequest(it, H100, 1, 8, 4, 1, travels=travels)
        planned = module._chunk_attention_s(request, prefix, new)
        run = simulate_prefill(it.attention(), prefix, new, 4, H100, travels=travels)
        visible = new * prefix + new * (new + 1) // 2
        diagonal = attention_flops(it.attention(), new * 128) / 4 / RATE
        # Where queries travel, the partial of the last step goes home after all computation.
        home = it.H * new // 4 * (it.D + 1) * 4 / H100.inside.bytes_per_s + H100.inside.latency_s
        after = home if travels == "q" else 0.0
        assert planned <= run.makespan_s + 1e-12, (prefix, new, travels, visible)
        assert run.makespan_s <= planned + diagonal + after


BASE = ServeRequest("llama3-70b", "h100", 8, 131_072, token_ranks=2, head_ranks=8)


def test_the_figures_of_a_plan_by_hand() -> None:
    """Llama 3 70B, 8 sequences of 128 Ki tokens, 16 H100s: 327,680 bytes of K and V a token, 70.6 billion weights."""
    plan = serve_time(BASE)
    assert plan.cache_s == pytest.approx(327_680 * 131_072 * 8 / 16 / 3.35e12)
    of_layer = 8192 * 128 * (64 // 8 + 2 * 1 + 64 // 16) + 3 * 8192 * 28672 // 16
    weights = 80 * of_layer + 128256 * 8192 // 16
    assert weights_of_rank(BASE) == weights
    assert plan.linear_s == pytest.approx(weights * 2 / 3.35e12)
    partials = 8 * 64 // 8 // 2 * 129 * 4
    assert plan.partials_s == pytest.approx(80 * (partials / H100.inside.bytes_per_s + H100.inside.latency_s))
    assert plan.token_s == plan.linear_s + plan.cache_s + plan.partials_s + plan.tensor_s
    assert plan.tokens_per_s == 8 / plan.token_s
    assert len(plan.chunks_s) == 16 and plan.first_token_s == sum(plan.chunks_s)
    assert plan.as_dict()["token_s"] == plan.token_s


def test_the_plan_with_own_queries_reads_less_and_sends_more() -> None:
    own, every = (serve_time(replace(BASE, queries=queries)) for queries in ("own", "all"))
    assert own.linear_s < every.linear_s
    assert own.partials_s > every.partials_s


def test_more_ranks_for_tokens_read_the_cache_in_less_time() -> None:
    times = [serve_time(replace(BASE, token_ranks=ranks)).cache_s for ranks in (1, 2, 4, 8)]
    assert times == pytest.approx([times[0] / ranks for ranks in (1, 2, 4, 8)])


@pytest.mark.parametrize("chunk", [131_072, 8192, 1000])
def test_chunks_have_the_scores_of_the_whole_prompt(chunk: int) -> None:
    """On one rank, where nothing travels."""
    request = replace(BASE, token_ranks=1, head_ranks=1)
    starts = range(0, 131_072, chunk)
    parts = [module._chunk_attention_s(request, at, min(chunk, 131_072 - at)) for at in starts]
    assert sum(parts) == pytest.approx(module._chunk_attention_s(request, 0, 131_072))


def test_a_short_chunk_after_a_long_prefix_takes_longer_if_keys_travel() -> None:
    kv, q, auto = (chunk_s(replace(BASE, travels=way), 1 << 20, 256) for way in ("kv", "q", "auto"))
    assert auto == q < kv


def forgets_heads(request: ServeRequest) -> Attention:
    return request.sizes


def test_the_figures_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that every row holds whole."""
    monkeypatch.setattr(ServeRequest, "row_sizes", property(forgets_heads))
    with pytest.raises(AssertionError):
        test_the_figures_of_a_plan_by_hand()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_ranks": 3}, "share 8 heads"),
        ({"token_ranks": 3}, "share 64 heads"),
        ({"token_ranks": 0}, "token_ranks"),
        ({"travels": "v"}, "travels="),
        ({"merge": "tree"}, "merge="),
        ({"model": "llama9"}, "llama"),
        ({"hardware": "h1"}, "h100"),
        ({"dtype": "int3"}, "dtype"),
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
        (lambda: simulate_prefill(SIZES, 4, 16, 8, H100, layout="spiral"), LayoutError),
    ],
)
def test_what_cannot_be_simulated(call: Callable[[], Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        call()
