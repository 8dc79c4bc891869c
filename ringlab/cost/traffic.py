"""Bytes on the wire: the bytes that one rank sends in one attention layer, per step and in total, by schedule.

    ring, burst, query-ring, bidirectional, multi-ring   `ring_traffic`: K/V or queries go around all ranks
    allgather                                            `allgather_traffic`
    ulysses, hybrid                                      `ulysses_traffic`, `hybrid_traffic`

Serving has its own functions (`serving`), and so have linear layers (`scan_traffic`). All figures equal the
bytes that `ringlab.schedules` sends; Ulysses and the hybrid assume equally many tokens on each rank. A
backward figure counts the backward pass alone.

The bytes of a token that go around a ring are of two kinds. Bytes that do not change make P − 1 hops. The
sums that follow them change at every rank, and make P hops, the last of which takes them home. With e bytes
of an element and s bytes of a state element (4 in float32):

                        as it is, P − 1 hops           follows, P hops
    K/V, forward        K·(D + Dv)·e                   0
    K/V, backward       K·(D + Dv)·e                   K·(D + Dv)·s          dk, dv
    queries, forward    H·D·e                          H·(Dv + 1)·s          the partial (out, lse)
    queries, backward   H·((D + Dv)·e + 2·s)           H·D·s                 q, dout, lse, delta; dq
    a latent, forward   (R + Dr)·e                     0
    a latent, backward  (R + Dr)·e                     (R + Dr)·s

So in the backward, queries (Burst) take fewer bytes than K/V only if H/K is below
(D + Dv)·(e + s) / ((D + Dv)·e + D·s + 2·s), which is 3/2 for bfloat16 and 4/3 for float32 if D = Dv is
large. Queries should travel in the backward if H = K, and never with grouped heads. In the forward, a
query and its partial take more bytes than a token's K and V for every H/K. Source: arXiv 2509.19836, table
1, which counts dQ and dK/dV in bfloat16: 3·H·D against 4·K·D.

Ulysses (arXiv 2309.14509) turns the shard of tokens into a shard of heads by all-to-all and back; the hybrid (arXiv
2405.07719) makes rings of Ulysses groups.

The file also has the seconds of a block and of a hop, and the tokens per rank that hide a hop.

A block of c queries and c keys takes 2·B·H·(D + Dv)·c² FLOPs, where Dv is the head dim of v, usually D. At
the same time K and V of c tokens travel, which are B·K·(D + Dv)·e·c bytes. With F FLOP/s and B bytes/s in one
direction, a hop is hidden if

    2·H·(D + Dv)·c² / F  >=  K·(D + Dv)·e·c / B      ⇔      c  >=  e·F / (2·B) · K/H

In a balanced causal layout half of every block is computed, so c doubles. Batch and head dims cancel. Source:
arXiv 2310.01889, section 3 (with e = 2 and K = H there: c >= F/B).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from ringlab.comm.strides import strides
from ringlab.cost.flops import attention_flops
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.errors import CostError, WorldSizeError
from ringlab.layout import Layout, contiguous

RINGS = {
    "ring": ("kv", "kv"),
    "burst": ("kv", "queries"),
    "query-ring": ("queries", "queries"),
    "bidirectional": ("kv", "kv"),
    "multi-ring": ("kv", "kv"),
}
"""The schedules in which data goes around all ranks: what travels in forward, and what in backward."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that one rank sends in each step, in order, and the number of the rank's messages.

    Each step in which a block can be computed at the same time has an entry; an all-to-all is one step.
    """

    by_step_bytes: tuple[int, ...]
    messages: int

    @property
    def per_step_bytes(self) -> int:
        """Return the most bytes sent in one step."""
        return max(self.by_step_bytes, default=0)

    @property
    def steps(self) -> int:
        """Return the number of steps in which the rank sends anything."""
        return sum(sent > 0 for sent in self.by_step_bytes)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all steps."""
        return sum(self.by_step_bytes)


def state_bytes(dtype: str) -> int:
    """Return the bytes of one element of dK and dV on the wire: 8 if `dtype` is float64, otherwise 4."""
    return 8 if dtype == "float64" else 4


def gradient_bytes_per_token(sizes: Attention) -> int:
    """Return the bytes that dK and dV of one token, or the gradient of its latent, take on the wire: 4 for each number."""
    return sizes.travelling * state_bytes(sizes.dtype)


