"""The judge as the network between ranks: it routes every message, so it knows what was sent.

Each rank is a separate worker that has only its shard. The judge itself saw all exchanges in the trace: who
exchanged with whom, how many bytes, how often, and in which order a rank posted and waited. Computations are
reported by the worker, but the judge reads their processor time. If this time is only a tiny part of a longer
run, the computations are left out of the trace. Right values prove that the work was done.

Times are those of a virtual clock per rank, the same as in the virtual cluster: a computation takes a second,
and a message takes half a second from the moment when both of its ends are posted. So times depend only on
the order of a rank's frames, and a program has the same times in the judge as in a notebook.

The network may have faults (`Faults`): slow links, a slow rank, ranks that continue in random order, a rank
that dies, a message that does not come in time. The judge simulates these faults, except for exchanges that
are posted late: only the worker can read a tensor at the last moment, so the worker simulates them.

A clock reading shows a rank when others computed and sent, which may be as much information as a number. So if a
rank reads its clock after a message that is shorter than a number, the bytes of a number count as sent data.
"""

from __future__ import annotations

import random
import select
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ringlab.comm.memory import MemoryReport
from ringlab.comm.protocol import CONTROL
from ringlab.comm.trace import Compute, Outcome, Trace
from ringlab.comm.virtual.waiting import Half, deadlock, mismatch, peer_died, unfinished
from ringlab.errors import MismatchError, PeerDiedError, RinglabError, TransportTimeout
from ringlab_course.checking.faults import Ended, Faults, Killed
from ringlab_course.checking.protocol import Frame, ProtocolError
from ringlab_course.judge.deadline import Deadline
from ringlab_course.judge.exchanges import (
    FORM_BYTES,
    SIZE_BYTES,
    Form,
    Posted,
    is_integer,
    read_exchange,
    read_label,
)
from ringlab_course.judge.process import Endless, Growth, Overdue, WorkerDied, WorkerProcess

QUEUED_BYTES = 1 << 30
"""Limit for messages that no rank has taken yet and for incomplete frames, because the judge holds both."""
LONG_S, LEAST = 0.05, 0.2
"""The limits within which the judge believes the computations that a rank reports.

It believes them if the run used less processor time than LONG_S seconds, or if the computations took at
least the share LEAST of that time.
"""
ABORT_S = 2.0  # seconds for an aborted rank to reach its next exchange; a rank that does not is killed


class RankRaised(RinglabError):
    """The learner's program raised on rank `rank`; `report` holds the fields of its error frame."""

    def __init__(self, rank: int, report: dict[str, Any]) -> None:
        super().__init__("a program that ends on every rank", f"rank {rank} raised {report.get('type')}")
        self.rank, self.report = rank, report


@dataclass(eq=False)
class _Rank:
    """The state of one rank's program; `waiting` is the exchange that it waits for.

    time: the time on its virtual clock.
    computed: CPU seconds from the call's arguments to its end.
    computing: the label of the current computation, if any.
    inside: CPU seconds of all computations.
    heard: the last exchange since the rank read its clock that received fewer bytes than a number has, if any.
    bereft: whether the rank has got a PeerDiedError that forbids further exchanges (`Faults.final`).
    ended: why the rank has no result, if it has none.
    aborted: whether its worker has been asked to end the call.
    """

    rank: int
    worker: WorkerProcess
    state: str = "called"
    waiting: Posted | None = None
    works: list[Posted] = field(default_factory=list)
    unwaited: dict[int, Posted] = field(default_factory=dict)
    time: float = 0.0
    computing: str | None = None
    events: list[Posted | Compute] = field(default_factory=list)
    growth: Growth | None = None
    peak: int = 0
    computed: float = 0.0
    inside: float = 0.0
    result: Any = None
    returned: Frame | None = None
    exchanges: int = 0
    heard: Posted | None = None
    bereft: bool = False
    ended: Ended | None = None
    aborted: bool = False

    @property
    def over(self) -> bool:
        """Whether the rank's program has returned or ended."""
        return self.state == "returned" or self.ended is not None


