"""Wrong published claims about time, bytes and memory."""

from __future__ import annotations

from typing import Any

import torch

from ringlab.attention import ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.cost.flops import attention_flops
from ringlab.cost.hardware import hardware
from ringlab.cost.memory import kv_cache_bytes
from ringlab.cost.models import model
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import block_s, hop_s, least_tokens_hidden
from ringlab.layout import contiguous
from ringlab_course.errata.entry import Entry, Figure


def _threshold() -> dict[str, Any]:
    a100, plain = hardware("a100"), Attention(H=32, K=32, D=128, causal=False)
    peak, one_way = a100.peak("bfloat16"), a100.inside.bytes_per_s
    return {
        "as_stated": least_tokens_hidden(peak, 600e9, plain),
        "half": 2 * least_tokens_hidden(peak, 600e9, plain),
        "one_way": least_tokens_hidden(peak, one_way, plain),
        "rate": one_way / 1e9,
    }


def _data_sheets() -> dict[str, Any]:
    a100, h100 = hardware("a100"), hardware("h100")
    return {
        "h100": h100.peak("bfloat16") / 1e12,
        "a100": a100.peak("bfloat16") / 1e12,
        "nvlink_4": 2 * h100.inside.bytes_per_s / 1e9,
        "nvlink_3": 2 * a100.inside.bytes_per_s / 1e9,
        "names": f"{h100.inside.name}, {a100.inside.name}",
    }


def _million_tokens() -> dict[str, Any]:
    S, P, d = 1_000_000, 8, 4096
    whole = Attention(H=1, K=1, D=d, dtype="float16", causal=False)
    peak, c = hardware("a100").peak("float16"), S // P
    return {
        "S": S,
        "P": P,
        "as_written": c * c * d / peak,
        "step": attention_flops(whole, c * c) / peak,
        "bytes": whole.block_bytes_per_token * S / 1e9,
        "transfer": whole.block_bytes_per_token * S / 200e9,
    }


