"""Who travels: the bytes of every schedule in which something goes around all ranks, as a function of H, K and head dims.

A token's bytes are of two kinds: what goes around as it is makes P − 1 hops; what follows it, changes at every rank and goes
home makes P. With e bytes an element and s bytes of the state (float32: 4):

                        as it is, P − 1 hops           follows, P hops
    K/V, forward        K·(D + Dv)·e                   0
    K/V, backward       K·(D + Dv)·e                   K·(D + Dv)·s
    queries, forward    H·D·e                          H·(Dv + 1)·s        the partial (out, lse)
    queries, backward   H·((D + Dv)·e + 2·s)           H·D·s               q, dout, lse, delta; dq
    a latent, forward   (R + Dr)·e                     0
    a latent, backward  (R + Dr)·e                     (R + Dr)·s

So queries backward (Burst) are fewer bytes only where H/K is below (D + Dv)·(e + s) / ((D + Dv)·e + D·s + 2·s): 3/2 for bfloat16 and
4/3 for float32 if D = Dv is large. Queries should travel backward if H = K, and never with grouped heads. Forward, a query
and its partial are more bytes than K and V of a token at every H/K.

All bytes equal those of `ringlab.schedules`, byte for byte. Source: arXiv 2509.19836, table 1, which counts dQ and dK/dV in
bfloat16: 3·H·D against 4·K·D.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ringlab.comm.strides import strides
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.traffic import Traffic, block_s, state_bytes
from ringlab.errors import CostError
from ringlab.layout import Layout, contiguous

TRAVELLERS = {
    "ring": ("kv", "kv"),
    "burst": ("kv", "queries"),
    "query-ring": ("queries", "queries"),
    "bidirectional": ("kv", "kv"),
    "multi-ring": ("kv", "kv"),
}
"""What travels forward and what backward, by schedule."""


@dataclass(frozen=True)
class Load:
    """The bytes of a token that travel: `around` as they are, P − 1 hops, and those that follow and go home, P hops."""

    around: int
    following: int = 0

    def share(self, part: int, whole: int) -> Load:
        """Return `part` of `whole` equal parts of it."""
        return Load(self.around * part // whole, self.following * part // whole)


@dataclass(frozen=True)
class Width:
    """Head dims and the latent of a layer: Dv of v, and R + Dr numbers of a token that travel in place of K and V.

    None for v of K's head dim, and 0 for K and V themselves.
    """

    value: int | None = None
    latent: int = 0


PLAIN_WIDTH = Width()


@dataclass(frozen=True)
class Route:
    """Which ranks something visits: distances in ranks from its owner, 0 first; what follows begins at `begin`."""

    stops: tuple[int, ...]
    load: Load
    begin: int = 0

    def in_round(self, number: int) -> int:
        """Return the bytes of a token that are under way while the blocks of a round are computed; after the last, those that go home."""
        last = len(self.stops) - 1
        around = self.load.around if number < last else 0
        return around + (self.load.following if self.begin < number <= last + 1 and last > 0 else 0)


def load(sizes: Attention, travels: str, width: Width = PLAIN_WIDTH, *, backward: bool = False) -> Load:
    """Return the bytes of one token that travel, "kv" or "queries"; "kv" is a latent if `width` has one.

    Raises: CostError for another traveller.

    >>> load(Attention(H=8, K=8, D=128), "kv", backward=True), load(Attention(H=8, K=8, D=128), "queries", backward=True)
    (Load(around=4096, following=8192), Load(around=4160, following=4096))
    """
    e, s = element_bytes(sizes.dtype), state_bytes(sizes.dtype)
    H, D = sizes.B * sizes.H, sizes.D
    Dv = D if width.value is None else width.value
    if travels == "kv":
        numbers = sizes.B * width.latent or sizes.B * sizes.K * (D + Dv)
        return Load(numbers * e, numbers * s if backward else 0)
    if travels != "queries":
        raise CostError("what travels: kv or queries", repr(travels))
    if backward:
        return Load(H * ((D + Dv) * e + 2 * s), H * D * s)
    return Load(H * D * e, H * (Dv + 1) * s)


def travel_traffic(
    sizes: Attention,
    schedule: str,
    layout: Layout | int,
    P: int | None = None,
    *,
    rank: int | None = None,
    backward: bool = False,
    width: Width = PLAIN_WIDTH,
    rings: int | None = None,
) -> Traffic:
    """Return the traffic of `rank` under one of TRAVELLERS; if None, of the rank that sends most.

    `layout` may be a number of tokens, dealt contiguously to P ranks. The mask hides no distance. rings: as in
    "multi-ring(rings=…)". Backward counts the backward alone.
    Raises: CostError for another schedule.

    >>> all_heads = Attention(H=32, K=32)
    >>> [travel_traffic(all_heads, name, 64, 4, backward=True).total_bytes for name in ("ring", "burst")]
    [2883584, 1847296]
    """
    if schedule not in TRAVELLERS:
        raise CostError(f"a schedule among {', '.join(TRAVELLERS)}", repr(schedule))
    if not isinstance(layout, Layout):
        layout = contiguous(layout, P or 1)
    if rank is None:
        how: dict[str, Any] = {"backward": backward, "width": width, "rings": rings}
        of_ranks = (travel_traffic(sizes, schedule, layout, rank=r, **how) for r in range(layout.P))
        return max(of_ranks, key=lambda it: it.total_bytes)
    travels = TRAVELLERS[schedule][backward]
    whole = load(sizes, travels, width, backward=backward)
    routes = routes_of(schedule, travels, whole, layout.P, sizes.K, rings)
    steps = [_along(route, layout, rank) for route in routes]
    sent = tuple(map(sum, zip_longest(*steps, fillvalue=0)))
    return Traffic(sent, sum(map(_messages, routes)))


def routes_of(
    schedule: str, travels: str, whole: Load, P: int, kv_heads: int, rings: int | None = None
) -> list[Route]:
    """Return the routes of everything that starts on one rank."""
    if schedule == "bidirectional":
        near, far = tuple(range(P // 2 + 1)), (0, *range(P - 1, P // 2, -1))
        return [Route(near, whole), Route(far, whole, begin=1)]
    if schedule == "multi-ring":
        found = strides(P)[: rings or kv_heads]
        bounds = [kv_heads * number // len(found) for number in range(len(found) + 1)]
        return [
            Route(tuple(stride * step % P for step in range(P)), whole.share(last - first, kv_heads))
            for stride, first, last in zip(found, bounds, bounds[1:], strict=False)
        ]
    direction = -1 if travels == "queries" else 1
    return [Route(tuple(direction * step % P for step in range(P)), whole)]


def _along(route: Route, layout: Layout, rank: int) -> list[int]:
    """Return the bytes that `rank` sends at each stop of a route."""
    held = [layout.length((rank - stop) % layout.P) for stop in route.stops]
    last = len(held) - 1
    if not route.load.following:
        held = held[:last]
    return [
        (route.load.around * tokens if step < last else 0)
        + (route.load.following * tokens if step >= route.begin and last > 0 else 0)
        for step, tokens in enumerate(held)
    ]


def _messages(route: Route) -> int:
    hops = len(route.stops) - 1
    return hops + (hops + 1 - route.begin if route.load.following and hops else 0)


def exposed_s(
    sizes: Attention,
    schedule: str,
    tokens: int,
    P: int,
    rates: tuple[float, float, float],
    *,
    links: int = 1,
    backward: bool = False,
    width: Width = PLAIN_WIDTH,
) -> float:
    """Return the seconds in which `P` ranks of `tokens` tokens wait for messages; all kernels take as long as a balanced block.

    rates: FLOP/s, bytes/s of one link in one direction, and seconds of latency. links: those of a rank that can send at once; 1
    behind a switch, 2 to both neighbours, P − 1 in a full mesh.

    While the blocks of one round are computed, those of the next arrive, and what follows those of the round before; what
    is complete goes home in the end. A round's messages take the time of the fullest link, and one latency: where
    latency is most of a hop's time, waits overlap more than that and are shorter, by up to a third.
    """
    flops_per_s, bytes_per_s, latency_s = rates
    travels = TRAVELLERS[schedule][backward]
    whole = load(sizes, travels, width, backward=backward)
    routes = routes_of(schedule, travels, whole, P, sizes.K)
    block = block_s(sizes, tokens, flops_per_s, backward=backward)
    seconds = 0.0
    for number in range(max(len(route.stops) for route in routes) + 1):
        on_links = [route.in_round(number) * tokens for route in routes]
        computed = (
            1 if number == 0 or schedule != "bidirectional" else sum(number < len(r.stops) for r in routes)
        )
        if any(on_links):
            hop = max(sum(on_links) / links, *on_links) / bytes_per_s + latency_s
            seconds += max(0.0, hop - block * computed * (number < len(routes[0].stops)))
    return seconds


def turning_point(sizes: Attention, P: int, width: Width = PLAIN_WIDTH) -> float:
    """Return the H/K below which queries backward are fewer bytes than K/V, on `P` ranks.

    >>> [round(turning_point(Attention(D=128, dtype=dtype), 1024), 2) for dtype in ("bfloat16", "float32")]
    [1.49, 1.33]
    """
    one = Attention(sizes.B, 1, 1, sizes.D, sizes.dtype)
    kv, queries = (load(one, travels, width, backward=True) for travels in ("kv", "queries"))
    around, home = (P - 1, P) if P > 1 else (1, 1)
    return (around * kv.around + home * kv.following) / (around * queries.around + home * queries.following)


def peak_bytes(
    sizes: Attention, tokens: int, schedule: str, *, backward: bool = False, odd: bool = False
) -> int:
    """Return the most bytes that a rank holds beside q, k, v and dout, on 5 ranks or more, with a fused kernel and H ≤ 4·K.

    odd: whether the number of ranks is.

    Derivation, with q, k and r for B·H·L·D, B·K·L·D and B·H·L: a rank always has two slots for what goes around, one in use
    and one being filled, and from its forward out and lse.
    Queries forward: while a partial is merged, the one that was sent and the one that arrived, the share of this rank's
    block in q's dtype, and the same in float32. Queries backward: delta; dk and dv twice, their sums and
    the shares of these rows; the dq that was sent and the one that arrives, and the share in q's dtype.
    Both directions: twice the slots, and forward one accumulator. If P is even, one of the four slots is free when out is
    written, as the way ahead is longer. Backward: dk and dv sent and arriving, both ways, and the shares of these rows. If P is
    odd and q has 16 bits, e·q less: this is read off simulations, not derived.
    Raises: CostError for a schedule other than query-ring, burst and bidirectional.
    """
    if schedule not in ("query-ring", "burst", "bidirectional"):
        raise CostError("query-ring, burst or bidirectional", repr(schedule))
    e, s = element_bytes(sizes.dtype), state_bytes(sizes.dtype)
    q, k = (sizes.B * heads * tokens * sizes.D for heads in (sizes.H, sizes.K))
    r = sizes.B * sizes.H * tokens
    kept = e * q + s * r
    if backward and schedule == "bidirectional":
        slot, block = 2 * e * k, 2 * s * k
        return kept + s * (q + r) + 4 * slot + 5 * block - odd * (e < s) * e * q
    if backward:
        return kept + s * r + 2 * (2 * e * q + 2 * s * r) + 2 * 2 * s * k + 2 * s * q + e * q
    if schedule == "query-ring":
        merging = max(s * q * (e < s) + 2 * s * r, 3 * s * r)
        return 2 * e * q + 2 * s * (q + r) + kept + merging
    if schedule == "bidirectional":
        slot, accumulator = 2 * e * k, s * (q + 2 * r)
        return max(4 * slot + accumulator, (3 + odd) * slot + accumulator + kept)
    return 2 * 2 * e * k + s * (q + 2 * r) + kept
