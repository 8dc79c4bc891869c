"""The makespan of a ring, computed from the waits of the ring program, step by step, for all ranks at once.

Posting, computing and waiting follow the order of `schedules/ring.py`, and messages behave as in
`comm/clocked/timeline.py`, so `simulate` agrees up to rounding. If all ranks compute equally long and no hop
takes longer than a block, no rank waits and the sum is enough (`tests/cost/test_closed_form.py` proves it).

Score elements by rank and step are counted tile by tile if this is quick, and otherwise computed by formula.

Let shards have L tokens, and zig-zag's pieces x = L/2 tokens. Let T(n) be the number of elements in those
kernel tiles of a causal square of n rows that are not entirely masked. The formulas for one block are

    contiguous   T(L) for a rank's own block, L² for an earlier rank's, 0 for a later rank's
    striped      T(L)
    zig-zag      x² + 2·T(x) for a rank's own block, 2·x² for any other

They equal the count if tiles divide the pieces and all pieces are equal; otherwise they differ by the tiles
that contain the end of one piece and the beginning of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from jaxtyping import Int, Num

from ringlab.cost.flops import layout_work
from ringlab.cost.hardware import Hardware
from ringlab.layout import LAYOUTS, Layout, contiguous, get_layout, striped, zigzag

LARGEST_FOLLOWED = 64  # the most ranks that are followed step by step; more would take too long for a planner


def ring_forward_s(
    compute_s: Num[np.ndarray, "rows steps"], hop_s: Num[np.ndarray, " P"], latency_s: Num[np.ndarray, " P"]
) -> float:
    """Return the makespan in seconds of P − 1 hops of K/V, each posted before the current block is computed.

    compute_s: seconds by [rank, step], with one row if all ranks are alike. With a window there may be fewer
    steps than ranks, because steps in which no rank sees anything are left out. hop_s: seconds that the link
    from rank r to r + 1 is busy with one block. latency_s: seconds until the block arrives. If ranks have to
    wait and there are more than LARGEST_FOLLOWED, the result is an upper bound: every step waits for the
    slowest link.
    """
    P, hop = compute_s.shape[1], float((hop_s + latency_s).max())
    slowest = compute_s.max(axis=0)
    if _alike(compute_s) and hop <= slowest[: P - 1].min(initial=np.inf):
        return float(slowest.sum())
    if P > LARGEST_FOLLOWED:
        return float(np.maximum(slowest[:-1], hop).sum() + slowest[-1])
    now = np.zeros(len(hop_s))
    wire = _Wire(hop_s, latency_s)
    for step in range(P):
        arrived = wire.post(now) if step < P - 1 else None
        now = now + compute_s[:, step]
        if arrived is not None:
            now = np.maximum(now, arrived)
    return float(now.max())


def ring_backward_s(
    compute_s: Num[np.ndarray, "rows steps"],
    hop_s: Num[np.ndarray, " P"],
    home_s: Num[np.ndarray, " P"],
    latency_s: Num[np.ndarray, " P"],
) -> float:
    """Return the makespan in seconds of the backward ring, where dK/dV follow their block in P hops of `home_s` each."""
    P = compute_s.shape[1]
    if P == 1:
        return float(compute_s.max())
    last, hops = float((home_s + latency_s).max()), float((hop_s + home_s + latency_s).max())
    slowest = compute_s.max(axis=0)
    if _alike(compute_s) and hops <= slowest.min():
        return float(slowest.sum()) + last
    if P > LARGEST_FOLLOWED:
        return float(np.maximum(slowest, hops).sum()) + last
    now = np.zeros(len(hop_s))
    wire = _Wire(hop_s, latency_s)
    home = None
    for step in range(P):
        arrived = wire.post(now) if step < P - 1 else None
        now = now + compute_s[:, step]
        if home is not None:
            now = np.maximum(now, home)
        home = wire.post(now, home_s)
        if arrived is not None:
            now = np.maximum(now, arrived)
    assert home is not None
    return float(np.maximum(now, home).max())


def ring_links(
    first_gpu_of_rank: Int[np.ndarray, " P"], machine: Hardware
) -> tuple[Num[np.ndarray, " P"], Num[np.ndarray, " P"]]:
    """Return (bytes per second, latency in seconds) of the link from each rank of a ring to the next."""
    node = first_gpu_of_rank // machine.ranks_per_node
    inside = node == np.roll(node, -1)
    rate = np.where(inside, machine.inside.bytes_per_s, machine.between.bytes_per_s)
    return rate, np.where(inside, machine.inside.latency_s, machine.between.latency_s)


def _alike(compute_s: np.ndarray) -> bool:
    return len(compute_s) == 1 or bool((compute_s == compute_s[0]).all())


class _Wire:
    """The links of a ring: a message starts when both ends are posted and the previous message is complete."""

    def __init__(self, hop_s: np.ndarray, latency_s: np.ndarray) -> None:
        self.hop_s, self.latency_s = hop_s, latency_s
        self.free = np.zeros(len(hop_s))
        ranks = np.arange(len(hop_s))
        self.next, self.previous = np.roll(ranks, -1), np.roll(ranks, 1)

    def post(self, now: np.ndarray, busy_s: np.ndarray | None = None) -> np.ndarray:
        """Return the time, (P,) seconds, at which an exchange posted at `now` is complete for each rank.

        An exchange is complete for a rank when its messages to the next and from the previous rank have
        arrived.
        """
        begin = np.maximum(np.maximum(now, now[self.next]), self.free)
        self.free = begin + (self.hop_s if busy_s is None else busy_s)
        delivered = self.free + self.latency_s
        return np.maximum(delivered, delivered[self.previous])


FORMULAS: dict[Callable[[int, int], Layout], tuple[int, Callable[[int, int], tuple[int, int, int]]]] = {
    contiguous: (1, lambda x, square: (square, x * x, 0)),
    striped: (1, lambda x, square: (square, square, square)),
    zigzag: (2, lambda x, square: (x * x + 2 * square, 2 * x * x, 2 * x * x)),
}
"""The formulas of a layout, if it has any: the number of pieces of x tokens that a rank owns; and a function of
x, and of the work on a causal square of x rows, that returns the rank's work on its own block, on an earlier
rank's and on a later rank's. The work of other layouts is counted."""
MOST_COUNTED = 2**17  # the most tokens whose tiles are counted, which takes milliseconds
LONGEST_COUNTED = 2**22  # the same limit for a layout without a formula; counting takes a second


@lru_cache(maxsize=512)
def ring_work(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return the score elements of one head by (rank, step), and the tokens of the largest shard.

    The table has P rows, or one row where all ranks have the same work.
    """
    if S * max(1, P // 16) <= MOST_COUNTED:
        return counted(layout, S, P, causal, tile)
    if LAYOUTS[layout] in FORMULAS:
        return by_formula(layout, S, P, causal, tile)
    return _scaled(layout, S, P, causal, tile)


def counted(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return the table of `ring_work`, counted tile by tile."""
    dealt = get_layout(layout, S, P)
    work = layout_work(dealt, causal, tile)
    alike = bool((work == work[0]).all())
    return work[:1] if alike else work, max(dealt.length(rank) for rank in range(P))


def _scaled(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return the table counted on a shorter sequence if S is very long; work grows as S² except in partly masked tiles."""
    times = max(1.0, S / LONGEST_COUNTED)
    work, tokens = counted(layout, min(S, LONGEST_COUNTED), P, causal, tile)
    return np.rint(work * times**2).astype(np.int64), math.ceil(tokens * times)


def by_formula(layout: str, S: int, P: int, causal: bool, tile: tuple[int, int]) -> tuple[np.ndarray, int]:
    """Return the table of `ring_work`, computed by FORMULAS, for layouts that have one."""
    pieces, formula = FORMULAS[LAYOUTS[layout]]
    if P == 1:  # on one rank, the whole sequence is one piece
        pairs = staircase(S, tile) if causal else S * S
        return np.full((1, 1), pairs, dtype=np.int64), S
    piece = -(-S // (pieces * P))
    if not causal:
        return np.full((1, P), (pieces * piece) ** 2, dtype=np.int64), pieces * piece
    own, earlier, later = formula(piece, staircase(piece, tile))
    ranks = np.arange(1 if earlier == later else P)[:, None]
    steps = np.arange(P)[None, :]
    work = np.where(steps == 0, own, np.where(steps <= ranks, earlier, later))
    return work.astype(np.int64), pieces * piece


@lru_cache(maxsize=512)
def window_work(
    layout: str, S: int, P: int, causal: bool, tile: tuple[int, int], window: int
) -> tuple[np.ndarray, int]:
    """Return the table of `ring_work` for a sliding window, without the steps in which no rank sees anything.

    Pieces of consecutive tokens are compared pair by pair. If single tokens are dealt, every P-th token of the
    window is on each rank, and the tiles of a rank's own block represent those of all others.
    """
    dealt = get_layout(layout, 2 * P, P)
    if dealt.step > 1:
        length = -(-S // P)
        of_a_rank = band(length, 0, tile, -(-window // P), causal, length)
        return np.full((1, P), of_a_rank, dtype=np.int64), length
    pieces = len(dealt.runs(0)) * P
    x = -(-S // pieces)
    dealt = get_layout(layout, pieces, P)
    owner = np.empty(pieces, dtype=np.int64)
    for rank in range(P):
        owner[dealt.positions(rank)] = rank
    work = np.zeros((P, P), dtype=np.int64)
    reach = min(pieces - 1, -(-(window - 1) // x))
    for apart in range(0 if causal else -reach, reach + 1):
        seen = band(x, apart * x, tile, window, causal, x)
        rows = np.arange(max(0, apart), min(pieces, pieces + apart))
        ranks, origins = owner[rows], owner[rows - apart]
        np.add.at(work, (ranks, (ranks - origins) % P), seen)
    return work[:, work.any(axis=0)], x * pieces // P


def band(rows: int, ahead: int, tile: tuple[int, int], window: int, causal: bool, keys: int) -> int:
    """Return the elements of tiles that are not entirely masked, for `rows` rows and `keys` keys.

    The first row is `ahead` tokens after the first key.

    >>> band(4, 0, (1, 1), 2, True, 4), band(4, 4, (1, 1), 2, True, 4), band(4, 0, (2, 2), 2, True, 4)
    (7, 1, 12)
    """
    height, width = tile
    period = math.lcm(height, width)
    steady = -(-2 * window // period) * period + period
    if ahead == 0 and rows == keys > steady + 2 * period:  # the rows between the first and the last are alike
        times, rest = divmod(rows - steady, period)
        short, longer = (band(n, 0, tile, window, causal, n) for n in (steady + rest, steady + rest + period))
        return short + times * (longer - short)
    if ahead > 0:  # rows beyond the window see none of these keys
        rows = min(rows, -(-window // height) * height)
    first = np.arange(0, rows, height)
    last = np.minimum(first + height, rows) - 1
    lowest = np.maximum(0, first + ahead - window + 1)
    highest = np.minimum(keys - 1, last + ahead + (0 if causal else window - 1))
    covered = np.minimum(keys, (highest // width + 1) * width) - lowest // width * width
    return int(((last - first + 1) * np.where(lowest <= highest, covered, 0)).sum())


def is_balanced(layout: str) -> bool:
    """Return whether the ranks' work under a causal mask differs by less than a tenth on a long sequence.

    >>> is_balanced("zigzag"), is_balanced("contiguous")
    (True, False)
    """
    dealt = get_layout(layout, 8192, 8)
    work = [int((dealt.positions(rank) + 1).sum()) for rank in range(dealt.P)]  # token i has i + 1 scores
    return max(work) < 1.1 * min(work)


def staircase(x: int, tile: tuple[int, int]) -> int:
    """Return the elements of the tiles that are not entirely masked in a causal square of x rows."""
    rows, keys = tile
    if rows == keys:
        whole, rest = divmod(x, rows)
        return whole * (whole + 1) // 2 * rows * rows + rest * x
    last = np.minimum(np.arange(rows, x + rows, rows), x)
    heights = np.diff(last, prepend=0)
    return int((heights * np.minimum(-(-last // keys) * keys, x)).sum())