class Network:
    """One run of a ring program on `workers`, one per rank, which have all loaded the program."""

    def __init__(
        self, workers: Sequence[WorkerProcess], call: int, deadline: Deadline, faults: Faults | None = None
    ) -> None:
        self.ranks = [_Rank(rank, worker) for rank, worker in enumerate(workers)]
        self.faults = faults or Faults()
        self.faults.require(len(self.ranks))
        self.call, self.deadline, self.costs = call, deadline, self.faults.costs()
        self.dice = random.Random(f"order {self.faults.seed}") if faults else None
        self.dead: _Rank | None = None
        self.failures: list[tuple[float, int, dict[str, Any]]] = []
        self.sends: dict[tuple[int, int], deque[Half]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[Half]] = defaultdict(deque)
        self.queued = self.kept = 0

    def run(
        self,
        function: str,
        arguments: Sequence[tuple[Any, ...]],
        keywords: dict[str, Any],
        gradient: bool = False,
    ) -> Outcome:
        """Return the outcome of `function(ring, *arguments[rank], **keywords)` on every rank.

        With `gradient`, each result includes its gradient. `memory` contains, per rank, the peak growth of
        the worker's process, as the operating system reports it. It is measured from the arrival of the
        arguments to the return of the function. It includes tensors, the message in flight and scratch space
        of operators, but not the arguments or child processes. Single allocations cannot be seen, so
        `largest_bytes` is also the peak.
        If a rank was killed, the results of ranks that stopped early are `Ended`, and the outcome contains
        only the results.

        If ranks fail, the others go on until they end or wait. Then the failure that came first on the virtual
        clock is reported, so that the report does not depend on which worker was faster.

        Raises: RankRaised (also for a MismatchError), DeadlockError or UnreceivedError, after which the
        workers can take another call; Overdue, Endless, WorkerDied or ProtocolError, after which the workers
        for which `idle` is false have to be killed.
        """
        self._begin(function, arguments, keywords, gradient)
        while not all(rank.over for rank in self.ranks):
            self._step()
        self._raise_failure()
        if self.dead:
            return Outcome([rank.ended or rank.result for rank in self.ranks], Trace(len(self.ranks)), [])
        leftovers = [half for queue in (*self.sends.values(), *self.receives.values()) for half in queue]
        unwaited = [work for rank in self.ranks for work in rank.unwaited.values()]
        if leftovers or unwaited:
            raise unfinished(leftovers, unwaited)
        memory = [MemoryReport(r.rank, r.peak, r.peak, 0) for r in self.ranks]
        return Outcome([rank.result for rank in self.ranks], self._trace(), memory)

    def idle(self, rank: int) -> bool:
        """Return whether this rank's worker has ended its call and can take another one."""
        return self.ranks[rank].state in ("returned", "error")

    @property
    def returned(self) -> list[Frame | None]:
        """The frames in which the ranks return their arguments, or None for a rank that ended otherwise."""
        return [rank.returned for rank in self.ranks]

    def abort(self) -> None:
        """End the call on every rank that is still running it, if the rank cooperates."""
        self.deadline = Deadline(ABORT_S)
        while not self.deadline.over and not all(self.idle(r.rank) for r in self.ranks):
            for rank in self.ranks:
                if (rank.waiting or rank.state in ("listening", "ready")) and not rank.aborted:
                    try:
                        self._abort(rank)
                    except RinglabError:
                        return
            try:
                self._read(aborting=True)
            except RinglabError:
                return

    def _begin(
        self, function: str, arguments: Sequence[tuple[Any, ...]], keywords: dict[str, Any], gradient: bool
    ) -> None:
        for rank in self.ranks:
            place = {"function": function, "rank": rank.rank, "world_size": len(self.ranks)}
            if gradient:
                place["gradient"] = True
            if self.faults.late:
                place["late"] = self.faults.late_of(rank.rank)
            self._send(rank, "ring", **place)
        self._until("listening")
        given = []
        for rank, own in zip(self.ranks, arguments, strict=True):
            rank.growth = Growth(rank.worker)
            rank.computed = -rank.worker.computed()
            given.append(self._send(rank, "arguments", (tuple(own), keywords)))
        self._until("ready")
        for rank, nbytes in zip(self.ranks, given, strict=True):
            assert rank.growth is not None
            rank.growth.begin(nbytes)
        for rank in self.ranks:
            rank.state = "running"
            self._send(rank, "go")

    def _until(self, state: str) -> None:
        while any(rank.state != state for rank in self.ranks):
            self._read()

    def _step(self) -> None:
        self._read()
        going = [rank for rank in self.ranks if rank.state == "running"]
        ready = [rank for rank in going if rank.waiting and rank.waiting.done]
        if self.dice and ready:  # hold the ranks back until all of them wait, then choose one
            ready = [self.dice.choice(ready)] if all(rank.waiting for rank in going) else []
        for rank in ready:
            if rank.waiting:
                self._deliver(rank, rank.waiting)
        if going and all(rank.waiting for rank in going) and not any(r.state == "done" for r in self.ranks):
            self._stuck({rank.rank: rank.waiting for rank in going if rank.waiting})

    def _stuck(self, works: dict[int, Posted]) -> None:
        """Raise a failure or DeadlockError if no rank was killed; otherwise tell the ranks which rank died."""
        self._raise_failure()
        if self.dead is None:
            raise deadlock(dict(works))
        for number, work in works.items():
            self._tell(self.ranks[number], peer_died(work, self.dead.rank, Killed()))

    def _raise_failure(self) -> None:
        """Raise RankRaised for the rank that failed first on the virtual clock.

        In a run in which a rank was killed, only a function that is not written counts as a failure.
        """
        counted = [
            f for f in self.failures if not self.dead or f[2].get("type") == NotImplementedError.__name__
        ]
        if counted:
            _, rank, report = min(counted, key=lambda failure: failure[:2])
            raise RankRaised(rank, report)

    def _tell(self, rank: _Rank, error: RinglabError) -> None:
        """Make the exchange that the rank waits for raise `error`."""
        rank.waiting = None
        rank.bereft = rank.bereft or (self.faults.final and isinstance(error, PeerDiedError))
        fields = {"needed": error.needed, "got": error.got, "remedy": error.remedy}
        self._send(rank, "lost", error=type(error).__name__, final=rank.bereft, **fields)

    def _kill(self, rank: _Rank) -> None:
        """End the rank's program where it is; its later messages are ignored."""
        self.dead, rank.ended, rank.state = rank, Ended(Killed.__name__), "killed"
        self._abort(rank)

    def _abort(self, rank: _Rank) -> None:
        rank.aborted = True
        self._send(rank, "abort")

    def _read(self, aborting: bool = False) -> None:
        """Wait for bytes from the ranks whose call has not ended, and process all complete frames."""
        owing = [r for r in self.ranks if not self.idle(r.rank)]
        # Frames are left over if an error interrupted the processing of a rank's frames.
        left_over = any(r.worker.frames for r in owing)
        waiting = 0.0 if left_over else self.deadline.left()
        readable, _, _ = select.select([r.worker.socket for r in owing], [], [], waiting)
        if self.deadline.over:  # even if bytes arrived, because a rank may send forever
            self._raise_failure()
            late = [str(r.rank) for r in owing if not r.waiting] or [str(r.rank) for r in owing]
            raise Overdue("a program that ends in time", f"rank {', '.join(late)} still running")
        for rank in owing:
            try:
                if rank.worker.socket in readable:
                    rank.worker.read_available()
                    self._bound(owing)
            except WorkerDied as error:
                raise WorkerDied(error.needed, f"rank {rank.rank}: {error.got}") from None
            while rank.worker.frames:
                self._take(rank, rank.worker.frames.pop(0), aborting)

    def _take(self, rank: _Rank, frame: Frame, aborting: bool) -> None:
        if frame.fields.get("call") != self.call:
            raise ProtocolError("answers to the call under way", "a frame of another call")
        if rank.ended and frame.kind != "error":
            return
        running = ("begin", "exchange", "wait", "now", "done") if rank.computing is None else ("end",)
        expected = {
            "called": ("listening",), "listening": ("ready",), "running": running, "done": ("result",), "result": ("returned",),
        }  # fmt: skip
        if frame.kind == "error":
            began = rank.state in ("running", "done", "result")
            rank.state, rank.waiting = "error", None
            self._broke_off(rank, frame.fields, aborting, began)
        elif frame.kind not in expected.get(rank.state, ()) or rank.waiting:
            raise ProtocolError("frames in the expected order", f"{frame.kind[:20]!r} from rank {rank.rank}")
        elif rank.state != "running":
            self._begin_or_end(rank, frame)
        elif frame.kind == "done":
            assert rank.growth is not None
            rank.peak = rank.growth.bytes()
            rank.computed += rank.worker.computed()
            rank.state = "done"
            self._send(rank, "deliver")
        elif frame.kind == "wait":
            self._wait(rank, frame)
        elif frame.kind == "now":
            self._read_clock(rank)
        elif frame.kind == "begin":
            rank.computing = read_label(frame, len(rank.events))
            self.kept += FORM_BYTES
            # the worker is blocked until this reply, so its clock stands still while we read it
            rank.inside -= rank.worker.clock()
            self._send(rank, "begun")
        elif frame.kind == "end":
            self._computed(rank)
        else:
            self._post(rank, frame, aborting)

    def _begin_or_end(self, rank: _Rank, frame: Frame) -> None:
        """Process a frame from before the program began, or from after its end."""
        rank.state = frame.kind
        if frame.kind == "result":
            assert rank.growth is not None
            # read again, as `done` is only the worker's claim
            rank.peak = max(rank.peak, rank.growth.with_answer(frame.nbytes))
            rank.result = frame.value
            self._send(rank, "return")
        elif frame.kind == "returned":
            rank.returned = frame

    def _read_clock(self, rank: _Rank) -> None:
        if rank.heard:
            rank.heard.tell()
            rank.heard = None
        self._send(rank, "time", time=rank.time)

    def _computed(self, rank: _Rank) -> None:
        label, rank.computing = rank.computing or "", None
        rank.inside += rank.worker.clock()
        self._send(rank, "ended")
        begin, rank.time = rank.time, rank.time + self.costs.compute(rank.rank, label, ())
        rank.events.append(Compute(rank.rank, label, begin, rank.time))

    def _broke_off(self, rank: _Rank, report: dict[str, Any], aborting: bool, began: bool) -> None:
        if aborting or rank.ended:
            return
        rank.ended = Ended(str(report.get("type"))[:100], str(report.get("text"))[:5000])
        self.failures.append((rank.time, rank.rank, report))
        if not began:  # the others wait for this rank
            self._raise_failure()

    def _post(self, rank: _Rank, frame: Frame, aborting: bool) -> None:
        work = read_exchange(frame, rank.rank, len(self.ranks), len(rank.works), rank.time)
        if aborting:  # nobody receives this; the rank gets an error when it waits
            work.open_ends.clear()
            rank.works.append(work)
            rank.unwaited[work.index] = work
            return
        if not work.tag.startswith(CONTROL):
            if self.faults.kill == (rank.rank, rank.exchanges):
                return self._kill(rank)
            work.in_vain = self.faults.timeout == (rank.rank, rank.exchanges)
            rank.exchanges += 1
        self.queued += work.sent
        self.kept += work.form_bytes
        self._bound(self.ranks)
        rank.works.append(work)
        rank.unwaited[work.index] = work
        for half in list(work.open_ends):
            self._match(half)

    def _bound(self, ranks: Sequence[_Rank]) -> None:
        """Raise Endless if the judge holds too many bytes.

        Incomplete frames and frames that are not processed yet count, too.
        """
        held = self.queued + self.kept
        for rank in ranks:
            held += rank.worker.reader.unparsed + sum(frame.nbytes for frame in rank.worker.frames)
        if held > QUEUED_BYTES:
            got = f"its ranks had sent more than {QUEUED_BYTES / 2**30:g} GiB that nobody had waited for"
            raise Endless("messages that are waited for", got)

    def _match(self, half: Half) -> None:
        """Match this end of a message with the first waiting other end, if there is one."""
        mine, others = (self.sends, self.receives) if half.sending else (self.receives, self.sends)
        if not others[half.pair]:
            mine[half.pair].append(half)
            return
        other = others[half.pair].popleft()
        send, receive = (half, other) if half.sending else (other, half)
        problem = mismatch(send, receive)
        if problem:  # both ranks get the error when they wait, as on the virtual cluster
            for end in (send, receive):
                cast(Posted, end.work).fail(MismatchError(*problem), cast(Form, end.tensor))
                end.work.open_ends.remove(end)
            return
        sent = cast(Form, send.tensor)
        start = max(send.work.posted, receive.work.posted)
        arrival = start + self.costs.message(send.rank, receive.rank, sent.nbytes)
        for end in (send, receive):
            end.work.open_ends.remove(end)
            end.work.arrival = max(end.work.arrival, arrival)
            cast(Posted, end.work).spans.append((start, arrival))
        cast(Posted, receive.work).arrived[receive.place] = sent.data

    def _wait(self, rank: _Rank, frame: Frame) -> None:
        index: Any = frame.fields.get("index")
        work = rank.unwaited.get(index) if is_integer(index) else None
        if work is None:
            raise ProtocolError("wait() on an exchange that is under way", "wait() on another")
        if work.in_vain:
            return self._tell(
                rank,
                TransportTimeout("a message from a live rank", "no message in time", "a rank may be slow"),
            )
        del rank.unwaited[work.index]
        work.waited, rank.waiting = rank.time, work

    def _deliver(self, rank: _Rank, work: Posted) -> None:
        if work.error is not None:
            rank.events.append(work)
            return self._tell(rank, work.error)
        rank.waiting = None
        rank.time = max(rank.time, work.arrival)
        if work.received < SIZE_BYTES:
            rank.heard = work
        rank.events.append(work)
        arrived = tuple(work.arrived[place] for place in sorted(work.arrived))
        self._send(rank, "received", arrived)
        self.queued -= sum(tensor.nbytes for tensor in arrived)
        work.arrived.clear()

    def _send(self, receiver: _Rank, kind: str, value: Any = None, **fields: Any) -> int:
        return receiver.worker.send(Frame(kind, {"call": self.call, **fields}, value), self.deadline)

    def _trace(self) -> Trace:
        trace = Trace(len(self.ranks))
        for rank in self.ranks:
            for work in rank.works:
                # Meters ignore messages whose tags begin with CONTROL. The prefix added here makes them count this message.
                if work.data_as_control and work.tag.startswith(CONTROL):
                    work.tag = "data as " + work.tag
            believed = rank.computed < LONG_S or rank.inside >= LEAST * rank.computed
            for each in rank.events:
                if not isinstance(each, Compute):
                    trace.events.append(each.event())
                elif believed:
                    trace.events.append(each)
        return trace
