"""Virtual time for a recorded program: from timestamps of messages, never from the order of the threads.

A message starts when both its ends are posted and the port it leaves by is free: the sends of one
rank over one kind of link follow each other in the order of posting. It occupies the port for
bytes/bandwidth, and arrives a latency later. An exchange is complete, for its sender too, when all
its messages have arrived, as on the virtual cluster.

What that leaves out: the port of the RECEIVER is never busy, so a rank that many send to at once takes
all in; an all-gather of P - 1 sends by each rank leaves by one port, one after another, where NCCL's
ring all-gather uses all rails between nodes and can be several times faster. Exchanges of one rank
over different kinds of link do not wait for each other (and where nobody could go on, a message that
is ready passes those before it), whereas NCCL runs the exchanges of one communicator in the order of
posting: a backward whose hops are not hidden may be slower than its timeline.

All ranks advance together, one NumPy operation for all of them: the cost is that of the longest
program, times ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ringlab.comm.clocked.log import COMPUTE, POST, WAIT, Forms, Program
from ringlab.comm.trace import Compute, Exchange, Trace

END = 3
"""The kind of operation that a rank stands at once it has done all others."""
UNKNOWN = np.nan


class Links(Protocol):
    """A network: for arrays of ranks, what each pair's link offers."""

    def bytes_per_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return bytes per second in one direction; inf for a free link."""
        ...

    def latency_s(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return seconds from the last byte's departure to its arrival."""
        ...

    def port(self, source: np.ndarray, to: np.ndarray) -> np.ndarray:
        """Return which of its ports `source` sends by, 0 or 1: what goes by the same one queues."""
        ...


@dataclass(frozen=True)
class Timeline:
    """When everything happened, in virtual seconds from the start.

    makespan_s: until the last rank has ended. busy_s, waited_s: seconds that each rank computed, and
    waited for messages while it could not. ends: the end of each operation of `program`.
    seconds: what each computation took.
    """

    program: Program
    forms: Forms
    ends: np.ndarray
    seconds: np.ndarray

    @cached_property
    def makespan_s(self) -> float:
        """Return the seconds until the last rank has ended."""
        return float(self.ends.max(initial=0.0))

    @property
    def ends_of_ranks(self) -> np.ndarray:
        """Return when each rank has ended."""
        starts = self.program.starts
        ends = np.concatenate([self.ends, [0.0]])[starts[1:] - 1]
        return np.where(np.diff(starts) > 0, ends, 0.0)

    @cached_property
    def begins(self) -> np.ndarray:
        """Return when each operation began: when its rank's operation before it ended."""
        begins = np.concatenate([[0.0], self.ends])
        begins[self.program.starts[:-1]] = 0.0
        return begins[:-1]

    @cached_property
    def busy_s(self) -> np.ndarray:
        """Return the seconds that each rank computed."""
        computes = self.program.kinds == COMPUTE
        return np.bincount(self._ranks[computes], self.seconds, self.program.world_size)

    @cached_property
    def waited_s(self) -> np.ndarray:
        """Return the seconds that each rank waited for messages: exposed communication and others' work."""
        waits = self.program.kinds == WAIT
        return np.bincount(self._ranks[waits], (self.ends - self.begins)[waits], self.program.world_size)

    @property
    def _ranks(self) -> np.ndarray:
        """The rank of each operation."""
        return np.repeat(np.arange(self.program.world_size), np.diff(self.program.starts))

    @property
    def busy_fraction(self) -> float:
        """Return computing seconds over all ranks' seconds until the end; 1 where nothing takes time."""
        total = self.makespan_s * self.program.world_size
        return float(self.busy_s.sum()) / total if total else 1.0

    def strip(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return when the operations of `rank` began, their kinds, and when they ended."""
        ops = slice(self.program.starts[rank], self.program.starts[rank + 1])
        return self.begins[ops], self.program.kinds[ops], self.ends[ops]

    def trace(self, ranks: Sequence[int] | None = None) -> Trace:
        """Return the events, as the virtual cluster would trace them: for pictures, Perfetto, sums.

        ranks: only theirs; a thousand ranks have millions of events.
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
        )


@dataclass(frozen=True)
class Stuck:
    """A rank that cannot complete the exchange `post`, counted over all ranks.

    sending, receiving: whether its send, and its receive, is still to be completed.
    """

    rank: int
    post: int
    sending: bool
    receiving: bool


