"""Reports of 15.choose: the right one, and those that each common mistake makes of the same problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringlab.cost import choose as cost
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e15_choosing.traffic import Layer, sizes_of

mistake = mistakes_of("15.choose")

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


def _own_block_hides_too(way: cost.Way, c: int, F: float, B: float, lat: float) -> float:
    at = way, c, F, B, lat
    beside = way.hops * hop_s(*at) - (way.hops + 1) * block_s(*at) if way.hops else 0.0
    return _open(*at) + max(0.0, beside)


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
    mistake("nothing_hides", How(exposed=_waits(block=lambda *at: 0.0))),
    mistake("all_to_alls_hide", How(exposed=_all_hidden_behind)),
    mistake("a_hop_for_each_rank", How(exposed=_waits(hops=lambda hops: hops + 1 if hops else 0))),
    mistake("one_hop_for_all", How(exposed=_waits(hops=lambda hops: min(hops, 1)))),
    mistake("waits_below_zero"),
    mistake("ignores_latency", How(exposed=_waits(hop=lambda *at: hop_s(*at) - at[4], opening=lambda *at: _open(*at) - at[0].turns * at[4]))),
    mistake("whole_blocks", How(work=lambda given: 2.0)),
    mistake("hybrid_block_of_one_rank", How(exposed=_waits(block=lambda *at: block_s(*at) / at[0].ulysses))),
    mistake("hybrid_block_of_own_tokens", How(exposed=_waits(block=lambda *at: block_s(*at) / at[0].ulysses**2))),
    mistake("hybrid_block_of_all_heads", How(exposed=_waits(block=lambda *at: block_s(*at) * at[0].ulysses))),
    mistake("own_block_hides_too", How(exposed=_own_block_hides_too)),
    mistake("block_of_one_sequence", How(work=lambda given: 1 / given.layer["B"])),
    mistake("fewest_bytes_first", How(order=lambda exposed, sent: sent)),
    mistake("slowest_first", How(order=lambda exposed, sent: -exposed)),
    mistake("best_is_hidden", How(hidden=lambda exposed, place: place == 0)),
    mistake("memory_does_not_matter", How(held=lambda way, c, given: 0.0)),
    mistake("holds_its_own_only", How(held=_own_only)),
    mistake("holds_part_of_a_head", How(held=_part_of_a_head)),
    mistake("trades_in_place", How(held=_no_trade)),
    mistake("leaves_out_the_refused"),
)  # fmt: skip
NAMED = {each.name: each for each in MISTAKES}
