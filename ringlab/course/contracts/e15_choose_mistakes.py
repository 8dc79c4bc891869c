"""How a report of exercise 15 is made rightly, and by each mistake; the problems that it is about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringlab.cost import choose as cost
from ringlab.course.contract import Misconception
from ringlab.course.contracts.e15_traffic import Layer, sizes_of

Machine = dict[str, float]
NONE = -1.0
"""Stands for None, which is no number."""


@dataclass(frozen=True)
class Problem:
    """A layer, S tokens on P ranks, and a machine: flops_per_s, bytes_per_s, latency_s, memory_bytes."""

    layer: Layer
    S: int
    P: int
    machine: Machine

    @property
    def text(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self.layer.items())
        machine = ", ".join(f"{name}={value:.6g}" for name, value in self.machine.items())
        return f"P={self.P}, S={self.S}, {sizes}; {machine}"

    @property
    def options(self) -> list[tuple[str, int]]:
        return cost.candidates(self.P)


@dataclass(frozen=True)
class How:
    """How a report is made; as it stands, rightly, by the cost model's own ways of sharing out.

    exposed: seconds, of (way, given, problem's rates as (tokens, F, B, latency)). held: bytes of (way, tokens).
    order: what usable options are sorted by, of (exposed seconds, bytes). hidden: of (exposed, rank in the order).
    work: how much of a block's work is counted.
    """

    exposed: Callable[..., float] = lambda way, c, F, B, lat: way.exposed_s(c, F, B, lat)
    held: Callable[[cost.Way, int, Problem], float] = lambda way, c, given: way.held_bytes * c
    order: Callable[[float, float], float] = lambda exposed, sent: exposed
    hidden: Callable[[float, int], bool] = lambda exposed, place: exposed == 0
    work: Callable[[Problem], float] = lambda given: 1.0

    def __call__(self, given: Problem) -> tuple[np.ndarray, ...]:
        """Return for each option, in the order of `candidates`: bytes, seconds, the reason's number, its place."""
        c, machine, sizes = given.S // given.P, given.machine, sizes_of(given.layer)
        rows: dict[tuple[str, int], list[float]] = {key: [NONE, NONE, 3, NONE] for key in given.options}
        usable = []
        for way in cost.ways(sizes, given.P):
            rates = machine["flops_per_s"] / self.work(given), machine["bytes_per_s"], machine["latency_s"]
            seconds, sent = self.exposed(way, c, *rates), float(way.sent_bytes * c)
            fits = self.held(way, c, given) <= machine["memory_bytes"]
            key = way.schedule, way.ulysses
            rows[key] = [sent, seconds, 1.0 if fits else 2.0, NONE]
            if fits:
                usable.append(key)
        usable.sort(key=lambda key: self.order(rows[key][1], rows[key][0]))
        for place, key in enumerate(usable):
            rows[key][2:] = [0.0 if self.hidden(rows[key][1], place) else 1.0, float(place)]
        return tuple(np.array(column) for column in zip(*rows.values(), strict=True))


RIGHT = How()


def hop_s(way: cost.Way, c: int, F: float, B: float, lat: float) -> float:
    """Return the seconds of one hop."""
    return way.hop_bytes * c / B + lat


def block_s(way: cost.Way, c: int, F: float, B: float, lat: float) -> float:
    """Return the seconds of the block beside a hop."""
    return way.block_flops * c**2 / F


def _open(way: cost.Way, c: int, F: float, B: float, lat: float) -> float:
    return way.open_bytes * c / B + way.turns * lat


def _waits(
    hop: Callable[..., float] = hop_s,
    block: Callable[..., float] = block_s,
    opening: Callable[..., float] = _open,
    hops: Callable[[int], int] = lambda hops: hops,
) -> Callable[..., float]:
    """Return seconds of which some part is taken otherwise."""
    return lambda *at: opening(*at) + hops(at[0].hops) * max(0.0, hop(*at) - block(*at))


def _all_hidden_behind(way: cost.Way, c: int, F: float, B: float, lat: float) -> float:
    at = way, c, F, B, lat
    blocks = way.hops * block_s(*at) if way.hops else way.block_flops * c**2 / F
    return max(0.0, _open(*at) + way.hops * hop_s(*at) - blocks)


def _no_trade(way: cost.Way, c: int, given: Problem) -> float:
    """Held bytes without what a rank holds of its own tokens beside its heads."""
    own = (
        2
        * (given.layer["H"] + given.layer["K"])
        * given.layer["B"]
        * given.layer["D"]
        * given.layer["itemsize"]
    )
    return (way.held_bytes - (own if way.ulysses > 1 else 0)) * c  # fmt: skip


def _own_only(way: cost.Way, c: int, given: Problem) -> float:
    """Held bytes without a visitor, and without what was gathered."""
    layer = given.layer
    token = 2 * layer["B"] * layer["K"] * layer["D"] * layer["itemsize"]
    came = {"ring": token, "allgather": token * (given.P - 1)}
    if way.schedule == "hybrid":
        came["hybrid"] = 2 * layer["B"] * layer["D"] * layer["itemsize"] * way.ulysses * max(1, layer["K"] // way.ulysses)  # fmt: skip
    return (way.held_bytes - came.get(way.schedule, 0)) * c


def _part_of_a_head(way: cost.Way, c: int, given: Problem) -> float:
    """Held bytes with K heads for the tokens of a row, in place of one for each of U ranks, where U > K."""
    layer, U = given.layer, way.ulysses
    spared = 2 * (U - layer["K"]) * layer["B"] * layer["D"] * layer["itemsize"]
    return (way.held_bytes - (max(0, spared) * (1 + (way.hops > 0)) if U > 1 else 0)) * c


MISTAKES = (
    Misconception(
        "nothing_hides",
        "Hops are counted as if nobody computed meanwhile. A hop runs beside a block: only what it takes longer is exposed.",
        How(exposed=_waits(block=lambda *at: 0.0)),
    ),
    Misconception(
        "all_to_alls_hide",
        "The all-to-alls were put beside the computation too. It cannot begin before the first is done, and the second cannot begin before it ends: all of both is "
        "exposed.",
        How(exposed=_all_hidden_behind),
    ),
    Misconception(
        "a_hop_for_each_rank",
        "The exposed part of a hop was taken once for each rank of the ring. There is one hop less.",
        How(exposed=_waits(hops=lambda hops: hops + 1 if hops else 0)),
    ),
    Misconception(
        "one_hop_for_all",
        "The exposed part of a hop was taken once. Each of the hops is late by as much.",
        How(exposed=_waits(hops=lambda hops: min(hops, 1))),
    ),
    Misconception(
        "ignores_latency",
        "The latency is not counted: each hop has it, and twice those who wait up front, before and after, or for K and then for V.",
        How(exposed=_waits(hop=lambda *at: hop_s(*at) - at[4], opening=lambda *at: _open(*at) - at[0].turns * at[4])),
    ),
    Misconception(
        "whole_blocks",
        "A block was counted with all its pairs. The mask is causal and the layout balanced: half of them are visible, half of the time to hide in.",
        How(work=lambda given: 2.0),
    ),
    Misconception(
        "hybrid_block_of_one_rank",
        "The hybrid's block was counted as the ring's. After the all-to-all it is U times the tokens, squared, for a U-th of the heads: U times the work beside a hop.",
        How(exposed=_waits(block=lambda *at: block_s(*at) / at[0].ulysses)),
    ),
    Misconception(
        "block_of_one_sequence",
        "A block was counted with the work of one sequence. There are B of them, in every message and in every block.",
        How(work=lambda given: 1 / given.layer["B"]),
    ),
    Misconception(
        "fewest_bytes_first",
        "The numbers are right, but the order is that of bytes. Bytes that are hidden cost nothing: sort by exposed seconds.",
        How(order=lambda exposed, sent: sent),
    ),
    Misconception(
        "slowest_first",
        "The numbers are right, but the order is the wrong way around: least exposed seconds first.",
        How(order=lambda exposed, sent: -exposed),
    ),
    Misconception(
        "best_is_hidden",
        "The first of the list is called \"hidden\" though it exposes something. Hidden is what exposes nothing.",
        How(hidden=lambda exposed, place: place == 0),
    ),
    Misconception(
        "memory_does_not_matter",
        "An option is called usable that does not fit into memory_bytes. Its reason is \"memory\", and it stands behind those that fit.",
        How(held=lambda way, c, given: 0.0),
    ),
    Misconception(
        "holds_its_own_only",
        "What comes from others is not counted as memory: the ring's visitor, and with the all-gather the K and V of all other ranks.",
        How(held=_own_only),
    ),
    Misconception(
        "holds_part_of_a_head",
        "With more ranks in a row than K/V heads, a part of a head was counted as held. Each rank holds a whole one for all tokens of its row, and a visitor is as large.",
        How(held=_part_of_a_head),
    ),
    Misconception(
        "trades_in_place",
        "All-to-alls are counted as if what a rank had of its tokens were gone when it has its heads. Both are held: q, k, v and out twice.",
        How(held=_no_trade),
    ),
    Misconception(
        "leaves_out_the_refused",
        "Options are missing from the report. What the heads do not allow stands at its end, with the reason \"heads\": a reader wants to know why it is not there.",
    ),
)  # fmt: skip
NAMED = {mistake.name: mistake for mistake in MISTAKES}
