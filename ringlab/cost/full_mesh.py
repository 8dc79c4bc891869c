"""A network for `simulate` on which a rank has several links, so that sends to different ranks need not wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Num

from ringlab.errors import CostError


@dataclass(frozen=True)
class FullMesh:
    """`P` ranks with a link from each to each, of the same bandwidth and latency: sends to different ranks never wait for each other.

    links: how many of a rank's sends can be under way at once; by default as many as it has other ranks to send to. Two are
    a link in each direction of a ring: one to ranks up to half the way ahead, one to the others.
    Raises: CostError for a bandwidth or a number of links that is not positive.
    """

    P: int
    link_bytes_per_s: float
    link_latency_s: float = 0.0
    links: int | None = None

    def __post_init__(self) -> None:
        if not self.link_bytes_per_s > 0:
            raise CostError("link_bytes_per_s > 0", f"{self.link_bytes_per_s!r}")
        if self.links is not None and not self.links >= 1:
            raise CostError("links >= 1", f"{self.links!r}")

    def port(self, source: Int[np.ndarray, "..."], to: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Return the number of the link over which `source` sends to `to`."""
        ahead = (np.asarray(to) - source - 1) % self.P
        links = max(1, self.P - 1)
        return ahead * min(self.links or links, links) // links

    def bytes_per_s(
        self, source: Int[np.ndarray, "..."], to: Int[np.ndarray, "..."]
    ) -> Num[np.ndarray, "..."]:
        """Return bytes per second of one link, in one direction."""
        return np.full(np.shape(source), self.link_bytes_per_s)

    def latency_s(self, source: Int[np.ndarray, "..."], to: Int[np.ndarray, "..."]) -> Num[np.ndarray, "..."]:
        """Return seconds from a message's departure to its arrival."""
        return np.full(np.shape(source), self.link_latency_s)
