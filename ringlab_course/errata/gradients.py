"""Published claims that lead to wrong outputs, wrong gradients or NaN.

For each claim, one line of a small ring program is changed as the claim says, and the error is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab import oracle
from ringlab.attention import ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.run.run import Run
from ringlab.conformance.run.virtual import on_virtual_ranks
from ringlab.layout import Layout, contiguous, dealt, zigzag
from ringlab_course.errata.entry import Entry, Figure

Fold = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(out, maximum, sum) so far, the scores of a block and its values → (out, maximum, sum)."""


def fold(out: Tensor, top: Tensor, total: Tensor, scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running state. out is not normalised; a row that has seen no key has a maximum of −inf."""
    higher = torch.maximum(top, scores.amax(-1))
    safe = higher.masked_fill(higher == -math.inf, 0.0)
    weights, kept = torch.exp(scores - safe[:, None]), torch.exp(top - safe)
    return out * kept[:, None] + weights @ v, higher, total * kept + weights.sum(-1)


def fold_of_block_maxima(
    out: Tensor, top: Tensor, total: Tensor, scores: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold as published: each block subtracts its own maximum, −inf in a row without visible keys."""
    own = scores.amax(-1)
    weights = torch.exp(scores - own[:, None])  # −inf − (−inf) is NaN
    higher = torch.maximum(top, own)
    kept, added = torch.exp(top - higher), torch.exp(own - higher)
    return (
        out * kept[:, None] + (weights @ v) * added[:, None],
        higher,
        total * kept + weights.sum(-1) * added,
    )


def fold_without_the_old_sum(
    out: Tensor, top: Tensor, total: Tensor, scores: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold as published: o' = (o·e^(m−m') + …) / l' is normalised, but lacks the factor l of the old out."""
    higher = torch.maximum(top, scores.amax(-1))
    kept, weights = torch.exp(top - higher), torch.exp(scores - higher[:, None])
    total = total * kept + weights.sum(-1)
    return (out * kept[:, None] + weights @ v) / total[:, None], higher, total