def _keys_of_a_million() -> dict[str, Any]:
    whole = Attention(H=1, K=1, D=4096, dtype="float16")
    return {"keys": whole.block_bytes_per_token // 2 * 1_000_000 / 1e9}


def _kv_cache() -> dict[str, Any]:
    llama = model("llama3-70b")
    return {
        "bytes": kv_cache_bytes(llama, 1_000_000) / 1e9,
        "layers": llama.layers,
        "heads": llama.K,
        "D": llama.D,
        "keys": kv_cache_bytes(llama, 1_000_000) / 2e9,
    }


def _one_step() -> dict[str, Any]:
    sizes, S, P = Attention(H=32, K=32, D=128, causal=False), 131072, 8
    compute, transfer = block_s(sizes, S // P, 312e12), hop_s(sizes, S // P, 600e9)
    return {"S": S, "P": P, "compute": compute * 1e3, "transfer": transfer * 1e3, "ratio": compute / transfer}


def _peak_memory() -> dict[str, Any]:
    P, S = 4, 4096

    def peak(D: int) -> int:
        q, k, v = (torch.zeros(1, 2, S, D) for _ in range(3))
        layout = contiguous(S, P)

        def program(ring: Ring) -> torch.Tensor:
            shards = [layout.shard(x, ring.rank) for x in (q, k, v)]
            out: torch.Tensor = ring_attention(*shards, ring=ring, layout=layout)
            return out

        return VirtualCluster(P).run(program).memory[0].peak_bytes

    numbers_per_row = peak(64) / 4 / (2 * S // P)
    return {"grows": peak(256) / peak(64), "per_row": numbers_per_row, "D": 64, "P": P, "S": S}


COSTS = (
    Entry(
        "On an A100, communication is not hidden from 1,024 tokens per rank but from 1,040",
        "A step of c tokens costs `2·c²·d` FLOPs, so on an A100 with NVLink at 600 GB/s the transfer is hidden "
        "from {claimed.as_stated} tokens on.",
        "A step has two matrix products, scores and values: `4·c²·d` FLOPs. At the rates of the claim, that gives "
        "{as_stated} tokens. But 600 GB/s counts both directions, and a ring sends one way: at {rate} GB/s the "
        "threshold is {one_way}. Two mistakes, each of a factor of two, nearly cancel here. On another machine "
        "they do not.",
        "On InfiniBand, whose rates are given one way, the same formula is off by two.",
        "06",
        (
            Figure("as_stated", "tokens per rank, at the rates of the claim", 1024, "{:,.0f}"),
            Figure("half", "the same, if a step had half of its FLOPs", None, "{:,.0f}"),
            Figure("one_way", "tokens per rank, at the rate of one direction", None, "{:,.0f}"),
            Figure("rate", "GB/s of one direction", None, "{:.0f}"),
        ),
        _threshold,
    ),
    Entry(
        "The H100 has 989.4 TFLOP/s, not 312, and NVLink 4 has 900 GB/s, not 600",
        "For an H100, take {claimed.h100} TFLOP/s; NVLink 4 gives {claimed.nvlink_4} GB/s.",
        "Both belong to the previous generation: {a100} TFLOP/s and {nvlink_3} GB/s are the A100's and NVLink 3's. "
        "The H100 has {h100} TFLOP/s, dense in bfloat16, and NVLink 4 {nvlink_4} GB/s, both directions together.",
        "Their ratio decides when communication hides, and it changed from one generation to the next.",
        "06",
        (
            Figure("h100", "H100, dense bfloat16, TFLOP/s", 312.0, "{:,.1f}"),
            Figure("nvlink_4", "NVLink 4, GB/s in both directions", 600.0, "{:,.0f}"),
            Figure("a100", "A100, TFLOP/s", None, "{:,.0f}"),
            Figure("nvlink_3", "NVLink 3, GB/s in both directions", None, "{:,.0f}"),
        ),
        _data_sheets,
    ),
    Entry(
        "One step of a million tokens on 8 ranks takes 0.82 seconds, not one to two",
        "With d = 4096 and 125K tokens per rank, `c²·d / 312T` is {claimed.step} seconds, and the transfer of 8 GB "
        "at 200 GB/s takes {claimed.transfer} s.",
        "As written, the quotient is {as_written} s. With two matrix products, and two FLOPs for a multiply-add, "
        "it is {step} s. The transfer counts keys only: K and V of all tokens in 16 bits are {bytes} GB and take "
        "{transfer} s.",
        "Such numbers decide whether a link is fast enough.",
        "06",
        (
            Figure("step", "seconds of one step", (1.0, 2.0), "{:.2g}"),
            Figure("as_written", "seconds, as the formula is written", (1.0, 2.0), "{:.2g}"),
            Figure("transfer", "seconds of the transfer", 0.04, "{:.2g}"),
            Figure("bytes", "GB of K and V", 8.0, "{:.1f}"),
        ),
        _million_tokens,
    ),
    Entry(
        "The KV cache of a 70B model at a million tokens is 327.68 GB, not 163 GB",
        "{layers} layers, {heads} KV heads of {D}, bf16: {claimed.bytes} GB.",
        "The keys alone take {keys} GB. Keys and values take {bytes} GB.",
        "People plan memory with this number, and half of it is missing.",
        "15",
        (
            Figure("bytes", "GB of K and V", 163, "{:,.2f}"),
            Figure("keys", "GB of K alone", None, "{:,.2f}"),
        ),
        _kv_cache,
    ),
    Entry(
        "A million keys of d = 4096 are 8.2 GB in fp16, not 4 GB",
        "Keys for a million tokens at d = 4096 take {claimed.keys} GB in fp16.",
        "An element has 2 bytes, so they take {keys} GB. (The claim would hold for one byte each, as in fp8.)",
        "Values take the same amount again.",
        "06",
        (Figure("keys", "GB of keys", 4.0, "{:.1f}"),),
        _keys_of_a_million,
    ),
    Entry(
        "131,072 tokens over 8 A100s: compute is 31.5 times the transfer, not 39.3 times",
        "32 heads of 128, 312 TFLOP/s, 600 GB/s: a step computes for {claimed.compute} ms and transfers for {claimed.transfer} ms, a ratio of "
        "{claimed.ratio}.",
        "A block of S/P = 16K tokens takes {compute} ms and a hop {transfer} ms, a ratio of {ratio}. All three "
        "figures are wrong.",
        "The conclusion, that compute hides the transfer, holds; the margin does not.",
        "06",
        (
            Figure("compute", "ms of compute in a step", 8.59, "{:.3g}"),
            Figure("transfer", "ms of transfer in a step", 0.22, "{:.3g}"),
            Figure("ratio", "compute relative to transfer", 39.3, "{:.1f}"),
        ),
        _one_step,
    ),
    Entry(
        "Ring attention with a fused kernel needs O(B·heads·S/P·D) memory, not O(B·heads·S/P)",
        "No scores are stored, so only accumulators and lse remain: memory is O(B·heads·S/P), whatever the head dim.",
        "q, k, v, out and the blocks in flight have D numbers per row and head. At its peak, a rank of the ring "
        "holds {per_row} numbers per row and head beyond its own q, k and v, with D = {D}. Four times the head dim "
        "takes {grows} times the memory.",
        "A fused kernel removes only the factor S/P of the scores. O(S/P · heads · D) remains, and fills a GPU.",
        "06",
        (
            Figure("grows", "growth of a rank's peak when D is four times as large", 1.0, "{:.2f}"),
            Figure("per_row", "numbers per row and head at the peak, D = 64", None, "{:.0f}"),
        ),
        _peak_memory,
    ),
)
