"""The links between ranks: fast inside a node, slower between nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringlab.cost.hardware import Hardware
from ringlab.errors import CostError


@dataclass(frozen=True)
class Network:
    """`P` ranks in nodes of `ranks_per_node`, numbered node after node.

    Every rank has a port of its own inside its node and one to other nodes. Bytes per second in one
    direction and seconds of latency hold for each port; an infinite bandwidth is a free link.
    Raises: CostError for sizes that are not positive.
    """

    P: int
    inside_bytes_per_s: float
    inside_latency_s: float
    between_bytes_per_s: float
    between_latency_s: float
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name in ("P", "ranks_per_node"):
            if not getattr(self, name) >= 1:
                raise CostError(f"{name} >= 1", f"{name}={getattr(self, name)!r}")
        for name in ("inside_bytes_per_s", "between_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise CostError(f"{name} > 0", f"{name}={getattr(self, name)!r}")
        for name in ("inside_latency_s", "between_latency_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise CostError(f"{name} >= 0, finite", f"{name}={getattr(self, name)!r}")

    @classmethod
    def of(cls, hardware: Hardware, P: int) -> Network:
        """Return the network of `P` ranks of `hardware`."""
        inside, between = hardware.inside, hardware.between
        return cls(
            P,
            inside.bytes_per_s,
            inside.latency_s,
            between.bytes_per_s,
            between.latency_s,
            hardware.ranks_per_node,
        )

    @classmethod
    def uniform(cls, P: int, bytes_per_s: float, latency_s: float = 0.0) -> Network:
        """Return a network whose links are all alike."""
        return cls(P, bytes_per_s, latency_s, bytes_per_s, latency_s, P)

    @classmethod
    def free(cls, P: int) -> Network:
        """Return a network on which messages take no time."""
        return cls.uniform(P, float("inf"))

    def port(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return 0 where both ranks are in one node, 1 where a message leaves its node."""
        crosses = np.asarray(source) // self.ranks_per_node != np.asarray(to) // self.ranks_per_node
        return crosses.astype(np.int64)

    def bytes_per_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return bytes per second from `source` to `to`, in that direction."""
        return np.where(self.port(source, to), self.between_bytes_per_s, self.inside_bytes_per_s)

    def latency_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return seconds until a message that has left `source` is at `to`."""
        return np.where(self.port(source, to), self.between_latency_s, self.inside_latency_s)
