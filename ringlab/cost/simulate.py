"""A simulation of the real ring program with shapes instead of data: when every rank computes, sends and waits.

`ringlab.ring_attention` itself runs on P ranks (`ringlab.comm.clocked.cluster`), forward and backward, with a
block that charges seconds instead of computing. Three things are assumed: kernels take the seconds of their
tiles, whichever rank the data comes from; communication does not slow computation; the links of different
ranks do not disturb each other. `MESSAGES_ASSUMED`, which accompanies every result, lists the effects that
these assumptions leave out and the schedules that they favour. Links are fast inside a node and slower
between nodes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, Num

from ringlab.comm.clocked.lockstep import Lockstep
from ringlab.comm.clocked.recording import Recording
from ringlab.comm.clocked.timeline import Links, Timeline
from ringlab.comm.trace import Trace
from ringlab.cost.block_time import BlockTime, check_tile
from ringlab.cost.block_time import block_time as time_of
from ringlab.cost.equal_ranks import FEWEST_IN_LOCKSTEP, go_together
from ringlab.cost.hardware import Hardware
from ringlab.cost.ring_program import RingProgram, Timed
from ringlab.cost.shape_block import Prices
from ringlab.cost.sizes import Attention
from ringlab.cost.units import nearest, shown
from ringlab.errors import CostError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.schedules import get_schedule


@dataclass(frozen=True)
class Network:
    """`P` ranks in nodes of `ranks_per_node`, numbered node after node.

    Every rank has one port inside its node and one port to other nodes. Each port has bytes per second in one
    direction and seconds of latency. A link of infinite bandwidth is free.
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
        """Return a network whose links are all equal."""
        return cls(P, bytes_per_s, latency_s, bytes_per_s, latency_s, P)

    @classmethod
    def free(cls, P: int) -> Network:
        """Return a network on which messages take no time."""
        return cls.uniform(P, float("inf"))

    def port(self, source: Int[np.ndarray, "..."], to: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """Return the port of a message: 0 if both ranks are in one node, 1 if the message leaves its node."""
        crosses = np.asarray(source) // self.ranks_per_node != np.asarray(to) // self.ranks_per_node
        return crosses.astype(np.int64)

    def bytes_per_s(
        self, source: Int[np.ndarray, "..."], to: Int[np.ndarray, "..."]
    ) -> Num[np.ndarray, "..."]:
        """Return the bytes per second from `source` to `to`, in this direction."""
        return np.where(self.port(source, to), self.between_bytes_per_s, self.inside_bytes_per_s)

    def latency_s(self, source: Int[np.ndarray, "..."], to: Int[np.ndarray, "..."]) -> Num[np.ndarray, "..."]:
        """Return seconds from a message's departure at `source` to its arrival at `to`."""
        return np.where(self.port(source, to), self.between_latency_s, self.inside_latency_s)


@dataclass(frozen=True)
class FullMesh:
    """`P` ranks with equal links between all pairs, so that sends to different ranks never wait for each other.

    links: the number of a rank's sends that can be under way at once, by default P − 1. With two links, a
    rank has one in each direction of a ring: one for the ranks up to half the ring ahead, and one for all
    others.
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


MOST_TOKENS = 2**31
MOST_RANKS = 16384
MOST_RANKS_THAT_RUN = 4096
"""The most ranks of a simulation that keeps the operations of each: its time and memory grow as their square."""
MOST_OF_A_SIZE = 2**20
"""The largest B, H, K, D, and rows and keys of a kernel tile: more is a typing error."""
MOST_TILES_OF_A_WINDOW = 2**16
"""The largest ratio of a sequence to its window: a rank's share of a sequence has about three tiles for each
window."""
CPU_S_PER_PAIR = {False: 17e-6, True: 200e-6}
"""CPU seconds per pair of ranks that each run the program, without and with backward. Equal ranks (`equal_ranks`) take less."""

_HOPS = (
    "hops of one rank over different links (inside and between nodes) do not wait for each other; NCCL runs the "
    "exchanges of one communicator in the order of posting, so a backward whose hops are not hidden may be slower"
)
_ALL_TO_ALL = (
    "an all-to-all is one exchange with each other rank of the group, nearest first, one after another by the "
    "sender's port; NCCL may send to several at once, and a switch that all share may be slower"
)
_ONE_PORT = (
    "both directions, and all strides, share the one port that a rank has inside its node: with a link of its own to each "
    "other rank they take a fraction of the time, as `network=ringlab.cost.simulate.FullMesh(…)` says"
)
MESSAGES_ASSUMED = {
    "ring": (_HOPS,),
    "allgather": (
        "all-gather is P - 1 sends from each rank to each other, one after another by the sender's port, and what "
        "comes in is not limited: NCCL's ring all-gather between nodes uses all rails at once and can be several "
        "times faster, so do not reject all-gather by this figure",
        "the gradients' reduce-scatter is P - 1 such sends too",
    ),
    "ulysses": (_ALL_TO_ALL,),
    "hybrid": (_ALL_TO_ALL, _HOPS),
    "double-ring": (_HOPS,),
    "query-ring": (),
    "burst": (),
    "bidirectional": (_ONE_PORT,),
    "multi-ring": (_ONE_PORT,),
}
"""Assumptions about messages, by schedule, that may change which schedule is faster."""


@dataclass(frozen=True)
class Simulation:
    """The cost of one call of ring attention, in virtual seconds and bytes.

    recording: the operations of every rank, or if the timelines are in `Lockstep`, those of rank 0, which
    represents all ranks, and of a few others. timeline: the times of the operations on the given network.
    free: their times on free links. wall_s, cpu_s: the seconds that the simulation itself took.
    """

    recording: Recording
    timeline: Timeline
    free: Timeline
    wall_s: float
    cpu_s: float

    @property
    def makespan_s(self) -> float:
        """Return the seconds until the last rank has ended."""
        return self.timeline.makespan_s

    @property
    def exposed_s(self) -> float:
        """Return the makespan in seconds minus the makespan of the same program on free links."""
        return self.makespan_s - self.free.makespan_s

    @property
    def busy_s(self) -> np.ndarray:
        """Return the seconds that each rank computes."""
        return self.timeline.busy_s

    @property
    def waited_s(self) -> np.ndarray:
        """Return the seconds that each rank waits, for messages and for slower ranks."""
        return self.timeline.waited_s

    @property
    def busy_fraction(self) -> float:
        """Return the fraction of all ranks' time that is spent computing."""
        return self.timeline.busy_fraction

    @property
    def peak_bytes(self) -> np.ndarray:
        """Return each rank's peak bytes of tensors, without its own q, k and v."""
        return np.array([report.peak_bytes for report in self.recording.memory])

    @property
    def P(self) -> int:  # noqa: N802
        """Return the number of ranks."""
        return self.recording.P

    @property
    def bytes_sent(self) -> int:
        """Return the bytes that all ranks send."""
        if isinstance(self.timeline, Lockstep):
            return self.timeline.bytes_sent
        return int(self.recording.program.sent_bytes.sum())

    def trace(self) -> Trace:
        """Return the events of all ranks. Raises: CommError if a `Lockstep` kept only some; use `timeline.trace(ranks)`."""
        return self.timeline.trace()

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, ready for JSON, with those of each rank if there are at most 64 ranks."""
        figures: dict[str, Any] = {
            "makespan_s": self.makespan_s,
            "exposed_s": self.exposed_s,
            "busy_fraction": self.busy_fraction,
            "least_busy_s": float(self.busy_s.min()),
            "most_busy_s": float(self.busy_s.max()),
            "most_waited_s": float(self.waited_s.max()),
            "peak_bytes": int(self.peak_bytes.max()),
            "bytes_sent": self.bytes_sent,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
        }
        if self.P <= 64:
            figures["per_rank"] = {
                "busy_s": self.busy_s.tolist(),
                "waited_s": self.waited_s.tolist(),
                "peak_bytes": self.peak_bytes.tolist(),
            }
        return figures


def simulate(
    sizes: Attention,
    layout: Layout,
    hardware: Hardware,
    *,
    mask: Mask | None = None,
    schedule: str = "ring",
    backward: bool = False,
    tile: tuple[int, int] | None = (128, 128),
    slow: Mapping[int, float] | None = None,
    jitter: float = 0.0,
    seed: int = 0,
    block_time: BlockTime | None = None,
    network: Links | None = None,
) -> Simulation:
    """Return the simulated cost of ring attention of these sizes under `layout` on `hardware`.

    mask: if None, the mask of `sizes.causal`. schedule: as for `ring_attention`.
    tile: rows and keys of a kernel tile; a tile that is not entirely masked counts as a whole. If None, only
        visible pairs count.
    slow: how many times longer each rank computes. jitter: see `Recording.clock`.
    block_time, network: replace the hardware's own.
    Raises: CostError for a request that cannot be simulated; the errors of the schedule and the mask.
    """
    mask = Mask(causal=sizes.causal) if mask is None else mask
    check_request(layout, schedule, tile, slow or {}, jitter, seed, sizes, mask)
    began, cpu = time.perf_counter(), time.process_time()
    prices = Prices(block_time or time_of(hardware, sizes.dtype, tile, sizes.D, sizes.value_dim), sizes)
    program = RingProgram(sizes, layout, prices, schedule, backward, mask)
    networks = network or Network.of(hardware, layout.P), Network.free(layout.P)
    found: Timed | None = None
    if not runs_every_rank(layout, schedule, mask, backward, jitter):
        found = program.in_lockstep(networks, slow or {}, shown_ranks(layout.P))
    if found is None:
        check_ranks_that_run(layout.P, layout.S)
        recording = program.recording()
        timeline, free = (recording.clock(each, slow=slow, jitter=jitter, seed=seed) for each in networks)
        found = recording, timeline, free
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return Simulation(*found, wall_s, cpu_s)


def shown_ranks(P: int, most: int = 16) -> list[int]:
    """Return the ranks to draw: all, or `most` of them evenly spread, including the first and the last."""
    if P <= most:
        return list(range(P))
    return [round(i * (P - 1) / (most - 1)) for i in range(most)]


def check_request(
    layout: Layout,
    schedule: str,
    tile: tuple[int, int] | None,
    slow: Mapping[int, float],
    jitter: float,
    seed: int = 0,
    sizes: Attention | None = None,
    mask: Mask | None = None,
) -> None:
    """Check a request.

    Raises: CostError if it cannot be simulated; the errors of the schedule and the mask.
    """
    check_amounts(layout.S, layout.P, tile, sizes)
    name = messages_of(schedule)
    if name not in MESSAGES_ASSUMED:
        known = ", ".join(MESSAGES_ASSUMED)
        raise CostError(f"one of the schedules {known}", repr(schedule), nearest(name, MESSAGES_ASSUMED))
    if sizes is not None:
        get_schedule(schedule).check(sizes.H, sizes.K, layout.P)
    if mask is not None:
        _check_mask(mask.of_length(layout.S), layout)
    if not isinstance(seed, int) or seed < 0:
        raise CostError("seed >= 0, an integer", f"{seed!r}", f"seed {abs(seed)}" if seed else "seed 0")
    for rank, factor in slow.items():
        if not 0 <= rank < layout.P:
            raise CostError(f"slow ranks from 0 to {layout.P - 1}", f"rank {rank}")
        if not 0 < factor < float("inf"):
            raise CostError("slow factors > 0, finite", f"rank {rank} times {factor}")
    if not 0 <= jitter <= 1:
        raise CostError("jitter from 0 to 1, a standard deviation of logarithms", f"{jitter}")


def messages_of(schedule: str) -> str:
    """Return the name of a schedule without its degrees, its key in `MESSAGES_ASSUMED`."""
    return schedule.partition("(")[0].strip()


def runs_every_rank(layout: Layout, schedule: str, mask: Mask, backward: bool, jitter: float) -> bool:
    """Return whether a simulation keeps every rank's operations; its time and memory then grow as the square of ranks."""
    many = layout.P >= FEWEST_IN_LOCKSTEP and not jitter
    return not (many and go_together(layout, schedule, mask, backward))


def check_ranks_that_run(P: int, tokens: int = 0) -> None:
    """Check the number of ranks whose operations are all kept. Raises: CostError for too many.

    tokens: the tokens of the call, or 0. Unless it is 0, the error suggests a request of about so many tokens
    in which one rank represents all.
    """
    if P > MOST_RANKS_THAT_RUN:
        other = (
            f"; or {-(-tokens // (2 * P)) * 2 * P:,} tokens, zig-zag or striped, by the ring or the all-gather, without jitter, windows and "
            "documents: then one rank stands for all"
        )
        raise CostError(
            f"at most {MOST_RANKS_THAT_RUN:,} ranks, as every rank's operations are kept",
            f"{P:,}",
            f"{MOST_RANKS_THAT_RUN:,} ranks{other if tokens else ''}",
        )


def _check_mask(mask: Mask, layout: Layout) -> None:
    """Refuse narrow windows of long sequences, which make endless plans because tiles are as small as the window."""
    least = -(-layout.S // MOST_TILES_OF_A_WINDOW)
    if mask.window is not None and mask.window < least:
        raise CostError(
            f"a window of at least {least:,} tokens for a sequence of {layout.S:,}",
            f"{mask.window:,}",
            f"a window of {least}, or {mask.window * MOST_TILES_OF_A_WINDOW:,} tokens",
        )


def check_amounts(
    tokens: int, ranks: int, tile: tuple[int, int] | None = None, sizes: Attention | None = None
) -> None:
    """Check amounts before a layout is made from them, because even that could take forever.

    Raises: CostError for amounts that cannot be simulated in reasonable time.
    """
    check_tile(tile)
    if ranks > MOST_RANKS:
        remedy = f"{MOST_RANKS:,} ranks; ringlab plan answers for more at once"
        raise CostError(f"at most {MOST_RANKS:,} ranks", shown(ranks), remedy)
    if tokens > MOST_TOKENS:
        raise CostError(f"at most {MOST_TOKENS:,} tokens", f"{shown(tokens)} tokens", f"{MOST_TOKENS} tokens")
    if ranks > tokens:
        raise CostError(
            "at least one token per rank",
            f"{tokens} tokens on {ranks} ranks",
            f"{tokens} ranks or fewer, or {ranks} tokens",
        )
    amounts = (
        {} if sizes is None else {name: getattr(sizes, name) for name in "BHKD"} | {"Dv": sizes.value_dim}
    )
    amounts |= dict(zip(("rows of a tile", "keys of a tile"), tile or (), strict=False))
    for name, value in amounts.items():
        if value > MOST_OF_A_SIZE:
            raise CostError(f"{name} <= {MOST_OF_A_SIZE:,}", shown(value), f"{MOST_OF_A_SIZE}")
    largest = 0 if sizes is None else max(sizes.D, sizes.value_dim)
    if sizes is not None and sizes.B * sizes.H * largest * tokens >= 2**56:
        got = f"{sizes.B} × {sizes.H} × {tokens} × {largest}"
        raise CostError("q and out of fewer than 2^56 elements, B × H × S × D", got, "a smaller batch")


def estimated_cpu_s(ranks: int, backward: bool) -> float:
    """Return the most CPU seconds that a simulation may take, roughly: see `CPU_S_PER_PAIR`."""
    return CPU_S_PER_PAIR[backward] * ranks**2
