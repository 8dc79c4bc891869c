"""Virtual times for a recorded program, computed from its messages, not from the order of the threads.

A message starts when both its ends are posted and its port is free. A rank has one port for each kind of
link, which its sends use one after the other, in the order of posting. A message occupies the port for
bytes/bandwidth, and arrives one latency later. An exchange is complete, even for its sender, only when all
its messages have arrived, as on the virtual cluster.

This model differs from real networks in three ways. First, the port of the RECEIVER is never busy in the
model, so if many ranks send to one rank at the same time, it receives all messages together. Second, in an
all-gather each rank makes P − 1 sends through one port, one after the other, whereas NCCL's ring all-gather
uses all rails between nodes and can be several times faster. Third, in the model a rank's exchanges over
different kinds of link do not wait for each other. If no rank can continue otherwise, a message that is ready even
overtakes messages posted before it. NCCL, by contrast, runs the exchanges of one communicator in the order of
posting, so a real backward whose hops are not hidden may be slower than in the model.

All ranks advance together, with one NumPy operation for all of them, so the cost grows with the length of the
longest program times the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from ringlab.comm.clocked.log import COMPUTE, POST, WAIT, Forms, Program
from ringlab.comm.trace import Compute, Exchange, Trace, union

END = 3
"""The kind of the operation that is added after a rank's last one."""
UNKNOWN = np.nan
Ranks: TypeAlias = Int[np.ndarray, " pairs"]


@runtime_checkable
class Links(Protocol):
    """A network: the properties of the links between pairs of ranks. Pairs are passed as two arrays."""

    def bytes_per_s(self, source: Ranks, to: Ranks) -> np.ndarray:
        """Return the bytes per second in one direction. inf means that sending takes no time."""
        ...

    def latency_s(self, source: Ranks, to: Ranks) -> np.ndarray:
        """Return the seconds from the last byte's departure to its arrival."""
        ...

    def port(self, source: Ranks, to: Ranks) -> np.ndarray:
        """Return the number, from 0, of the port by which `source` sends. Messages on the same port queue."""
        ...


