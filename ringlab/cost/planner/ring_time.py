"""When a ring is done: the ring program's own waits, step by step, for all ranks at once.

The same order of posting, computing and waiting as `schedules/ring.py`, and messages as in
`comm/clocked/timeline.py`, so `simulate` gives the same to rounding. Where every rank computes alike and no
hop takes longer than a block, nobody waits and the sum is enough (`tests/cost/closed_form.py` has the proof).
"""

from __future__ import annotations

import numpy as np

from ringlab.cost.hardware import Hardware

LARGEST_FOLLOWED = 64  # ranks: following more, step by step, takes too long for a planner


def ring_forward_s(compute_s: np.ndarray, hop_s: np.ndarray, latency_s: np.ndarray) -> float:
    """Return the makespan in seconds of P − 1 hops of K/V, each posted before the block that is here is computed.

    compute_s: seconds by [rank, step], (P, P), or (1, P) where all ranks are alike; hop_s: (P,) seconds that the link from rank r to r + 1
    is busy with one block; latency_s: (P,) seconds until it is there. More than LARGEST_FOLLOWED ranks
    that have to wait are taken to wait for the slowest link in every step: an upper bound.
    """
    P, hop = compute_s.shape[1], float((hop_s + latency_s).max())
    slowest = compute_s.max(axis=0)
    if _alike(compute_s) and hop <= slowest[: P - 1].min(initial=np.inf):
        return float(slowest.sum())
    if P > LARGEST_FOLLOWED:
        return float(np.maximum(slowest[:-1], hop).sum() + slowest[-1])
    now = np.zeros(P)
    wire = _Wire(hop_s, latency_s)
    for step in range(P):
        arrived = wire.post(now) if step < P - 1 else None
        now = now + compute_s[:, step]
        if arrived is not None:
            now = np.maximum(now, arrived)
    return float(now.max())


def ring_backward_s(
    compute_s: np.ndarray, hop_s: np.ndarray, home_s: np.ndarray, latency_s: np.ndarray
) -> float:
    """Return the makespan of the backward ring: dK/dV follow their block and make P hops of `home_s` each."""
    P = compute_s.shape[1]
    if P == 1:
        return float(compute_s[0, 0])
    last, hops = float((home_s + latency_s).max()), float((hop_s + home_s + latency_s).max())
    slowest = compute_s.max(axis=0)
    if _alike(compute_s) and hops <= slowest.min():
        return float(slowest.sum()) + last
    if P > LARGEST_FOLLOWED:
        return float(np.maximum(slowest, hops).sum()) + last
    now = np.zeros(P)
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


def ring_links(first_gpu_of_rank: np.ndarray, machine: Hardware) -> tuple[np.ndarray, np.ndarray]:
    """Return (bytes per second, latency in seconds) of the links from each rank of a ring to the next, (P,) each."""
    node = first_gpu_of_rank // machine.ranks_per_node
    inside = node == np.roll(node, -1)
    rate = np.where(inside, machine.inside.bytes_per_s, machine.between.bytes_per_s)
    return rate, np.where(inside, machine.inside.latency_s, machine.between.latency_s)


def _alike(compute_s: np.ndarray) -> bool:
    return len(compute_s) == 1 or bool((compute_s == compute_s[0]).all())


class _Wire:
    """The links of a ring: a message starts when both ends are posted and the one before it is through."""

    def __init__(self, hop_s: np.ndarray, latency_s: np.ndarray) -> None:
        self.hop_s, self.latency_s = hop_s, latency_s
        self.free = np.zeros(len(hop_s))
        ranks = np.arange(len(hop_s))
        self.next, self.previous = np.roll(ranks, -1), np.roll(ranks, 1)

    def post(self, now: np.ndarray, busy_s: np.ndarray | None = None) -> np.ndarray:
        """Return when an exchange that every rank posts at its `now` is complete for it, (P,) seconds.

        That is when what it sends to the next rank and what the previous one sends have arrived.
        """
        begin = np.maximum(np.maximum(now, now[self.next]), self.free)
        self.free = begin + (self.hop_s if busy_s is None else busy_s)
        delivered = self.free + self.latency_s
        return np.maximum(delivered, delivered[self.previous])
