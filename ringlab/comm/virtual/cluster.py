"""A cluster inside one process: ranks are threads, and exactly one runs at a time.

A rank runs until it blocks, and then the next rank that can continue runs. The order is deterministic, so a
run gives the same events and the same bits every time. A deadlock is found at once, when no rank can continue
and at least one rank has not finished. A message moves, and its send completes, when both its ends are
posted, as on gloo. A program that would hang on gloo therefore fails here too.

There is one exception to "one at a time": computations that are marked `thread_safe`, because they touch only
tensors of their own rank, may run on several ranks at once (see `turns`).
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ringlab.comm.memory import MemoryMeter
from ringlab.comm.protocol import Comm, Tensors, Work
from ringlab.comm.ring import Ring
from ringlab.comm.trace import Outcome, Trace, union
from ringlab.comm.virtual.streams import RankStreams
from ringlab.comm.virtual.threads import RankThread, entered_modes, inside_modes, outside_modes
from ringlab.comm.virtual.turns import Turns
from ringlab.comm.virtual.waiting import (
    Half,
    deadlock,
    mismatch,
    peer_died,
    raise_failure,
    unfinished,
    where,
)
from ringlab.comm.wrappers.traced import Traced
from ringlab.errors import CommError, MismatchError, RinglabError, WorldSizeError

T = TypeVar("T")


class Costs:
    """The virtual times of a run. A computation takes 1 second, a message 0.5; a subclass may change both.

    >>> class ByBytes(Costs):
    ...     def message(self, source, to, nbytes):
    ...         return nbytes / 1e9
    >>> cluster = VirtualCluster(2, costs=ByBytes())
    >>> trace = cluster.run(lambda ring: ring.shift(torch.zeros(1_000_000))).trace
    >>> trace.exposed(rank=0)  # seconds of waiting for 4 MB
    0.004
    """

    def compute(self, rank: int, label: str, args: tuple[Any, ...]) -> float:
        """Return the seconds that a computation on `rank` takes."""
        return 1.0

    def message(self, source: int, to: int, nbytes: int) -> float:
        """Return the seconds that a message takes once both its ends are posted."""
        return 0.5


class VirtualCluster:
    """`P` ranks in this process.

    memory: whether to count the bytes of each rank's tensors (about 25 µs per torch operation).
    faults: the faults to make (see `ringlab.comm.wrappers.faulty`).
    costs: the seconds that computations and messages take on the virtual clock.

    Raises: WorldSizeError unless P is an integer ≥ 1.

    >>> from ringlab import VirtualCluster
    >>> outcome = VirtualCluster(3).run(lambda ring: ring.shift(torch.tensor([ring.rank])).item())
    >>> outcome.results  # by rank: the number of the previous one
    [2, 0, 1]
    >>> outcome.trace.bytes_sent(rank=0)
    8
    """

    def __init__(
        self, P: int, *, memory: bool = True, faults: Sequence[Any] = (), costs: Costs | None = None
    ) -> None:
        if not isinstance(P, int) or P < 1:
            raise WorldSizeError("P >= 1 ranks", repr(P))
        self.P, self.memory, self.faults, self.costs = P, memory, tuple(faults), costs or Costs()

    def __repr__(self) -> str:
        return f"VirtualCluster({self.P})"

    def run(self, program: Callable[..., Any], *args: Any) -> Outcome:
        """Return the outcome of `program(ring, *args)` on every rank.

        Raises: DeadlockError, MismatchError or UnreceivedError, which name ranks and exchanges, if messages
        do not fit; a RinglabError of the program unchanged; RankFailedError for any other exception of the
        program.
        """
        return _Scheduler(self, program, args).run()


class _Scheduler:
    """Matches messages, finds deadlocks, and keeps the clocks.

    Only the rank that has the turn calls its methods.
    """

    def __init__(self, cluster: VirtualCluster, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.cluster = cluster
        self.trace = Trace(cluster.P)
        self.streams = RankStreams(cluster.P)
        self.meters = [MemoryMeter(rank) for rank in range(cluster.P)]
        self.comms = [_VirtualComm(self, rank) for rank in range(cluster.P)]
        self.sends: dict[tuple[int, int], deque[Half]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[Half]] = defaultdict(deque)
        grad = torch.is_grad_enabled()

        def body(rank: int) -> Any:
            multithreading = torch.autograd.set_multithreading_enabled(False)
            with torch.set_grad_enabled(grad), multithreading, self.watch(rank):
                return program(Ring(self.wrapped(rank)), *args)

        self.threads = [RankThread(rank, body, self._ended) for rank in range(cluster.P)]
        self.turns = Turns(self.threads, self._interrupt_blocked)
        self.over = False
        self.stuck = 0
        self.failures: list[tuple[int, float, int]] = []
        """How often the run had been stuck when a rank failed, the time on the rank's clock, and the rank."""

    def wrapped(self, rank: int) -> Comm:
        comm: Comm = self.comms[rank]
        if self.cluster.faults:
            from ringlab.comm.wrappers.faulty import Faulty

            comm = Faulty(comm, self.cluster.faults)
        return Traced(comm, self.trace)

    @contextmanager
    def watch(self, rank: int) -> Iterator[None]:
        meter = self.meters[rank].watch() if self.cluster.memory else nullcontext()
        with self.streams.of(rank), meter:
            yield

    def run(self) -> Outcome:
        try:
            self.turns.run()
        finally:
            self.over = True
            self.streams.join()
            for thread in self.threads:
                thread.abandon()
            for comm in self.comms:
                comm.spent.clear()
        try:
            self._raise_failures()
            results = [thread.result for thread in self.threads]
        finally:
            # Break a reference cycle, which would keep all tensors of a run: threads and comms refer to this
            # scheduler.
            self.threads.clear()
            self.comms.clear()
        return Outcome(results, self.trace, [meter.report() for meter in self.meters])

    def _ended(self, thread: RankThread) -> None:
        if thread.error is not None:
            self.failures.append((self.stuck, self.comms[thread.rank].time, thread.rank))
        self.turns.ended(thread)

    def _interrupt_blocked(self) -> None:
        """Wake the ranks that have not ended, with the reason why no rank can continue."""
        blocked = [thread for thread in self.threads if thread.waiting]
        works = {thread.rank: thread.waiting for thread in blocked if thread.waiting}
        dead = self.first_failure()
        self.stuck += 1
        for thread in blocked:
            if dead is None:
                thread.interrupt = deadlock(works)
            else:
                thread.interrupt = peer_died(works[thread.rank], dead.rank, dead.error)
        self.turns.ready.extend(blocked)

    def first_failure(self) -> RankThread | None:
        """Return the rank that failed first on the virtual clock, or None. A rank that only waited comes last."""
        return self.threads[min(self.failures)[2]] if self.failures else None

    def _raise_failures(self) -> None:
        failed = self.first_failure()
        if failed is None:
            leftovers = [h for queue in (*self.sends.values(), *self.receives.values()) for h in queue]
            unwaited = [comm.pending for comm in self.comms if comm.pending]
            if leftovers or unwaited:
                raise unfinished(leftovers, [work for works in unwaited for work in works])
            return
        raise_failure(failed.rank, failed.error, self.cluster.P)

    def post(self, halves: list[Half]) -> None:
        """Queue the ends of messages, and match the ends whose other end is already queued."""
        for half in halves:
            mine, others = (self.sends, self.receives) if half.sending else (self.receives, self.sends)
            pair = half.pair
            if others[pair]:
                other = others[pair].popleft()
                send, receive = (half, other) if half.sending else (other, half)
                self._match(send, receive)
            else:
                mine[pair].append(half)

    def _match(self, send: Half, receive: Half) -> None:
        if send.free:
            self._complete(send, receive)
        else:
            send.partner = receive

    def give(self, work: _VirtualWork) -> None:
        """Complete the messages that `work` gives away. The rank of `work` waits, and no longer needs the tensors."""
        for half in list(work.open_ends):
            half.free = True
            if half.partner is not None:
                self._complete(half, half.partner)

    def _complete(self, send: Half, receive: Half) -> None:
        problem = mismatch(send, receive)
        self.comms[send.rank].spent.append(send.tensor)
        start = max(send.work.posted, receive.work.posted)
        arrival = start + self.cluster.costs.message(send.rank, receive.rank, send.tensor.nbytes)
        for end in (send, receive):
            work, thread = end.work, self.threads[end.rank]
            work.open_ends.remove(end)
            work.arrival = max(work.arrival, arrival)
            assert isinstance(work, _VirtualWork)
            work.spans.append((start, arrival))
            if problem:
                work.error = MismatchError(*problem)
            if work.done and thread.waiting is work and thread not in self.turns.ready:
                self.turns.ready.append(thread)
        if problem:
            return
        # This runs on the thread of the rank that posted last. Dispatch modes of a rank's program would therefore
        # see only some of the rank's messages, so they are left, and see none.
        meeting = self.streams.meeting(send.rank, receive.rank, send.tensor, receive.tensor)
        with outside_modes(), meeting:
            if send.given and receive.given:
                self._swap(send, receive)
            else:
                _copy_alone(send.tensor, receive.tensor)

    def _swap(self, send: Half, receive: Half) -> None:
        """Swap the memory of the two ends, and the bytes that the two meters count for it."""
        sender, receiver = self.meters[send.rank], self.meters[receive.rank]
        sent, taken = sender.counted(send.tensor), receiver.counted(receive.tensor)
        with torch.no_grad():
            old = receive.tensor.detach()
            receive.tensor.set_(send.tensor)  # type: ignore[call-overload]
            send.tensor.set_(old)  # type: ignore[call-overload]
        sender.trade(receive.tensor, send.tensor, taken)
        receiver.trade(send.tensor, receive.tensor, sent)