@dataclass(frozen=True)
class Timeline:
    """The times of all operations, in virtual seconds from the start.

    ends: the end of each operation of `program`. seconds: the length of each computation.
    messages: the departure and arrival of each message. One more row at the end is used by exchanges that
    have no message.
    """

    program: Program
    forms: Forms
    ends: np.ndarray
    seconds: np.ndarray
    messages: Float[np.ndarray, "messages 2"]

    @property
    def makespan_s(self) -> float:
        """Return the seconds until the last rank ends."""
        return float(self.ends.max(initial=0.0))

    @property
    def ends_of_ranks(self) -> np.ndarray:
        """Return the time at which each rank ended."""
        starts = self.program.starts
        ends = np.concatenate([self.ends, [0.0]])[starts[1:] - 1]
        return np.where(np.diff(starts) > 0, ends, 0.0)

    @cached_property
    def begins(self) -> np.ndarray:
        """Return the time at which each operation began, which is the end of its rank's previous operation."""
        begins = np.concatenate([[0.0], self.ends])
        begins[self.program.starts[:-1]] = 0.0
        return begins[:-1]

    @property
    def busy_s(self) -> np.ndarray:
        """Return the seconds for which each rank computed."""
        computes = self.program.kinds == COMPUTE
        return np.bincount(self._ranks[computes], self.seconds, self.program.world_size)

    @property
    def waited_s(self) -> np.ndarray:
        """Return the seconds for which each rank waited for messages: exposed communication and other ranks' work."""
        waits = self.program.kinds == WAIT
        return np.bincount(self._ranks[waits], (self.ends - self.begins)[waits], self.program.world_size)

    @property
    def _ranks(self) -> np.ndarray:
        """Return the rank of each operation."""
        return np.repeat(np.arange(self.program.world_size), np.diff(self.program.starts))

    @property
    def busy_fraction(self) -> float:
        """Return the share of the time, over all ranks and up to the makespan, that was spent computing.

        It is 1 if nothing takes time.
        """
        total = self.makespan_s * self.program.world_size
        return float(self.busy_s.sum()) / total if total else 1.0

    def strip(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (begins, kinds, ends) of the operations of `rank`."""
        ops = slice(self.program.starts[rank], self.program.starts[rank + 1])
        return self.begins[ops], self.program.kinds[ops], self.ends[ops]

    def trace(self, ranks: Sequence[int] | None = None) -> Trace:
        """Return the events in the form of the virtual cluster's trace, for pictures, Perfetto or sums.

        ranks: the ranks whose events are returned, by default all. A thousand ranks have millions of events.
        """
        program, trace = self.program, Trace(self.program.world_size)
        labels = list(self.forms.labels)
        for rank in range(self.program.world_size) if ranks is None else ranks:
            posted: dict[int, float] = {}
            first = int(np.searchsorted(program.post_rank, rank))
            for op in range(program.starts[rank], program.starts[rank + 1]):
                kind, ref = program.kinds[op], int(program.refs[op])
                begin, end = float(self.begins[op]), float(self.ends[op])
                if kind == COMPUTE:
                    label = labels[program.labels[ref]]
                    trace.events.append(Compute(rank, label, begin, end))
                elif kind == POST:
                    posted[ref] = end
                else:
                    index = ref - first
                    trace.events.append(self._exchange(rank, index, ref, (posted[ref], begin, end)))
        return trace

    def _exchange(self, rank: int, index: int, ref: int, times: tuple[float, float, float]) -> Exchange:
        program, forms = self.program, self.forms
        both = [program.messages.outgoing[ref], program.messages.incoming[ref]]
        sent, received = int(program.forms_sent[ref]), int(program.forms_received[ref])
        to, source = int(program.to[ref]), int(program.source[ref])
        return Exchange(
            rank,
            index,
            forms[sent if sent >= 0 else received].tag,
            to if to >= 0 else None,
            source if source >= 0 else None,
            int(program.sent_bytes[ref]),
            int(program.received_bytes[ref]),
            forms[sent].shapes if sent >= 0 else (),
            *times,
            transit=None if sent < 0 and received < 0 else union(map(tuple, self.messages[both].tolist())),
        )


@dataclass(frozen=True)
class Stuck:
    """A rank that cannot complete an exchange. post: the exchange's number, counted over all ranks.

    sending, receiving: whether the send, or the receive, of the exchange is incomplete.
    """

    rank: int
    post: int
    sending: bool
    receiving: bool


def evaluate(
    program: Program, network: Links, seconds: Float[np.ndarray, " computations"]
) -> tuple[Float[np.ndarray, " operations"], Float[np.ndarray, "messages 2"], list[Stuck]]:
    """Return the end of each operation, `Timeline.messages`, and the ranks that never end.

    seconds: the time that each computation takes.
    """
    clock = _Clock(program, network, seconds)
    while clock.advance():
        pass
    return clock.ends, np.stack([clock.departure, clock.arrival], axis=1), clock.stuck


class _Clock:
    """The current operation and time of each rank, and the arrival of each message."""

    def __init__(self, program: Program, network: Links, seconds: np.ndarray) -> None:
        P = program.world_size
        self.program, self.seconds = program, seconds
        # The last operation of every rank has the kind END. A rank that has reached it advances no further.
        self.kinds = np.insert(program.kinds, program.starts[1:], END)
        self.refs = np.insert(program.refs, program.starts[1:], 0)
        self.at = program.starts[:-1] + np.arange(P)
        self.time = np.zeros(P)
        self.all_ends = np.zeros(len(self.kinds))
        self.posted = np.full(len(program.to), UNKNOWN)
        self.messages = program.messages
        count = len(self.messages.sends)
        # There is one entry more than there are messages. It is for exchanges without a message, and has
        # arrived at −inf.
        self.arrival = np.full(count + 1, UNKNOWN)
        self.arrival[-1] = -np.inf
        self.departure = np.full(count + 1, np.inf)
        sender, receiver = program.post_rank[self.messages.sends], program.to[self.messages.sends]
        nbytes = program.sent_bytes[self.messages.sends]
        self.transfer = nbytes / network.bytes_per_s(sender, receiver)
        self.latency = np.broadcast_to(network.latency_s(sender, receiver), (count,))
        of_sender = network.port(sender, receiver)
        port = sender * (1 + of_sender.max(initial=0)) + of_sender
        self.queue = np.argsort(port, kind="stable")  # messages of one port are adjacent, in order of posting
        self.head, self.tail = (
            np.searchsorted(port[self.queue], np.unique(port), side=side) for side in ("left", "right")
        )
        self.port_free = np.zeros(len(self.head))

    @property
    def stuck(self) -> list[Stuck]:
        """Return the ranks that have not ended."""
        return [self._stuck(int(rank)) for rank in np.flatnonzero(self.kinds[self.at] != END)]

    def _stuck(self, rank: int) -> Stuck:
        post = int(self.refs[self.at[rank]])
        out, into = self.messages.outgoing[post], self.messages.incoming[post]
        return Stuck(rank, post, bool(np.isnan(self.arrival[out])), bool(np.isnan(self.arrival[into])))

    @property
    def ends(self) -> np.ndarray:
        """Return the end of each operation of the program."""
        return self.all_ends[self.kinds != END]

    def advance(self) -> bool:
        """Let each rank and port continue as far as it can, and return whether any could."""
        moved = self._post()
        moved |= self._send()
        moved |= self._compute()
        moved |= self._wait()
        return moved or self._overtake()

    def _step(self, ranks: np.ndarray) -> None:
        """End the current operation of `ranks` at their current times."""
        self.all_ends[self.at[ranks]] = self.time[ranks]
        self.at[ranks] += 1

    def _standing(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ranks whose current operation has this kind, and each one's exchange or computation."""
        ranks = np.flatnonzero(self.kinds[self.at] == kind)
        return ranks, self.refs[self.at[ranks]]

    def _post(self) -> bool:
        ranks, posts = self._standing(POST)
        self.posted[posts] = self.time[ranks]
        self._step(ranks)
        return bool(ranks.size)

    def _compute(self) -> bool:
        ranks, computes = self._standing(COMPUTE)
        self.time[ranks] += self.seconds[computes]
        self._step(ranks)
        return bool(ranks.size)

    def _wait(self) -> bool:
        ranks, posts = self._standing(WAIT)
        arrived = np.maximum(
            self.arrival[self.messages.outgoing[posts]], self.arrival[self.messages.incoming[posts]]
        )
        known = ~np.isnan(arrived)
        ranks = ranks[known]
        self.time[ranks] = np.maximum(self.time[ranks], arrived[known])
        self._step(ranks)
        return bool(ranks.size)

    def _send(self) -> bool:
        """Start the next message of each port if both its ends are posted. Return whether any started."""
        ports = np.flatnonzero(self.head < self.tail)
        messages = self.queue[self.head[ports]]
        ready = self._ready(messages)
        can = ~np.isnan(ready)
        ports, messages = ports[can], messages[can]
        self.departure[messages] = np.maximum(ready[can], self.port_free[ports])
        self.port_free[ports] = self.departure[messages] + self.transfer[messages]
        self.arrival[messages] = self.port_free[ports] + self.latency[messages]
        self.head[ports] += 1
        return bool(ports.size)

    def _ready(self, messages: np.ndarray) -> np.ndarray:
        """Return the time at which both ends of each message were posted, or UNKNOWN before that."""
        sends, receives = self.messages.sends[messages], self.messages.receives[messages]
        return np.maximum(self.posted[sends], self.posted[receives])

    def _overtake(self) -> bool:
        """Let the first ready message of each port pass those before it, and return whether any message did.

        This is done only if no rank can continue otherwise.
        """
        moved = False
        for port in np.flatnonzero(self.head < self.tail):
            line = self.queue[self.head[port] : self.tail[port]]
            ready = np.flatnonzero(~np.isnan(self._ready(line)))
            if ready.size:
                first = ready[0]
                line[: first + 1] = np.roll(line[: first + 1], 1)
                moved = True
        return moved
