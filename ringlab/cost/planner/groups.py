"""The time of collectives in a group of GPUs, which depends on where the group lies in the nodes.

A group with m members on one node uses their m links out of the node in parallel, as the collective
libraries do; a single message between two ranks has one link.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.cost.hardware import Hardware, Link
from ringlab.cost.planner.degrees import Degrees


@dataclass(frozen=True)
class Group:
    """`size` communicating GPUs, `on_a_node` of them on each node; `across` if they span several nodes."""

    size: int
    on_a_node: int
    across: bool
    machine: Hardware

    @property
    def link(self) -> Link:
        """Return the slowest link between two neighbours of the group."""
        return self.machine.between if self.across else self.machine.inside

    @property
    def bytes_per_s(self) -> float:
        """Return the bytes that one rank sends per second in a collective while all members send."""
        inside, between = self.machine.inside.bytes_per_s, self.machine.between.bytes_per_s
        return min(inside, self.on_a_node * between) if self.across else inside

    @property
    def latency_s(self) -> float:
        """Return the latency in seconds of one collective by doubling: first inside the nodes, then across them."""
        inside = (self.on_a_node - 1).bit_length() * self.machine.inside.latency_s
        nodes = -(-self.size // self.on_a_node)
        return inside + (nodes - 1).bit_length() * self.machine.between.latency_s

    def gather_s(self, whole_bytes: float) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, of `whole_bytes` over the group."""
        if self.size == 1:
            return 0.0
        return self.latency_s + whole_bytes * (self.size - 1) / self.size / self.bytes_per_s

    def reduce_s(self, whole_bytes: float) -> float:
        """Return the seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather_s(whole_bytes)

    def exchange_s(self, rank_bytes: float) -> float:
        """Return the seconds of an all-to-all in which every rank starts with `rank_bytes` and keeps its own part."""
        if self.size == 1:
            return 0.0
        part = rank_bytes / self.size
        near = (self.on_a_node - 1) * part / self.machine.inside.bytes_per_s
        far = (self.size - self.on_a_node) * part / self.machine.between.bytes_per_s if self.across else 0.0
        return self.link.latency_s + max(near, far)


def group(name: str, degrees: Degrees, machine: Hardware) -> Group:
    """Return the group "tp", "ulysses", "ring", "fsdp" or "replicas" of these degrees, placed in the nodes."""
    size: int = getattr(degrees, name)
    return placed(size, max(1, degrees.spans[name] // size), machine)


def placed(size: int, stride: int, machine: Hardware) -> Group:
    """Return a group of `size` GPUs, each `stride` GPUs after the one before it."""
    node = machine.ranks_per_node
    across = size > 1 and node % (size * stride) != 0
    return Group(size, min(size, max(1, node // stride)) if across else size, across, machine)
