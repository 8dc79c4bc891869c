"""The schedules that a plan's ring could have, with the bytes and the waits of each.

The table is a report, not a choice: plans use the plain ring, whose time is computed rank by rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ringlab.cost.choose import Option, weigh_rings
from ringlab.cost.planner.parallelism import group
from ringlab.cost.planner.search import Candidate
from ringlab.cost.planner.step_time import attention_flops_per_s, ring_sizes


@dataclass(frozen=True)
class RingTable:
    """The schedules of `ringlab.cost.traffic.RINGS` in one layer of a plan, by exposed seconds, then by bytes.

    link: the slowest link of the ring. links: the number of links over which a rank can send at once.
    latent_below: the number of values per token below which a latent (MLA) would take fewer bytes than K and
    V; 0 if a latent travels.
    """

    options: tuple[Option, ...]
    link: str
    links: int
    latent_below: int

    @property
    def ring(self) -> Option:
        """Return the option of the plain ring."""
        return next(it for it in self.options if it.schedule == "ring")

    @property
    def least(self) -> Option:
        """Return the schedule that sends the fewest bytes; if several do, the plain ring, or else the one that waits least."""
        return min(self.options, key=lambda it: (it.sent_bytes, it.schedule != "ring"))

    @property
    def shortest(self) -> Option:
        """Return the schedule that waits least; if several do, the plain ring, or else the one that sends least."""
        return min(self.options, key=lambda it: (it.exposed_s, it.schedule != "ring"))

    def as_dict(self) -> dict[str, object]:
        """Return the whole table, ready for JSON; bytes and seconds are those of one layer."""
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
    """Return the schedules for one layer that attends to all tokens; None without a ring.

    They count one forward and, in training, one backward. A TPU sends to both neighbours at once, and a GPU
    behind a switch sends on one port. Blocks are assumed balanced.
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
    below = 0 if sizes.latent else sizes.K * (sizes.D + sizes.value_dim)
    return RingTable(tuple(found), link.name, links, below)
