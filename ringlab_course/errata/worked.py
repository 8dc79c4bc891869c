"""Published worked examples with wrong arithmetic, and claims about kernels that a compilation refutes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringlab.blocks.triton.configs import Config
from ringlab.blocks.triton.offline import Job, compile_all
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.layout import contiguous
from ringlab.merge import Partial, merge
from ringlab_course.errata.entry import Entry, Figure


def _eight_tokens() -> dict[str, Any]:
    n, P, D = 8, 2, 4
    layout, per_rank = contiguous(n, P), n // P
    whole = torch.zeros(1, 1, n, D)

    def program(ring: Ring) -> int:
        shard = layout.shard(whole, ring.rank)
        ring.shift(shard, shard)
        return 3 * shard.numel()

    outcome = VirtualCluster(P).run(program)
    adds = per_rank * per_rank * D  # multiply-adds of one product of a block with a block
    return {
        "n": n,
        "P": P,
        "D": D,
        "held": outcome.results[0],
        "flops": 2 * adds,
        "adds": P * P * 2 * adds,
        "all_flops": P * P * 2 * 2 * adds,
        "sent": outcome.trace.bytes_sent(rank=0) // 4,
        "hops": outcome.trace.rounds(0),
    }


def _softmax_by_hand() -> dict[str, Any]:
    scores = np.array([0.707, 0.0, 0.707, 0.0])
    weights = np.exp(scores) / np.exp(scores).sum()
    return {"larger": float(weights[0]), "smaller": float(weights[1]), "sum": 2 * (0.31 + 0.15)}


def _merged_by_hand() -> dict[str, Any]:
    def partial(scores: list[float], values: list[float]) -> Partial:
        s, v = torch.tensor(scores).double(), torch.tensor(values).double()
        return Partial((torch.softmax(s, 0) @ v).reshape(1, 1, 1, 1), torch.logsumexp(s, 0).reshape(1, 1, 1))

    merged = merge(partial([2, 1], [10, 20]), partial([3], [30]))
    return {"merged": float(merged.out), "at_once": float(partial([2, 1, 3], [10, 20, 30]).out)}


WORKED = (
    Entry(
        "Eight tokens on two ranks: 128 FLOPs a product and 32 values sent a round, not 64 and 8",
        "n = {n}, P = {P}, head dim {D}: a rank holds {claimed.held} values of Q, K and V; each product costs {claimed.flops} FLOPs; "
        "each round sends {claimed.sent} values.",
        "{held} values is right. A product of {D} × {D} matrices takes {claimed.flops} multiply-adds, {flops} "
        "FLOPs; the whole attention takes {adds} multiply-adds, {all_flops} FLOPs. A K/V block has {sent} values, "
        "and {hops} hop is enough.",
        "Counting multiply-adds as FLOPs is the source of the factors of two in the estimates above.",
        "06",
        (
            Figure("held", "values of Q, K and V on a rank", 48, holds=True),
            Figure("flops", "FLOPs of one product", 64),
            Figure("sent", "values sent in a round", 8),
            Figure("hops", "hops", 2),
            Figure("all_flops", "FLOPs of the whole attention", None),
        ),
        _eight_tokens,
    ),
    Entry(
        "softmax of [0.707, 0, 0.707, 0] is [0.335, 0.165, 0.335, 0.165], not [0.31, 0.15, 0.31, 0.15]",
        "The weights are {claimed.larger} and {claimed.smaller}.",
        "They are {larger} and {smaller}. The claimed weights add up to {sum}; weights add up to one.",
        "Add up the weights: this takes a moment, and finds this kind of mistake every time.",
        "02",
        (
            Figure("larger", "the larger weight", 0.31, "{:.3f}"),
            Figure("smaller", "the smaller weight", 0.15, "{:.3f}"),
            Figure("sum", "sum of the four claimed weights", 1.0, "{:.2f}"),
        ),
        _softmax_by_hand,
    ),
    Entry(
        "Merging [2, 1] → [10, 20] with [3] → [30] gives 24.205, not 24.18",
        "Two blocks merged by their log-sum-exp give {claimed.merged}.",
        "Merged or computed at once, the result is {merged}.",
        "Intermediate rounding changes the fourth digit, which makes a right program look wrong.",
        "02",
        (
            Figure("merged", "merged", 24.18, "{:.3f}"),
            Figure("at_once", "taken at once", None, "{:.3f}"),
        ),
        _merged_by_hand,
    ),
)


KERNELS_OF = "ringlab_course.errata.length_kernels"


def _constant_from_a_tensor() -> dict[str, Any]:
    config = Config(block_m=128, block_n=128, num_warps=4, num_stages=1)
    names, arch = ("published", "mended"), "sm_90"
    jobs = [Job(name, arch, 128, "float32", config, sources=KERNELS_OF) for name in names]
    made = compile_all(jobs, processes=1)
    return {"arch": arch, **{name: not each.error for name, each in zip(names, made, strict=True)}}


KERNELS = (
    Entry(
        "A kernel cannot compute a compile-time constant from a tensor",
        "A published kernel, with its launch, loads a length and declares the rest of it a `tl.constexpr`, the "
        "size of its tile.",
        "A `tl.constexpr` is known before the kernel runs, a loaded number only while it runs. Triton does not "
        "compile the kernel, here for {arch}, so nobody can have run it. Give the kernel a fixed block size and "
        "mask what lies beyond the length: that compiles.",
        "Code that was never run is presented as a complete implementation, and its claims about speed were not "
        "measured either.",
        "12",
        (
            Figure("published", "the published kernel compiles", True),
            Figure("mended", "a fixed block and a mask: compiles", None),
        ),
        _constant_from_a_tensor,
        modules=(KERNELS_OF,),
    ),
)
