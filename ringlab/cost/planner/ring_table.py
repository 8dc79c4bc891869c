"""The schedules that a plan's ring could have: the bytes and the waits of each, beside those of the plain ring.

A report, not a choice: plans are made of the plain ring, whose time is followed rank by rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ringlab.cost.choose import Option, weigh_rings
from ringlab.cost.planner.parallelism import group
from ringlab.cost.planner.search import Candidate
from ringlab.cost.planner.step_time import attention_flops_per_s, ring_sizes


@dataclass(frozen=True)
class RingTable:
    """The schedules of `ringlab.cost.traffic.RINGS` in one layer of a plan, by the seconds they expose, then by bytes.

    link: the slowest of the ring. links: those that a rank can send over at once. latent_below: numbers of a token; a latent
    with fewer (MLA), which the models of plans do not have, would be fewer bytes than K and V.
    """

    options: tuple[Option, ...]
    link: str
    links: int
    latent_below: int

    @property
    def ring(self) -> Option:
        """Return the plain ring."""
        return next(it for it in self.options if it.schedule == "ring")

    @property
    def least(self) -> Option:
        """Return the one that sends the fewest bytes; of equal ones, the plain ring, otherwise the one that waits least."""
        return min(self.options, key=lambda it: (it.sent_bytes, it.schedule != "ring"))

    @property
    def shortest(self) -> Option:
        """Return the one that waits least; of equal ones the plain ring, otherwise the one that sends least."""
        return min(self.options, key=lambda it: (it.exposed_s, it.schedule != "ring"))

    def as_dict(self) -> dict[str, object]:
        """Return everything, ready for JSON; bytes and seconds of one layer."""
        options = [
            {name: value for name, value in asdict(it).items() if name not in ("ulysses", "held_bytes")}
            for it in self.options
        ]
        return {
            "sends_least": self.least.schedule,
            "waits_least": self.shortest.schedule,
            "link": self.link,
            "links": self.links,
            "latent_below": self.latent_below,
            "options": options,
        }


def ring_table(best: Candidate) -> RingTable | None:
    """Return the rings for one layer of a plan, forward and in training backward, once each; None without a ring.

    A TPU sends to both neighbours at once, a GPU behind its switch on one port. Blocks are taken to be balanced.
    """
    request, degrees = best.at_once, best.degrees
    if degrees.ring == 1 or request.decoding:
        return None
    sizes, link = ring_sizes(request, degrees), group("ring", degrees, request.machine).link
    links = 2 if request.machine_word == "TPU" else 1
    rate = attention_flops_per_s(request, sizes.D, backward=request.training)
    rates = (rate, link.bytes_per_s, link.latency_s)
    tokens = -(-request.tokens // degrees.ring)
    found = weigh_rings(sizes, tokens, degrees.ring, rates, links=links, training=request.training)
    return RingTable(tuple(found), link.name, links, 2 * sizes.K * sizes.D)