def ring_of(fold: Fold, layout: Layout, *, causal: bool, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Return (out, true out) of one head on virtual ranks.

    Every block is computed whole, and none is skipped.
    """
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(layout.S, 8, generator=draw, dtype=torch.float64) for _ in range(3))

    def program(ring: Ring) -> Tensor:
        mine = torch.from_numpy(layout.positions(ring.rank))
        here, keys, values = q[mine] / math.sqrt(q.shape[1]), k[mine], v[mine]
        out, top, total = (
            torch.zeros_like(here),
            torch.full((len(mine),), -math.inf).double(),
            torch.zeros(len(mine)).double(),
        )
        for step in range(ring.world_size):
            theirs = torch.from_numpy(layout.positions(ring.origin(step)))
            hidden = theirs > mine[:, None] if causal else torch.zeros(len(mine), len(theirs), dtype=bool)  # type: ignore[call-overload]
            out, top, total = fold(out, top, total, (here @ keys.T).masked_fill(hidden, -math.inf), values)
            if step < ring.world_size - 1:
                keys, values = ring.shift(keys, values, length=layout.length(ring.origin(step + 1)))
        return out if normalised else out / total[:, None]

    out = layout.unshard(VirtualCluster(layout.P).run(program).results)
    true = oracle.attention(*(x[None, None] for x in (q, k, v)), causal=causal).out[0, 0]
    return out, torch.from_numpy(true)


def wrong_ring(name: str, layout: str, *, causal: bool = True, P: int = 4, S: int = 16) -> dict[str, Any]:
    """Return (result, true result) for out, dq, dk and dv: a wrong ring on virtual ranks in float64."""
    run = Run(P, S, layout, causal, H=2, K=2, D=16, dtype="float64")
    ran = on_virtual_ranks(MUTANTS[name].target(), run)
    true = expected(run.plain)[0]
    return {each: (ran.arrays[each], getattr(true, each)) for each in ("out", "dq", "dk", "dv")}


def error(result: Any, true: Any) -> float:
    """Return ‖result − true‖ / ‖true‖."""
    result, true = np.asarray(result), np.asarray(true)
    return float(np.linalg.norm(result - true) / np.linalg.norm(true))


def _against_the_ring() -> dict[str, Any]:
    right = wrong_ring("the_other_direction", "token-fold")
    return {name: error(*right[name]) for name in ("out", "dq", "dk", "dv")}


def _divided_by_ranks() -> dict[str, Any]:
    P, valid = 4, (6, 3, 1, 6)  # tokens that count, on each rank
    draw = np.random.default_rng(0)
    x, weight = [draw.standard_normal((n, 8)) for n in valid], draw.standard_normal(8)
    gradient = [each.T @ (each @ weight) for each in x]  # of the sum of (x·w)²/2 over a rank's tokens

    def reduced(scale: Any) -> np.ndarray:
        def program(ring: Ring) -> torch.Tensor:
            return ring.all_reduce(torch.from_numpy(gradient[ring.rank] * scale(ring.rank)))

        return np.asarray(VirtualCluster(P).run(program).results[0])

    true = sum(gradient) / sum(valid)
    total = reduced(lambda rank: 1 / sum(valid))
    none = np.zeros((0, 8))
    with np.errstate(all="ignore"):
        empty = none.T @ (none @ weight) / np.float64(len(none))  # the local mean of a rank without tokens
    return {
        "P": P,
        "sum": float(np.linalg.norm(total) / np.linalg.norm(true)),
        "mean": float(np.linalg.norm(total / P) / np.linalg.norm(true)),
        "of_means": error(reduced(lambda rank: 1 / valid[rank] / P), true),
        "empty": bool(np.isfinite(empty).all()),
    }


def _unseen_blocks() -> dict[str, Any]:
    layout = dealt(16, 4, chunk=1, folded=True)
    published, _ = ring_of(fold_of_block_maxima, layout, causal=True)
    mended, _ = ring_of(fold, layout, causal=True)
    return {
        "S": layout.S,
        "P": layout.P,
        "nan_rows": int(published.isnan().any(-1).sum()),
        "mended": int(mended.isnan().any(-1).sum()),
    }


def _old_sum() -> dict[str, Any]:
    layout = contiguous(64, 4)
    published, true = ring_of(fold_without_the_old_sum, layout, causal=False, normalised=True)
    alone, true_alone = ring_of(fold_without_the_old_sum, contiguous(64, 1), causal=False, normalised=True)
    return {
        "P": layout.P,
        "error": error(published, true),
        "one_rank": bool(torch.allclose(alone, true_alone)),
    }


def _loose_check() -> dict[str, Any]:
    P, S = 4, 256
    wrong = wrong_ring("takes_what_it_sent", "contiguous", causal=False, P=P, S=S)
    result, true = (x / x.size for x in wrong["dv"])  # gradients of the mean of out · dout
    return {
        "P": P,
        "S": S,
        "error": error(result, true),
        "passes": bool(np.allclose(result, true, atol=1e-2)),
        "zeros": bool(np.allclose(0 * true, true, atol=1e-2)),
        "bounded": bool(np.allclose(result, true, rtol=0, atol=1e-6 * np.abs(true).max())),
    }


def _first_block() -> dict[str, Any]:
    wrong = wrong_ring("first_block_again", "contiguous")
    return {name: error(*wrong[name]) for name in ("out", "dq", "dk", "dv")}


def _no_statistics() -> dict[str, Any]:
    wrong = wrong_ring("lse_of_the_block", "contiguous")
    return {name: error(*wrong[name]) for name in ("out", "dq", "dk", "dv")}


def _bits() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, 32, generator=draw) for _ in range(3))

    def out(P: int) -> torch.Tensor:
        layout = zigzag(128, P)

        def program(ring: Ring) -> torch.Tensor:
            shards = (layout.shard(x, ring.rank) for x in (q, k, v))
            return ring_attention(*shards, ring=ring, layout=layout, block="naive")

        whole: torch.Tensor = layout.unshard(VirtualCluster(P).run(program).results)
        return whole

    one, four = out(1), out(4)
    return {
        "P": 4,
        "bitwise": torch.equal(one, four),
        "again": torch.equal(four, out(4)),
        "close": bool((one - four).abs().max() < 8 * torch.finfo(torch.float32).eps * one.abs().max()),
    }


_ERRORS = (
    Figure("out", "relative error of out", 0.0, "{:.2g}", holds=True),
    Figure("dq", "relative error of dQ", 0.0, "{:.3g}", holds=True),
    Figure("dk", "of dK", 0.0, "{:.3g}"),
    Figure("dv", "of dV", 0.0, "{:.3g}"),
)

GRADIENTS = (
    Entry(
        "dK and dV travel with K and V, not against them",
        "In backward, the gradients flow around the ring in the reverse direction.",
        "dK and dV belong to the K/V block and travel with it, in the same direction, one hop more than the block: "
        "P hops bring them home. Sent the other way, they meet other blocks at each step, and partial sums of "
        "different tokens are added up. dQ is still right, so checking dQ alone proves nothing.",
        "The forward is right, the loss falls, and the gradient of K has a relative error of {dk}.",
        "09",
        tuple(figure for figure in _ERRORS if figure.key != "out"),
        _against_the_ring,
        ("the_other_direction",),
    ),
    Entry(
        "Gradients of replicated weights are summed over the ranks of the ring, not averaged",
        "After the backward, sum the weight gradients over the ranks and divide by P.",
        "The loss is a sum over all tokens, divided by the number of valid tokens in the whole sequence. Ranks of "
        "a ring hold different tokens of the same sequences, so the sum over ranks is the gradient; divided by P, "
        "it is {mean} of the gradient on {P} ranks. The mean of local means is yet another number if ranks hold "
        "different numbers of valid tokens, and 0/0 if one holds none.",
        "The learning rate is smaller by a factor that changes with the number of ranks. Optimisers that normalise "
        "gradients hide the factor; clipping and weight decay do not.",
        "09",
        (
            Figure("mean", "sum over ranks, divided by P: norm relative to the true gradient", 1.0, "{:.3g}"),
            Figure("sum", "sum over ranks: norm relative to the true gradient", None, "{:.3g}"),
            Figure("of_means", "mean of local means: relative error", 0.0, "{:.2g}"),
            Figure("empty", "local mean of a rank without valid tokens is a number", True),
        ),
        _divided_by_ranks,
    ),
    Entry(
        "Subtracting each block's maximum is not safe under a causal mask",
        "A complete implementation: each block subtracts its own row maximum, then the blocks are merged.",
        "A row that sees no key of a block has a maximum of −∞ there, and −∞ − (−∞) is NaN. A weight of 0 does not "
        "remove it, because 0 · NaN is NaN. With S = {S} on P = {P} ranks and tokens dealt back and forth, "
        "{nan_rows} rows of out are NaN. Keep the maximum, and subtract 0 where it is −∞.",
        "Contiguous layouts skip whole blocks and never meet such a row, so the bug waits for the first balanced "
        "layout.",
        "02",
        (
            Figure("nan_rows", "rows of out with NaN", 0),
            Figure("mended", "with 0 subtracted where the maximum is −∞", None),
        ),
        _unseen_blocks,
    ),
    Entry(
        "The running output needs the old sum, not only the old maximum",
        "With a normalised output: `o' = (o·e^(m−m') + e^(s−m')·v) / l'`.",
        "A normalised o has already been divided by l, so first multiply it back: `o·l·e^(m−m')`. Without the "
        "factor l, the relative error on {P} ranks is {error}. With a single block the result is right.",
        "A test on one rank passes.",
        "02",
        (
            Figure("error", "relative error of out", 0.0, "{:.3g}"),
            Figure("one_rank", "right on one rank", True, holds=True),
        ),
        _old_sum,
    ),
    Entry(
        "A gradient check with a tolerance of a hundredth does not show that the backward is right",
        "Gradients agree by `allclose` with an absolute tolerance of `1e-2`.",
        "Gradients of a mean loss are far smaller than that. A ring that mistakes what it sent for what it "
        "received has a relative error of {error} in dV and passes; so do zeros. A bound relative to the largest "
        "true value catches both.",
        "A widely used package takes the pair (received, sent) for the pair (dK, dV), and has such a test next to "
        "it.",
        "10",
        (
            Figure("error", "relative error of dV", 0.0, "{:.3g}"),
            Figure("passes", "the wrong dV passes", False),
            Figure("zeros", "zeros pass", False),
            Figure("bounded", "the wrong dV passes a bound of a millionth of the largest value", None),
        ),
        _loose_check,
        ("takes_what_it_sent",),
    ),
    Entry(
        "Backward needs the K and V of each block, not those that are at hand",
        "In each step of backward, use the rank's own K and V, and send the gradients on.",
        "Each step needs the K/V block that the arriving gradients belong to, so K and V travel again. With the first "
        "step's block in all steps, out is right and all three gradients are wrong.",
        "A well-known framework had this bug; training ran.",
        "09",
        (_ERRORS[0], Figure("dq", "of dQ", 0.0, "{:.3g}"), *_ERRORS[2:]),
        _first_block,
        ("first_block_again",),
    ),
    Entry(
        "Backward cannot do without saved statistics",
        "The forward returns out alone; each block of backward recomputes its softmax.",
        "Backward needs the final lse, over all keys: `P = exp(S − lse)`. A block's own scores give only that "
        "block's lse. With it, the weights of every block sum to one, although they should do so only over all blocks. "
        "Save out and lse, one number per row and head.",
        "The published version that omitted them could not run backward at all.",
        "03",
        (_ERRORS[0], Figure("dq", "of dQ", 0.0, "{:.3g}"), *_ERRORS[2:]),
        _no_statistics,
        ("lse_of_the_block",),
    ),
    Entry(
        "Ring attention is not bit for bit identical to full attention",
        "The result is exact: bit for bit that of one device.",
        "It is exact up to the order of floating-point sums. On {P} ranks the order differs from that on one, and "
        "so do the bits, within a few roundings. Bit-for-bit equality is possible between runs on the same ranks, "
        "with a fixed order of merging.",
        "A test for equal bits fails on a right ring, and is then loosened until it finds nothing.",
        "10",
        (
            Figure("bitwise", "equal bits on one rank and on several", True),
            Figure("again", "equal bits in two runs on the same ranks", True, holds=True),
            Figure("close", "largest difference below 8 units of rounding", None),
        ),
        _bits,
    ),
)
