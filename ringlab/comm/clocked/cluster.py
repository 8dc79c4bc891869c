"""A cluster that runs a program only to compute its timing: tensors have shapes but no data.

The ranks are threads, as on the virtual cluster, and each runs until it must wait for a message. A message
completes at once: the sender logs the send and continues, and a receiver continues if its message was sent
already. A rank therefore blocks only a few times in a whole ring, not once per hop, and no data moves. The
log contains the computations, posts and waits of each rank. `Recording.clock` computes their times
afterwards, on any network.

Pass tensors on the device "meta" to the program. They have a shape and a dtype, but no memory.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringlab.comm.clocked.log import COMPUTE, POST, WAIT, Forms, Log
from ringlab.comm.clocked.recording import Posted, Recording, ends, posted
from ringlab.comm.clocked.replicate_ranks import Seconds, replicate_ranks
from ringlab.comm.memory import MemoryMeter
from ringlab.comm.protocol import Comm, Work
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import Costs
from ringlab.comm.virtual.threads import RankThread
from ringlab.comm.virtual.turns import Turns
from ringlab.comm.virtual.waiting import (
    Half,
    Waiting,
    deadlock,
    mismatch,
    peer_died,
    raise_failure,
    unfinished,
    where,
)
from ringlab.errors import CommError, MismatchError, WorldSizeError

T = TypeVar("T")


class ClockedCluster:
    """`P` ranks whose program is recorded.

    costs: the seconds that a computation takes, by default 0. Seconds that the computation itself spends
    (`_ClockedComm.spend`) are added. The times of messages come from the network on which the recording is
    clocked.
    memory: whether to count the bytes of each rank's tensors (about 25 µs per torch operation).

    Raises: WorldSizeError unless P is an integer ≥ 1.

    >>> import torch
    >>> def program(ring):
    ...     return tuple(ring.shift(torch.empty(1, 2, 1000, 64, device="meta")).shape)
    >>> ClockedCluster(2).run(program).results
    [(1, 2, 1000, 64), (1, 2, 1000, 64)]
    """

    def __init__(self, P: int, costs: Costs | None = None, *, memory: bool = True) -> None:
        if not isinstance(P, int) or P < 1:
            raise WorldSizeError("P >= 1 ranks", repr(P))
        self.P, self.costs, self.memory = P, costs, memory

    def __repr__(self) -> str:
        return f"ClockedCluster({self.P})"

    def run(self, program: Callable[..., Any], *args: Any) -> Recording:
        """Return the recording of `program(ring, *args)` on every rank.

        Raises: DeadlockError if ranks wait for messages that no rank sends; MismatchError or UnreceivedError if messages
        do not fit. All three name ranks and exchanges. A RinglabError of the program is raised unchanged, any
        other exception as RankFailedError. Senders do not wait here, so only `Recording.clock` finds a cycle
        of senders.
        """
        return _Run(self, program, args).run()

    def run_alike(
        self,
        program: Callable[[Ring], Any],
        models: Sequence[int],
        seconds: Seconds,
    ) -> Recording:
        """Return the recording of a program in which many ranks do the same operations with other neighbours.

        models: for each rank, the rank whose operations it repeats, with peers at the same distances. Only
        these models run. They receive tensors of the shapes that they expect, and messages are compared
        afterwards.
        seconds: a function that returns the seconds of a rank's computations, given the labels of its model.

        Raises: as `run`; CommError if the models' messages do not fit together.
        """
        run = _Run(self, program, (), sorted(set(models)))
        return replicate_ranks(run.run(), models, seconds)

    def run_some(self, program: Callable[[Ring], Any], ranks: Sequence[int] = (0,)) -> Recording:
        """Return the recording of a program that only these ranks run, each as if alone.

        It is made for `lockstep.evaluate_alike`. The ranks receive tensors of the shapes that they expect.
        Raises: as `run`.
        """
        return _Run(self, program, (), ranks).run()


class _Run:
    """Passes the turn from rank to rank, counts messages per pair of ranks, and finds those that do not fit.

    ranks: the ranks that run, each as if alone. None means that all ranks run together.
    """

    def __init__(
        self,
        cluster: ClockedCluster,
        program: Callable[..., Any],
        args: tuple[Any, ...],
        ranks: Sequence[int] | None = None,
    ) -> None:
        P = cluster.P
        self.cluster, self.alone = cluster, ranks is not None
        self.forms = Forms()
        self.meters = [MemoryMeter(rank) for rank in range(P)]
        self.comms = [_ClockedComm(self, rank) for rank in range(P)]
        self.blocked: list[_ClockedWork | None] = [None] * P
        grad = torch.is_grad_enabled()

        def body(rank: int) -> Any:
            multithreading = torch.autograd.set_multithreading_enabled(False)
            with torch.set_grad_enabled(grad), multithreading, self.watch(rank):
                return program(Ring(self.comms[rank]), *args)

        self.threads = [
            RankThread(rank, body, self._ended) for rank in (range(P) if ranks is None else ranks)
        ]
        self.turns = Turns(self.threads, self._interrupt_blocked)
        self.first_failure: RankThread | None = None

    @contextmanager
    def watch(self, rank: int) -> Iterator[None]:
        with self.meters[rank].watch() if self.cluster.memory else nullcontext():
            yield

    def run(self) -> Recording:
        collecting = gc.isenabled()
        gc.disable()  # a rank makes thousands of small objects, but no reference cycles that need collecting
        try:
            self.turns.run()
        finally:
            if collecting:
                gc.enable()
            for comm in self.comms:
                comm.state = "over"
            for thread in self.threads:
                thread.abandon()
        self._raise_failures()
        results = {thread.rank: thread.result for thread in self.threads}
        return Recording(
            [comm.log for comm in self.comms],
            self.forms,
            [results.get(rank) for rank in range(self.cluster.P)],
            [meter.report() for meter in self.meters],
        )

    def _ended(self, thread: RankThread) -> None:
        if thread.error is not None and self.first_failure is None:
            self.first_failure = thread
        self.turns.ended(thread)

    def _interrupt_blocked(self) -> None:
        """Wake the ranks that have not ended, with the reason why no rank can continue."""
        works: dict[int, Waiting] = {
            rank: work.seen(open_ends=True) for rank, work in enumerate(self.blocked) if work is not None
        }
        dead = self.first_failure
        for rank, work in works.items():
            thread = self.threads[rank]
            if dead is None:
                thread.interrupt = deadlock(works)
            else:
                thread.interrupt = peer_died(work, dead.rank, dead.error)
            self.blocked[rank] = None
            self.turns.ready.append(thread)

    def _raise_failures(self) -> None:
        if self.first_failure is None:
            leftovers = [] if self.alone else [half for comm in self.comms for half in self._leftovers(comm)]
            unwaited = [
                posted(comm.log, self.forms, comm.rank, index)
                for comm in self.comms
                for index, waited in enumerate(comm.waited)
                if not waited
            ]
            if leftovers or unwaited:
                raise unfinished(leftovers, unwaited)
            return
        raise_failure(self.first_failure.rank, self.first_failure.error, self.cluster.P)

    def _leftovers(self, comm: _ClockedComm) -> Iterator[Half]:
        """Yield the ends of messages that `comm` posted and whose other ends were never posted."""
        for peer, sent in comm.sent.items():
            taken = self.comms[peer].taken.get(comm.rank, 0)
            for number in range(taken, len(sent)):
                yield from self.ends(comm.rank, comm.log.send_to(peer, number), sending=True)
        for peer, taken in comm.taken.items():
            sent_here = len(self.comms[peer].sent.get(comm.rank, ()))
            for number in range(sent_here, taken):
                yield from self.ends(comm.rank, comm.log.receive_from(peer, number), sending=False)

    def ends(self, rank: int, index: int, sending: bool) -> list[Half]:
        return ends(self.comms[rank].log, self.forms, rank, index, sending)


class _ClockedComm(Comm):
    def __init__(self, run: _Run, rank: int) -> None:
        self.run = run
        self.rank, self.world_size = rank, run.cluster.P
        self.log, self.costs = Log(), run.cluster.costs
        self.state = ""
        self.spent = 0.0
        self.sent: dict[int, array[int]] = {}
        """The forms of all messages so far, by the receiving rank."""
        self.taken: dict[int, int] = {}
        """The number of receives posted so far, by the sending rank."""
        self.waited = bytearray()
        """For each exchange so far, whether it was waited for."""
        self.last: tuple[Sequence[Tensor], int] = (), -1
        self.one_before: tuple[Sequence[Tensor], int] = (), -1

    def now(self) -> float:
        """Return 0, because times are computed after the program has ended."""
        return 0.0

    def spend(self, seconds: float) -> None:
        """Add `seconds` to the time of the current computation, in addition to the cluster's costs."""
        self.spent += seconds

    def exchange(
        self,
        *,
        send: Sequence[Tensor] = (),
        to: int | None = None,
        receive: Sequence[Tensor] = (),
        source: int | None = None,
        tag: str = "",
        hops: int = 0,
    ) -> Work:
        if self.state:
            self._refuse("exchange")
        run, log, forms = self.run, self.log, self.run.forms
        index, number, sent = len(self.waited), -1, -1
        self.waited.append(0)
        log.codes.append(4 * index + POST)
        if send:
            if to is None or not 0 <= to < self.world_size:
                where(to, self, "to")
                assert to is not None
            last, form = self.last
            # Fast path: a rank usually sends on the tensors that it received last.
            if len(send) == len(last) == 2:
                same = send[0] is last[0] and send[1] is last[1]
            else:
                same = len(send) == len(last) and all(map(is_, send, last))
            sent = form = form if same else forms.form(send)
            message = forms.messages[tag, form]
            line = self.sent.get(to)
            if line is None:
                line = self.sent[to] = array("i")
            line.append(message)
            log.to.append(to)
            log.sent.append(message)
            blocked = run.blocked[to]
            if blocked is not None and blocked.waits_for(self.rank, len(line)):
                run.blocked[to] = None
                run.turns.ready.append(run.threads[to])
        else:
            log.to.append(-1)
            log.sent.append(-1)
        if receive:
            if source is None or not 0 <= source < self.world_size:
                where(source, self, "source")
                assert source is not None
            number = self.taken.get(source, 0)
            self.taken[source] = number + 1
            before, form = self.one_before
            if receive is not before:  # a ring has two receive buffers in turn
                form = forms.form(receive)
            self.one_before, self.last = self.last, (receive, form)
            log.source.append(source)
            log.received.append(message if form == sent else forms.messages[tag, form])
        else:
            log.source.append(-1)
            log.received.append(-1)
        return _ClockedWork(self, index, number, receive)

    hand_over = relay = exchange

    def compute(self, label: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if self.state == "computing":
            return function(*args, **kwargs)  # a computation inside another one is part of it
        if self.state:
            self._refuse("compute")
        self.state, self.spent = "computing", 0.0
        try:
            result = function(*args, **kwargs)
        finally:
            self.state = ""
        log, spent = self.log, self.spent
        if self.costs is not None:
            spent += self.costs.compute(self.rank, label, args)
        log.codes.append(4 * len(log.seconds) + COMPUTE)
        log.labels.append(self.run.forms.labels[label])
        log.seconds.append(spent)
        return result

    def _refuse(self, what: str) -> None:
        if self.state == "computing":
            raise CommError(
                f"{what} from the program of rank {self.rank} itself",
                "a call from inside a computation",
                "exchange before or after ring.compute(...), not inside it",
            )
        raise CommError(
            f"{what} of rank {self.rank} while its cluster runs",
            "the run has ended",
            "call backward, and all that needs the ring, inside the program",
        )


class _ClockedWork(Work):
    """An exchange of one rank.

    If it expects a message, the `number`-th message from its source completes it.
    """

    def __init__(self, comm: _ClockedComm, index: int, number: int, receive: Sequence[Tensor]) -> None:
        self.comm, self.index, self.number, self.receive = comm, index, number, receive

    def wait(self) -> tuple[Tensor, ...]:
        comm, index, number = self.comm, self.index, self.number
        if comm.state:
            comm._refuse("wait")
        if comm.waited[index]:
            return tuple(self.receive)
        comm.waited[index] = 1
        comm.log.codes.append(4 * index + WAIT)
        if number >= 0 and not comm.run.alone:
            source = comm.log.source[index]
            line: Sequence[int] = comm.run.comms[source].sent.get(comm.rank, ())
            if len(line) <= number:
                line = self._block(source)
            if line[number] != comm.log.received[index]:
                self._fail(source)
        return tuple(self.receive)

    def waits_for(self, source: int, count: int) -> bool:
        """Return whether `count` messages from `source` complete this exchange."""
        return source == self.comm.log.source[self.index] and self.number < count

    def _block(self, source: int) -> Sequence[int]:
        run, rank = self.comm.run, self.comm.rank
        run.blocked[rank] = self
        run.turns.block(run.threads[rank], self.seen())
        return run.comms[source].sent[rank]

    def _fail(self, source: int) -> None:
        """Raise MismatchError with the difference between this exchange and the one that sent its message."""
        run, rank = self.comm.run, self.comm.rank
        sends = run.ends(source, run.comms[source].log.send_to(rank, self.number), sending=True)
        receives = run.ends(rank, self.index, sending=False)
        for send, receive in zip(sends, receives, strict=False):
            if problem := mismatch(send, receive):
                raise MismatchError(*problem)
        more = [str(end) for end in (*sends[len(receives) :], *receives[len(sends) :])]
        raise MismatchError(
            "as many tensors sent as expected in an exchange",
            f"{len(sends)} sent and {len(receives)} expected: {'; '.join(more)}",
            "all ranks must post the same tensors in the same order",
        )

    def seen(self, open_ends: bool = False) -> Posted:
        """Return this exchange in the form that errors need.

        open_ends: whether to add the messages that the exchange waits for.
        """
        run, rank = self.comm.run, self.comm.rank
        ends = run.ends(rank, self.index, sending=False) if open_ends else ()
        return posted(self.comm.log, run.forms, rank, self.index, ends)