def evaluate(program: Program, network: Links, seconds: np.ndarray) -> tuple[np.ndarray, list[Stuck]]:
    """Return when each operation ends if the computations take these `seconds`, and the ranks that never end."""
    clock = _Clock(program, network, seconds)
    while clock.advance():
        pass
    return clock.ends, clock.stuck


class _Clock:
    """Where each rank stands, what time it has, and which messages have arrived when."""

    def __init__(self, program: Program, network: Links, seconds: np.ndarray) -> None:
        P = program.world_size
        self.program, self.seconds = program, seconds
        # Every rank's operations end with one of the kind END, at which it stays.
        self.kinds = np.insert(program.kinds, program.starts[1:], END)
        self.refs = np.insert(program.refs, program.starts[1:], 0)
        self.at = program.starts[:-1] + np.arange(P)
        self.time = np.zeros(P)
        self.all_ends = np.zeros(len(self.kinds))
        self.posted = np.full(len(program.to), UNKNOWN)
        self.messages = program.messages
        count = len(self.messages.sends)
        # One more than there are messages: what an exchange without one waits for came before the start.
        self.arrival = np.full(count + 1, UNKNOWN)
        self.arrival[-1] = -np.inf
        sender, receiver = program.post_rank[self.messages.sends], program.to[self.messages.sends]
        nbytes = program.sent_bytes[self.messages.sends]
        self.transfer = nbytes / network.bytes_per_s(sender, receiver)
        self.latency = np.broadcast_to(network.latency_s(sender, receiver), (count,))
        port = sender * 2 + network.port(sender, receiver)
        self.queue = np.argsort(port, kind="stable")  # by port, then in order of posting
        self.head, self.tail = (
            np.searchsorted(port[self.queue], np.unique(port), side=side) for side in ("left", "right")
        )
        self.port_free = np.zeros(len(self.head))

    @property
    def stuck(self) -> list[Stuck]:
        """The ranks that have not ended."""
        return [self._stuck(int(rank)) for rank in np.flatnonzero(self.kinds[self.at] != END)]

    def _stuck(self, rank: int) -> Stuck:
        post = int(self.refs[self.at[rank]])
        out, into = self.messages.outgoing[post], self.messages.incoming[post]
        return Stuck(rank, post, bool(np.isnan(self.arrival[out])), bool(np.isnan(self.arrival[into])))

    @property
    def ends(self) -> np.ndarray:
        """When each operation of the program ended."""
        return self.all_ends[self.kinds != END]

    def advance(self) -> bool:
        """Let every rank and every port do what it can; return whether any did something."""
        moved = self._post()
        moved |= self._send()
        moved |= self._compute()
        moved |= self._wait()
        return moved or self._overtake()

    def _step(self, ranks: np.ndarray) -> None:
        """`ranks` have done their operation: it ends at their time."""
        self.all_ends[self.at[ranks]] = self.time[ranks]
        self.at[ranks] += 1

    def _standing(self, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """The ranks that stand at an operation of `kind`, and what each refers to."""
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
        """Start the next message of each port, if both its ends are posted."""
        ports = np.flatnonzero(self.head < self.tail)
        messages = self.queue[self.head[ports]]
        ready = self._ready(messages)
        can = ~np.isnan(ready)
        ports, messages = ports[can], messages[can]
        self.port_free[ports] = np.maximum(ready[can], self.port_free[ports]) + self.transfer[messages]
        self.arrival[messages] = self.port_free[ports] + self.latency[messages]
        self.head[ports] += 1
        return bool(ports.size)

    def _ready(self, messages: np.ndarray) -> np.ndarray:
        """When both ends of each message were posted, UNKNOWN if they were not yet."""
        sends, receives = self.messages.sends[messages], self.messages.receives[messages]
        return np.maximum(self.posted[sends], self.posted[receives])

    def _overtake(self) -> bool:
        """Nobody can go on: let the first message of each port that is ready pass those before it."""
        moved = False
        for port in np.flatnonzero(self.head < self.tail):
            line = self.queue[self.head[port] : self.tail[port]]
            ready = np.flatnonzero(~np.isnan(self._ready(line)))
            if ready.size:
                first = ready[0]
                line[: first + 1] = np.roll(line[: first + 1], 1)
                moved = True
        return moved
