"""Compares schedules by their exposed communication: the ring, the all-gather, Ulysses and every hybrid.

The comparison covers one forward of one attention layer, with equally many tokens on each rank, equal links,
and a balanced layout if causal. A ring's hops overlap with blocks, while an all-gather and the all-to-alls of
Ulysses overlap with nothing:

    exposed = bytes up front / B + messages in turn · latency + hops · max(0, hop − block)

The parts come from `traffic` (bytes and a block's seconds) and `memory` (the bytes that a rank holds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ringlab.cost.memory import attention_bytes
from ringlab.cost.sizes import Attention
from ringlab.cost.traffic import (
    RINGS,
    allgather_traffic,
    block_s,
    hybrid_traffic,
    ring_traffic,
    routes_of,
    shared_heads,
)
from ringlab.errors import CostError

REASONS = ("hidden", "exposed", "memory", "heads")
"""Why an option ranks as it does: no rank waits; some rank waits; it does not fit; ranks cannot share the heads."""


@dataclass(frozen=True)
class Way:
    """One schedule on P ranks, `ulysses` of which share the heads; all figures are for one token on each rank.

    open_bytes: bytes sent while nothing is computed. turns: the number of messages with these bytes that must
    follow one another. hop_bytes: bytes sent in each of the `hops`. block_flops: FLOPs computed during a hop,
    which grow with the square of the tokens. held_bytes: bytes of q, k, v, out, and the tensors received from
    other ranks.
    """

    schedule: str
    ulysses: int
    open_bytes: int
    turns: int
    hops: int
    hop_bytes: int
    block_flops: float
    held_bytes: int

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that a rank sends, per token."""
        return self.open_bytes + self.hops * self.hop_bytes

    def exposed_s(
        self, tokens: float, flops_per_s: float, bytes_per_s: float, latency_s: float = 0.0
    ) -> float:
        """Return the seconds in which a rank of `tokens` tokens waits for messages."""
        open_s = self.open_bytes * tokens / bytes_per_s + self.turns * latency_s
        hop_s = self.hop_bytes * tokens / bytes_per_s + latency_s
        return open_s + self.hops * max(0.0, hop_s - self.block_flops * tokens**2 / flops_per_s)


@dataclass(frozen=True)
class Option:
    """A way with its bytes and seconds, which are None if `reason` is "heads". `reason` is one of REASONS."""

    schedule: str
    ulysses: int
    reason: str
    sent_bytes: int | None = None
    held_bytes: int | None = None
    exposed_s: float | None = None

    @property
    def usable(self) -> bool:
        """Return whether this option fits into memory and its ranks can share the heads."""
        return self.reason in ("hidden", "exposed")


def candidates(P: int) -> list[tuple[str, int]]:
    """Return (schedule, ranks that share the heads) of every conceivable option on P ranks.

    Raises: CostError for fewer than two ranks.
    """
    if not isinstance(P, int) or isinstance(P, bool) or P < 2:
        raise CostError("P >= 2 ranks, an integer", f"P={P!r}")
    hybrids = [("hybrid", degree) for degree in range(2, P) if P % degree == 0]
    return [("ring", 1), ("allgather", 1), ("ulysses", P), *hybrids]