@dataclass(frozen=True)
class Load:
    """The bytes of a token that travel: `around` unchanged in P − 1 hops, `following` home in P hops."""

    around: int
    following: int = 0

    def share(self, part: int, whole: int) -> Load:
        """Return `part` of `whole` equal parts of this load."""
        return Load(self.around * part // whole, self.following * part // whole)


@dataclass(frozen=True)
class Route:
    """The ranks that a load visits, as offsets from its owner, beginning with 0.

    begin: the index in `offsets` of the first rank that sends the following bytes.
    """

    offsets: tuple[int, ...]
    load: Load
    begin: int = 0

    def bytes_sent(self, layout: Layout, rank: int) -> list[int]:
        """Return the bytes that `rank` sends in each step."""
        held = [layout.length((rank - offset) % layout.P) for offset in self.offsets]
        last = len(held) - 1
        if not self.load.following:
            held = held[:last]
        return [
            (self.load.around * tokens if step < last else 0)
            + (self.load.following * tokens if step >= self.begin and last > 0 else 0)
            for step, tokens in enumerate(held)
        ]

    @property
    def messages(self) -> int:
        """Return the number of messages that a rank sends."""
        hops = len(self.offsets) - 1
        return hops + (hops + 1 - self.begin if self.load.following and hops else 0)

    def bytes_beside(self, number: int) -> int:
        """Return the bytes of a token that travel while block number `number` of the route is computed.

        After the last block these are the bytes that go home.
        """
        last = len(self.offsets) - 1
        around = self.load.around if number < last else 0
        return around + (self.load.following if self.begin < number <= last + 1 and last > 0 else 0)


def load(sizes: Attention, travels: str, *, backward: bool = False, latent: int = 0) -> Load:
    """Return the bytes of one token that travel, if `travels` is "kv" or "queries".

    latent: if not 0, the R + Dr numbers of a token that travel in place of K and V; by default, those of `sizes`.
    Raises: CostError for any other value of `travels`.

    >>> load(Attention(H=8, K=8, D=128), "kv", backward=True), load(Attention(H=8, K=8, D=128), "queries", backward=True)
    (Load(around=4096, following=8192), Load(around=4160, following=4096))
    """
    e, s = element_bytes(sizes.dtype), state_bytes(sizes.dtype)
    H, D, Dv = sizes.B * sizes.H, sizes.D, sizes.value_dim
    if travels == "kv":
        numbers = sizes.B * latent or sizes.travelling
        return Load(numbers * e, numbers * s if backward else 0)
    if travels != "queries":
        raise CostError("what travels: kv or queries", repr(travels))
    if backward:
        return Load(H * ((D + Dv) * e + 2 * s), H * D * s)
    return Load(H * D * e, H * (Dv + 1) * s)


def routes_of(
    sizes: Attention,
    schedule: str,
    P: int,
    *,
    backward: bool = False,
    latent: int = 0,
    rings: int | None = None,
) -> list[Route]:
    """Return the routes of all loads that start on one rank, under one of RINGS. Raises: CostError for another schedule."""
    if schedule not in RINGS:
        raise CostError(f"one of the schedules {', '.join(RINGS)}", repr(schedule))
    travels = RINGS[schedule][backward]
    whole = load(sizes, travels, backward=backward, latent=latent)
    if schedule == "bidirectional":
        near, far = tuple(range(P // 2 + 1)), (0, *range(P - 1, P // 2, -1))
        return [Route(near, whole), Route(far, whole, begin=1)]
    if schedule == "multi-ring":
        found = strides(P)[: rings or sizes.K]
        bounds = [sizes.K * number // len(found) for number in range(len(found) + 1)]
        return [
            Route(tuple(stride * step % P for step in range(P)), whole.share(last - first, sizes.K))
            for stride, first, last in zip(found, bounds, bounds[1:], strict=False)
        ]
    direction = -1 if travels == "queries" else 1
    return [Route(tuple(direction * step % P for step in range(P)), whole)]


def ring_traffic(
    sizes: Attention,
    layout: Layout | int,
    P: int | None = None,
    *,
    schedule: str = "ring",
    rank: int | None = None,
    backward: bool = False,
    latent: int = 0,
    rings: int | None = None,
) -> Traffic:
    """Return the traffic of `rank` under one of RINGS; if `rank` is None, of the rank that sends most.

    In the forward of the plain ring, K and V of the current block make P−1 hops. In the backward, K and V
    make P−1 hops once more, and dK and dV in float32 make P hops, the last of which brings them home.
    `layout` may be a number of tokens, dealt contiguously to P ranks. latent: as in `load`. rings: as in
    "multi-ring(rings=…)".
    Raises: CostError for another schedule, or tokens or ranks below one; WorldSizeError for a P other than the layout's.

    >>> all_heads = Attention(H=32, K=32)
    >>> [ring_traffic(all_heads, 64, 4, schedule=name, backward=True).total_bytes for name in ("ring", "burst")]
    [2883584, 1847296]
    """
    layout = _layout(layout, P)
    how: dict[str, Any] = {"backward": backward, "latent": latent, "rings": rings}
    if rank is None:
        of_ranks = (ring_traffic(sizes, layout, schedule=schedule, rank=r, **how) for r in range(layout.P))
        return _largest(of_ranks)
    routes = routes_of(sizes, schedule, layout.P, **how)
    if layout.P == 1:
        return Traffic((), 0)
    steps = [route.bytes_sent(layout, rank) for route in routes]
    sent = tuple(map(sum, zip_longest(*steps, fillvalue=0)))
    return Traffic(sent, sum(route.messages for route in routes))


def turning_point(sizes: Attention, P: int) -> float:
    """Return the H/K below which travelling queries take fewer bytes than K/V in the backward, on `P` ranks.

    >>> [round(turning_point(Attention(D=128, dtype=dtype), 1024), 2) for dtype in ("bfloat16", "float32")]
    [1.49, 1.33]
    """
    one = replace(sizes, H=1, K=1)
    kv, queries = (load(one, travels, backward=True) for travels in ("kv", "queries"))
    around, home = (P - 1, P) if P > 1 else (1, 1)
    return (around * kv.around + home * kv.following) / (around * queries.around + home * queries.following)


def allgather_traffic(
    sizes: Attention,
    layout: Layout | int,
    P: int | None = None,
    *,
    rank: int | None = None,
    backward: bool = False,
) -> Traffic:
    """Return the traffic of `rank` if all ranks gather all K/V first; if `rank` is None, of the rank that sends most.

    In the forward, a rank sends its K, then its V, to each of the P−1 others. In the backward it sends K and
    V again, and to each other rank the dK and dV of that rank's tokens in float32 (a reduce-scatter).
    Raises: as `ring_traffic`.
    """
    layout = _layout(layout, P)
    if rank is None:
        return _largest(allgather_traffic(sizes, layout, rank=r, backward=backward) for r in range(layout.P))
    others = layout.P - 1
    gathered = sizes.block_bytes_per_token * layout.length(rank) * others
    if not backward:
        return Traffic((gathered,) if others else (), 2 * others)
    scattered = gradient_bytes_per_token(sizes) * (layout.S - layout.length(rank))
    return Traffic((gathered, scattered) if others else (), 3 * others)


def ulysses_traffic(sizes: Attention, S: int, P: int, *, backward: bool = False) -> Traffic:
    """Return the traffic of a rank of ceil(S/P) tokens: all-to-alls of Q, K and V, and of the output.

    Each of the P ranks ends with H/P query heads and K/P K/V heads of all tokens, or if P exceeds K, with the
    one K/V head that its query heads need. The backward sends equally many bytes, of dO, dQ, dK and dV,
    except that dK and dV of a head that several ranks hold are in float32, because they are summed at home.
    Raises: CostError for heads that P ranks cannot share, or tokens or ranks below one.
    """
    _check_degrees(S, P)
    heads = shared_heads(sizes, P)
    if P == 1:
        return Traffic((), 0)
    size, sent = element_bytes(sizes.dtype), -(-S // P) * (P - 1) * sizes.B
    query, out = (sent * (sizes.H // P) * dim * size for dim in (sizes.D, sizes.value_dim))
    block = sent * heads * (sizes.D + sizes.value_dim)
    home = block * (state_bytes(sizes.dtype) if P > sizes.K else size)
    before, after = (out, query + home) if backward else (query + block * size, out)
    return Traffic((before, after), 4 * (P - 1))


def hybrid_traffic(sizes: Attention, S: int, ring: int, ulysses: int, *, backward: bool = False) -> Traffic:
    """Return the traffic of a rank in rings of `ring` groups of `ulysses` ranks each: P = ring · ulysses.

    A group shares the heads of S/ring tokens by all-to-all; then each rank runs a ring for its heads
    with the ranks at the same place in the other groups. Steps: all-to-all, hops, all-to-all.
    Raises: CostError for heads that the group cannot share, or tokens or ranks below one.
    """
    _check_degrees(S, ring * ulysses)
    outer = ulysses_traffic(sizes, -(-S // ring), ulysses, backward=backward)
    inner = replace(sizes, H=sizes.H // ulysses, K=shared_heads(sizes, ulysses))
    hops = ring_traffic(inner, S, ring, backward=backward)
    around = (outer.by_step_bytes[:1], outer.by_step_bytes[1:])
    return Traffic((*around[0], *hops.by_step_bytes, *around[1]), outer.messages + hops.messages)


def shared_heads(sizes: Attention, ulysses: int) -> int:
    """Return the number of K/V heads that a rank of a Ulysses group holds.

    Raises: CostError unless the group's degree divides H, and divides K or is a multiple of it.
    """
    if sizes.H % ulysses:
        raise CostError(
            f"a Ulysses degree that divides the H={sizes.H} query heads",
            f"{ulysses}",
            f"divisors: {', '.join(str(d) for d in range(1, sizes.H + 1) if sizes.H % d == 0)}",
        )
    if sizes.K % ulysses and ulysses % sizes.K:
        raise CostError(
            f"a Ulysses degree that divides the K={sizes.K} key/value heads, or is a multiple of them",
            f"{ulysses}",
        )
    return max(1, sizes.K // ulysses)


def _layout(layout: Layout | int, P: int | None) -> Layout:
    if isinstance(layout, Layout):
        if P not in (None, layout.P):
            raise WorldSizeError(f"{layout.P} ranks, those of {layout!r}", f"{P}")
        return layout
    _check_degrees(layout, 1 if P is None else P)
    return contiguous(layout, 1 if P is None else P)


def _check_degrees(S: int, P: int) -> None:
    for name, value in (("tokens", S), ("ranks", P)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CostError(f"{name} >= 1, an integer", f"{value!r}")


def _largest(traffics: Iterable[Traffic]) -> Traffic:
    return max(traffics, key=lambda traffic: traffic.total_bytes)


def block_s(sizes: Attention, tokens: float, flops_per_s: float, *, backward: bool = False) -> float:
    """Return the seconds in which a rank of `tokens` tokens computes one block, or half of it if causal and balanced.

    Raises: CostError for tokens or rates that are not above zero.
    """
    _check(tokens=tokens, flops_per_s=flops_per_s)
    per_pair = attention_flops(sizes, 1, backward) / (2 if sizes.causal else 1)
    return per_pair * tokens**2 / flops_per_s


def hop_s(
    sizes: Attention, tokens: float, bytes_per_s: float, latency_s: float = 0.0, *, backward: bool = False
) -> float:
    """Return the seconds that one hop takes for a block of `tokens` tokens.

    With `backward=True` the block travels with its dK and dV in float32.
    bytes_per_s counts ONE direction of the link: half of the figure that data sheets print for NVLink.
    Raises: CostError for tokens or rates that are not above zero.
    """
    _check(tokens=tokens, bytes_per_s=bytes_per_s)
    return latency_s + _bytes_per_token(sizes, backward) * tokens / bytes_per_s


def least_tokens_hidden(
    flops_per_s: float,
    bytes_per_s: float,
    sizes: Attention,
    *,
    latency_s: float = 0.0,
    backward: bool = False,
) -> float:
    """Return the fewest tokens per rank for which a hop takes no longer than a block, rounded up.

    flops_per_s: the rate that the kernel reaches. Causal sizes assume a balanced layout; for a contiguous
    layout pass causal=False, since its slowest rank computes whole blocks. With latency, the equation is
    quadratic.
    Raises: CostError for rates that are not above zero.
    """
    _check(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    quadratic = block_s(sizes, 1, flops_per_s, backward=backward)
    linear = _bytes_per_token(sizes, backward) / bytes_per_s
    if latency_s == 0:
        return linear / quadratic
    return (linear + math.sqrt(linear**2 + 4 * quadratic * latency_s)) / (2 * quadratic)


def _bytes_per_token(sizes: Attention, backward: bool) -> int:
    return sizes.block_bytes_per_token + (gradient_bytes_per_token(sizes) if backward else 0)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value <= 0:
            raise CostError(f"{name} > 0, a finite number", f"{value!r}")
