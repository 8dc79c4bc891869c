"""Wrong published claims about the keys that a token sees and about the cost of balanced layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ringlab import oracle
from ringlab.attention import ring_attention
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.cost.flops import imbalance, layout_work, slowest_per_step
from ringlab.layout import contiguous, dealt, striped, zigzag
from ringlab.plan import tiles
from ringlab_course.errata.entry import Entry, Figure
from ringlab_course.errata.gradients import error, wrong_ring


def _triangle() -> dict[str, Any]:
    layout = contiguous(8, 1)
    (tile,) = tiles(layout, 0, 0)
    seen = np.tril(np.ones((8, 8))) if tile.causal else np.ones((8, 8))
    return {
        "S": layout.S,
        "first": int(seen[0].sum()),
        "last": int(seen[-1].sum()),
        "error": error(*wrong_ring("masks_the_past", "contiguous", P=1)["out"]),
    }


def _origins() -> dict[str, Any]:
    P, per_rank = 8, 4096

    def program(ring: Ring) -> list[int]:
        block, seen = torch.tensor([ring.rank]), []
        for step in range(ring.world_size):
            seen.append(int(block))
            if step < ring.world_size - 1:
                block = ring.shift(block)  # to rank + 1
        return seen

    held = VirtualCluster(P).run(program).results  # held[device][t]
    agree = sum(held[i][t] == (i + t) % P for i in range(P) for t in range(P))
    return {
        "P": P,
        "one": held[1][1],
        "agree": agree,
        "pairs": P * P,
        "block": held[7][4],
        "first": held[7][4] * per_rank,
        "last": held[7][4] * per_rank + per_rank - 1,
    }


def _striped_keys() -> dict[str, Any]:
    layout = striped(8, 4)
    query, keys = layout.positions(0)[1], layout.positions(2)
    return {
        "query": int(query),
        "keys": " and ".join(map(str, keys)),
        "seen": int((keys <= query).sum()),
    }


def _folds() -> dict[str, Any]:
    odd, even = (layout_work(dealt(S, 4, chunk=1, folded=True)).sum(axis=1) for S in (12, 16))
    return {
        "P": 4,
        "odd_S": 12,
        "even_S": 16,
        "odd": float(odd.max() / odd.mean()),
        "odd_all": ", ".join(map(str, odd)),
        "even": float(even.max() / even.mean()),
    }


def _first_and_last() -> dict[str, Any]:
    P = 8
    ratios = []
    for per_rank in (64, 65536):
        work = layout_work(contiguous(P * per_rank, P)).sum(axis=1)
        ratios.append(float(work[-1] / work[0]))
    return {"P": P, "short": ratios[0], "long": ratios[1]}


def _contiguous_time() -> dict[str, Any]:
    P = 8
    work = layout_work(contiguous(P * 4096, P))
    unmasked = layout_work(contiguous(P * 4096, P), causal=False)
    balanced = layout_work(zigzag(P * 4096, P))
    whole = slowest_per_step(unmasked).sum()
    return {
        "P": P,
        "skipped": float(work.sum() / unmasked.sum()),
        "time": float(slowest_per_step(work).sum() / whole),
        "zigzag": float(slowest_per_step(balanced).sum() / whole),
    }


def _token_tiles() -> dict[str, Any]:
    S, P, tile = 32768, 8, (128, 128)
    layouts = (make(S, P) for make in (contiguous, striped, zigzag))
    return {
        "S": S,
        "P": P,
        "tile": tile[0],
        **{each.name: imbalance(layout_work(each, tile=tile), each) for each in layouts},
    }


def _two_layouts() -> dict[str, Any]:
    S, P = 16, 4
    folded, dealt_one_by_one = zigzag(S, P), striped(S, P)
    rng = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(1, 2, S, 8, generator=rng, dtype=torch.float64) for _ in range(3))

    def program(ring: Ring) -> torch.Tensor:
        shards = (folded.shard(x, ring.rank) for x in (q, k, v))
        out: torch.Tensor = ring_attention(*shards, ring=ring, layout=dealt_one_by_one)
        return out

    out = folded.unshard(VirtualCluster(P).run(program).results)
    return {
        "S": S,
        "P": P,
        "zigzag": ", ".join(map(str, folded.positions(0))),
        "striped": ", ".join(map(str, dealt_one_by_one.positions(0))),
        "error": error(out.numpy(), oracle.attention(q, k, v, causal=True).out),
    }


MASKS = (
    Entry(
        "The block that is here after t hops is that of rank (i − t) mod N, not (i + t) mod N",
        "Each device sends K and V to its right neighbour; at iteration t, device i holds block (i + t) mod N. So on "
        "iteration 4, device 7 of {P} holds tokens {claimed.first} to {claimed.last}.",
        "A device that sends to the right receives from the left: device i holds block (i − t) mod N. The two "
        "formulas agree in only {agree} of {pairs} cases. Device 7 at iteration 4 happens to be one of them, and even "
        "there the claimed tokens are wrong: by either formula it holds block {block}, tokens {first} to {last}.",
        "A causal mask with the wrong origin hides the wrong keys. Without a mask the mistake does not show.",
        "05",
        (
            Figure("one", "block on device 1 after 1 hop", 2),
            Figure("block", "block on device 7 after 4 hops", 4),
            Figure("first", "its first token", 16384),
            Figure("last", "its last token", 20479),
        ),
        _origins,
    ),
    Entry(
        "The local mask is lower-triangular, not upper-triangular",
        "On the diagonal block, apply an upper-triangular mask.",
        "A query sees the keys at or before its own position. With queries as rows, the visible part is the lower "
        "triangle: the first of {S} queries sees {first} key, the last all {last}. (The hidden part is "
        "upper-triangular.)",
        "Some functions take a mask of what is visible, others of what is hidden. Print one row before you trust "
        "either.",
        "01",
        (
            Figure("first", "keys that the first query sees", 8),
            Figure("last", "keys that the last query sees", 1),
            Figure("error", "relative error of out", 0.0, "{:.3g}"),
        ),
        _triangle,
        ("masks_the_past",),
        drawing="masks",
    ),
    Entry(
        "Striped: query 4 sees key 2 but not key 6",
        "With 8 tokens striped over 4 devices, device 0 holds tokens 0 and 4. Against the keys of device 2, query {query} "
        "is not masked at all.",
        "Device 2 holds tokens {keys}. Query {query} sees the first of them but not the second, which comes after "
        "it.",
        "Between two stripes every mask is triangular, with or without its diagonal, and never all ones.",
        "08",
        (Figure("seen", "of these two keys, seen by query 4", 2),),
        _striped_keys,
    ),
    Entry(
        "A token-level layout does not defeat tile skipping",
        "Striped layouts mix tokens so finely that a kernel can skip no tile: it computes the whole square, twice "
        "what is needed.",
        "A rank's rows and keys are each in ascending order, so a tile is wholly masked or not, as in any causal "
        "block. With tiles of {tile} × {tile}, S = {S} and P = {P}, striped computes {striped} times a perfect "
        "split and zig-zag {zigzag}. Contiguous computes {contiguous}, because ranks wait.",
        "The choice between striped and zig-zag is worth a few percent.",
        "08",
        (
            Figure("striped", "striped, slowest rank relative to a perfect split", 2.0, "{:.3f}"),
            Figure("zigzag", "zig-zag", None, "{:.3f}"),
            Figure("contiguous", "contiguous", None, "{:.3f}"),
        ),
        _token_tiles,
    ),
    Entry(
        "Causal contiguous attention does not take half the time, although half of the blocks are skipped",
        "In the last rounds half of the blocks are masked and can be skipped, so attention takes half the time.",
        "{skipped} of the work remains, but the last rank skips nothing, and all wait for it: on {P} ranks the "
        "time is `(P − ½)/P`, {time} of the unmasked time. A balanced layout reaches {zigzag}.",
        "This is why striped and zig-zag exist.",
        "07",
        (
            Figure("time", "time relative to that without a mask", 0.5, "{:.4f}"),
            Figure("skipped", "work relative to that without a mask", 0.5, "{:.4f}", holds=True),
            Figure("zigzag", "time of zig-zag", None, "{:.4f}"),
        ),
        _contiguous_time,
    ),
    Entry(
        "The last rank has 2P − 1 times the work of the first, not 2P times",
        "With a contiguous layout on {P} ranks, the last has {claimed.long} times the work of the first.",
        "In the limit of long shards it has `2P − 1` times as much: {long}. The first rank has half a block, the "
        "last has P − 1 blocks and a half. With 64 tokens per rank the ratio is {short}.",
        "People check their own count against this formula, and it is off by one.",
        "07",
        (
            Figure("long", "work of the last rank relative to the first, long shards", 16.0, "{:.2f}"),
            Figure("short", "with 64 tokens per rank", None, "{:.2f}"),
        ),
        _first_and_last,
    ),
    Entry(
        "Dealing tokens back and forth does not always balance exactly",
        "With tokens dealt 0 … P−1, P−1 … 0, every rank has the same causal work.",
        "All ranks have the same work only if the number of rows dealt is even. S = {odd_S} on {P} ranks makes three "
        "rows, and the ranks compute {odd_all} pairs. S = {even_S} makes four, and the ranks are equal.",
        "The difference shrinks with the length, but it is there in every small test.",
        "08",
        (
            Figure("odd", "three rows: most work relative to the mean", 1.0, "{:.3f}"),
            Figure("even", "four rows: most work relative to the mean", 1.0, "{:.3f}", holds=True),
        ),
        _folds,
    ),
    Entry(
        "Zig-zag and striped are two layouts, not two words for one",
        "Zig-zag, also called striped, deals the tokens so that every rank has early and late ones.",
        "Zig-zag cuts the sequence into 2P chunks and gives rank r the chunks r and 2P − 1 − r. Striped deals single "
        "tokens in turn. Of {S} tokens on {P} ranks, rank 0 owns {zigzag} in the first layout, and {striped} in the "
        "second. If shards are dealt in one way and attention assumes the other, out has an error of {error}.",
        "Both balance causal work, so the step time gives no hint. Position ids and labels must follow the layout "
        "that is really used.",
        "08",
        (
            Figure("error", "relative error of out, zig-zag shards taken for striped ones", 0.0, "{:.3g}"),
            Figure("zigzag", "tokens of rank 0, zig-zag", None),
            Figure("striped", "tokens of rank 0, striped", None),
        ),
        _two_layouts,
        drawing="layouts",
    ),
)