def way(sizes: Attention, P: int, schedule: str, ulysses: int = 1) -> Way:
    """Return one way to divide a layer among P ranks. Raises: CostError if P ranks cannot share the layer that way."""
    if (schedule, ulysses) not in candidates(P):
        raise CostError("a schedule and a degree that P ranks can have", f"{schedule!r}, {ulysses}, P={P}")
    if schedule == "allgather":
        gathered, held = allgather_traffic(sizes, P, P).total_bytes, attention_bytes(sizes, 1, P, "allgather")
        return Way(schedule, 1, gathered, 2, 0, 0, 0.0, held)
    rows = P // ulysses
    inner = replace(sizes, H=sizes.H // ulysses, K=shared_heads(sizes, ulysses))
    held = attention_bytes(inner, ulysses, rows, "ring")
    hop = ring_traffic(inner, P, rows).per_step_bytes if rows > 1 else 0
    block_flops = block_s(inner, ulysses, 1.0)
    if ulysses == 1:
        return Way(schedule, 1, 0, 0, P - 1, hop, block_flops, held)
    traded = hybrid_traffic(sizes, P, rows, ulysses).total_bytes - (rows - 1) * hop
    held += attention_bytes(sizes, 1, 1, "blockwise")
    return Way(schedule, ulysses, traded, 2, rows - 1, hop, block_flops, held)


def ways(sizes: Attention, P: int) -> list[Way]:
    """Return all ways that the heads allow. Raises: CostError for fewer than two ranks."""
    found = []
    for schedule, ulysses in candidates(P):
        try:
            found.append(way(sizes, P, schedule, ulysses))
        except CostError:  # the heads cannot be divided among so many ranks
            continue
    return found


def weigh(
    sizes: Attention,
    tokens: int,
    P: int,
    flops_per_s: float,
    bytes_per_s: float,
    latency_s: float = 0.0,
    memory_bytes: float = math.inf,
) -> list[Option]:
    """Return every option for `tokens` tokens on each of P ranks, usable ones first, by exposed seconds.

    Options that do not fit into memory_bytes follow, and then options that the heads do not allow.
    bytes_per_s counts one direction of a link.
    Raises: CostError for fewer than two ranks, or rates, tokens or memory that are not above zero.
    """
    if (
        not all(x > 0 for x in (tokens, flops_per_s, bytes_per_s, memory_bytes))
        or not 0 <= latency_s < math.inf
    ):
        given = f"{tokens}, {flops_per_s}, {bytes_per_s}, {memory_bytes} and latency_s={latency_s}"
        raise CostError("tokens, rates and memory above zero, latency_s >= 0", given)
    possible = {(it.schedule, it.ulysses): it for it in ways(sizes, P)}
    found = []
    for schedule, ulysses in candidates(P):
        it = possible.get((schedule, ulysses))
        if it is None:
            found.append(Option(schedule, ulysses, "heads"))
            continue
        exposed = it.exposed_s(tokens, flops_per_s, bytes_per_s, latency_s)
        held = it.held_bytes * tokens
        reason = "memory" if held > memory_bytes else "exposed" if exposed > 0 else "hidden"
        found.append(Option(schedule, ulysses, reason, it.sent_bytes * tokens, held, exposed))
    last = {"memory": 1, "heads": 2}
    return sorted(found, key=lambda it: (last.get(it.reason, 0), it.exposed_s or 0.0))


def ring_exposed_s(
    sizes: Attention,
    schedule: str,
    tokens: int,
    P: int,
    rates: tuple[float, float, float],
    *,
    links: int = 1,
    backward: bool = False,
    latent: int = 0,
) -> float:
    """Return the seconds in which `P` ranks of `tokens` tokens wait for messages.

    All kernels are assumed to take as long as that of a balanced block.
    schedule: one of `traffic.RINGS`. rates: FLOP/s, bytes/s of one link in one direction, and seconds of
    latency.
    links: the number of a rank's links that can send at once: 1 behind a switch, 2 if they lead to both
    neighbours, P − 1 in a full mesh.

    While a rank computes the blocks of one round, it receives the blocks of the next round, and the sums that
    follow the blocks of the previous round. Complete sums go home at the end. A round's messages take the
    time of the fullest link, and one latency. If latency is most of a hop's time, real waits overlap more,
    and are shorter by up to a third.
    """
    flops_per_s, bytes_per_s, latency_s = rates
    routes = routes_of(sizes, schedule, P, backward=backward, latent=latent)
    block = block_s(sizes, tokens, flops_per_s, backward=backward)
    seconds = 0.0
    for number in range(max(len(route.offsets) for route in routes) + 1):
        on_links = [route.bytes_beside(number) * tokens for route in routes]
        both_ways = number > 0 and schedule == "bidirectional"
        computed = sum(number < len(route.offsets) for route in routes) if both_ways else 1
        if any(on_links):
            hop = max(sum(on_links) / links, *on_links) / bytes_per_s + latency_s
            seconds += max(0.0, hop - block * computed * (number < len(routes[0].offsets)))
    return seconds


def weigh_rings(
    sizes: Attention,
    tokens: int,
    P: int,
    rates: tuple[float, float, float],
    *,
    links: int = 1,
    training: bool = True,
    latent: int = 0,
) -> list[Option]:
    """Return the schedules of `traffic.RINGS` for `tokens` tokens on each of P ranks, by exposed seconds, then bytes.

    training: whether the backward counts too. rates, links: as for `ring_exposed_s`. Equal schedules stay in
    the order of RINGS, with the plain ring first. held_bytes is None. With a latent, "multi-ring" is left
    out, because it deals out K/V heads and a latent has none.
    Raises: CostError for fewer than two ranks, or rates, links or tokens that are not above zero.

    >>> [it.schedule for it in weigh_rings(Attention(H=32, K=32), 128, 8, (4e14, 5e10, 1e-5), links=2)]
    ['multi-ring', 'bidirectional', 'burst', 'query-ring', 'ring']
    """
    candidates(P)
    if not all(x > 0 for x in (tokens, links, *rates[:2])) or not 0 <= rates[2] < math.inf:
        raise CostError("tokens, links and rates above zero, latency >= 0", f"{tokens}, {links}, {rates}")
    found = []
    # A latent has no heads that could be distributed among rings, so `latent_attention` refuses "multi-ring".
    for schedule in (name for name in RINGS if not ((latent or sizes.latent) and name == "multi-ring")):
        sent, exposed = 0, 0.0
        for backward in (False, True)[: 1 + training]:
            # All ranks have equally many tokens, so that the first rank sends as much as any other.
            how: dict[str, Any] = {"backward": backward, "latent": latent}
            sent += ring_traffic(sizes, tokens * P, P, schedule=schedule, rank=0, **how).total_bytes
            exposed += ring_exposed_s(sizes, schedule, tokens, P, rates, links=links, **how)
        reason = "exposed" if exposed > 0 else "hidden"
        found.append(Option(schedule, 1, reason, sent, None, exposed))
    return sorted(found, key=lambda it: (it.exposed_s, it.sent_bytes))
