"""The chain of a scan: the stretches of tokens that a state passes through, and the hops by which it passes.

A scan is data: rounds of hops between elements. One executor (`ringlab.scan.executor`) runs all scans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from ringlab.errors import BackendError, LayoutError
from ringlab.layout import Layout


@dataclass(frozen=True)
class Element:
    """A stretch of adjacent tokens of one rank, as long as possible.

    stretches: the local rows of the tokens, cut where a document begins. fresh: whether a document begins
    with the first token.
    """

    rank: int
    stretches: tuple[slice, ...]
    fresh: bool

    @property
    def forgets(self) -> bool:
        """Return whether the state that leaves does not depend on the state that enters."""
        return self.fresh or len(self.stretches) > 1


Hops = list[list[tuple[int, int]]]


def relay(count: int) -> Hops:
    """Return the hops of a relay, one from each element to the next. Source: arXiv 2404.02882.

    >>> relay(3)
    [[(0, 1)], [(1, 2)]]
    """
    return [[(i, i + 1)] for i in range(count - 1)]


def all_gather(count: int) -> Hops:
    """Return the hops of an all-gather: each element to all later ones. Source: arXiv 2502.07563.

    >>> all_gather(3)
    [[(0, 1), (1, 2), (0, 2)]]
    """
    return [[(j, i) for i in range(count) for j in reversed(range(i))]]


def doubling(count: int) -> Hops:
    """Return the hops of recursive doubling, over distances 1, 2, 4, … Source: Hillis and Steele 1986.

    >>> doubling(4)
    [[(0, 1), (1, 2), (2, 3)], [(0, 2), (1, 3)]]
    """
    distances = [1 << power for power in range((count - 1).bit_length())] if count else []
    return [[(i - distance, i) for i in range(distance, count)] for distance in distances]


SCANS: dict[str, Callable[[int], Hops]] = {"relay": relay, "all-gather": all_gather, "doubling": doubling}
"""The scans by name. A scan takes the number of elements and returns rounds of hops (source, target).

A hop carries the passage of the source, composed with the passages of earlier elements that the source
knows. The hops into an element must therefore cover all earlier elements, nearest first and without gaps.
"""


@dataclass(frozen=True)
class Hop:
    """A hop from element `source` to element `target`.

    whole: whether the source knows the passages of all elements before it. If so, it sends only a state,
    without a transition.
    """

    source: int
    target: int
    whole: bool


@dataclass(frozen=True)
class Plan:
    """The rounds of hops among elements, without hops that no element needs. owners: each element's rank."""

    owners: tuple[int, ...]
    rounds: tuple[tuple[Hop, ...], ...]

    def messages(self, round_number: int) -> list[tuple[int, int, bool]]:
        """Return a round's messages in the order of posting, as (source element, receiving rank, whole)."""
        hops = self.rounds[round_number]
        return list(
            dict.fromkeys(
                (hop.source, self.owners[hop.target], hop.whole)
                for hop in hops
                if self.owners[hop.source] != self.owners[hop.target]
            )
        )


@lru_cache(maxsize=64)
def elements_of(layout: Layout, documents: tuple[int, ...]) -> tuple[Element, ...]:
    """Return the elements of a layout in the order of the sequence.

    Raises: LayoutError if ranks own single tokens instead of stretches of adjacent tokens.
    """
    runs = sorted(
        (run.start, run.length, rank, local)
        for rank in range(layout.P)
        for local, run in layout.local_runs(rank)
        if run.length and _adjacent(run.step, run.length, layout)
    )
    joined: list[list[int]] = []
    for start, length, rank, local in runs:
        if joined and joined[-1][2] == rank and joined[-1][3] + joined[-1][1] == local:
            joined[-1][1] += length
        else:
            joined.append([start, length, rank, local])
    begins = set(list(accumulate(documents))[:-1])
    return tuple(_element(begins, *run) for run in joined)


def _adjacent(step: int, length: int, layout: Layout) -> bool:
    if length > 1 and step != 1:
        raise LayoutError(
            "a layout whose ranks own stretches of adjacent tokens, as contiguous and zigzag do",
            f"{layout!r}, in which a token's neighbours are on other ranks",
            "a state passes from token to token and would change ranks at every one: use contiguous(S, P), "
            "under which all ranks work equally, since every token costs a scan the same",
        )
    return True


def _element(begins: set[int], start: int, length: int, rank: int, local: int) -> Element:
    inside = sorted(at for at in begins if start < at < start + length)
    cuts = [local, *(at - start + local for at in inside), local + length]
    return Element(rank, tuple(slice(a, b) for a, b in pairwise(cuts)), start in begins)


def plan_scan(scan: str, elements: tuple[Element, ...], backward: bool = False) -> Plan:
    """Return the plan by which the scan called `scan` passes states forward, or their gradients backward.

    In backward, the elements are numbered from the last one.
    Raises: BackendError for an unknown scan.
    """
    if not isinstance(scan, str) or scan not in SCANS:
        raise BackendError(f"scan= one of {', '.join(SCANS)}", repr(scan))
    count = len(elements)
    # A fresh element gets no state from the element before it, and sends no gradient back to it.
    known = [True, *(element.fresh for element in elements[1:])]
    if backward:
        elements, known = elements[::-1], [True, *known[:0:-1]]
    rounds = []
    for hops in SCANS[scan](count):
        before, kept = tuple(known), []
        for source, target in hops:
            if not known[target]:
                known[target] = before[source] or elements[source].forgets
                kept.append(Hop(source, target, known[target]))
        rounds.append(tuple(kept))
    return Plan(tuple(element.rank for element in elements), tuple(filter(None, rounds)))