class _VirtualComm(Comm):
    def __init__(self, scheduler: _Scheduler, rank: int) -> None:
        self.scheduler = scheduler
        self.rank, self.world_size = rank, scheduler.cluster.P
        self.time = 0.0
        self.count = 0
        self.pending: list[_VirtualWork] = []
        self.spent: list[Tensor] = []
        """Tensors that have been sent. They are kept until this rank continues. If another rank freed them
        during a computation of this rank, this rank's peak of memory would depend on chance."""

    def now(self) -> float:
        return self.time

    def exchange(
        self,
        *,
        send: Tensors = (),
        to: int | None = None,
        receive: Tensors = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        return self._post(send, to, receive, source, tag, gives=False)

    def hand_over(self, *, send: Tensors, to: int, receive: Tensors, source: int, tag: str = "") -> Work:
        return self._post(send, to, receive, source, tag, gives=True)

    def _post(
        self,
        send: Tensors,
        to: int | None,
        receive: Tensors,
        source: int | None,
        tag: str,
        gives: bool,
    ) -> Work:
        self._only_in_the_program("exchange")
        self.spent.clear()
        work = _VirtualWork(self, tag, self.count, to, source)
        self.count += 1
        halves = [
            Half(work, self.rank, where(to, self, "to"), t, i, True, gives, not gives)
            for i, t in enumerate(send)
        ]
        halves += [
            Half(work, self.rank, where(source, self, "source"), t, i, False, gives)
            for i, t in enumerate(receive)
        ]
        work.open_ends, work.buffers = list(halves), tuple(receive)
        self.pending.append(work)
        self.scheduler.post(halves)
        return work

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        thread, turns = self.scheduler.threads[self.rank], self.scheduler.turns
        if not thread.is_current and not self.scheduler.over:
            return function(*args, **kwargs)  # a computation inside another one is part of it
        self._only_in_the_program("compute")
        grad, modes = torch.is_grad_enabled(), entered_modes()

        def job() -> T:
            with torch.set_grad_enabled(grad), self.scheduler.watch(self.rank), inside_modes(modes):
                return function(*args, **kwargs)

        self.spent.clear()
        try:
            return turns.compute(thread, job, getattr(function, "thread_safe", False))
        finally:
            self.spent.clear()
            self.time += self.scheduler.cluster.costs.compute(self.rank, label, args)

    def _only_in_the_program(self, what: str) -> None:
        """Raise CommError outside the program. A call would hang there: the rank has no turn to pass on."""
        if self.scheduler.over:
            raise CommError(
                f"{what} of rank {self.rank} while its cluster runs",
                "the run has ended",
                "call backward, and all that needs the ring, inside the program",
            )
        if not self.scheduler.threads[self.rank].is_current:
            raise CommError(
                f"{what} from the program of rank {self.rank} itself",
                f"a call from the thread '{threading.current_thread().name}'",
                "exchange before or after ring.compute(...), not inside it",
            )


class _VirtualWork(Work):
    """An exchange of one rank. `open_ends` are the ends of its messages that have not been matched."""

    def __init__(self, comm: _VirtualComm, tag: str, index: int, to: int | None, source: int | None) -> None:
        self.comm, self.tag, self.index, self.to, self.source = comm, tag, index, to, source
        self.rank = comm.rank
        self.posted = self.arrival = comm.time
        self.spans: list[tuple[float, float]] = []
        self.open_ends: list[Half] = []
        self.buffers: tuple[Tensor, ...] = ()
        self.error: RinglabError | None = None

    @property
    def done(self) -> bool:
        return not self.open_ends or self.error is not None

    @property
    def transit(self) -> tuple[tuple[float, float], ...] | None:  # type: ignore[override]
        return union(self.spans) if self.spans else None

    def wait(self) -> tuple[Tensor, ...]:
        if self in self.comm.pending:
            self.comm.pending.remove(self)
        self.comm._only_in_the_program("wait")
        self.comm.spent.clear()
        self.comm.scheduler.give(self)
        if not self.done:
            scheduler = self.comm.scheduler
            scheduler.turns.block(scheduler.threads[self.rank], self)
        self.comm.spent.clear()
        if self.error is not None:
            raise self.error
        self.comm.time = max(self.comm.time, self.arrival)
        return self.buffers


def _copy_alone(source: Tensor, into: Tensor) -> None:
    """Copy on this thread only. torch's OpenMP threads would slow down other ranks' computations."""
    source, into = source.detach(), into.detach()
    if not into.numel():  # NumPy's empty arrays have stride 0, so they cannot be viewed as bytes
        return
    if all(
        x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg()
        for x in (source, into)
    ):
        np.copyto(into.flatten().view(torch.uint8).numpy(), source.flatten().view(torch.uint8).numpy())
    else:
        into.copy_(source)
