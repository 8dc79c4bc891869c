"""The judge as the network between ranks: routes every message, and so knows what was sent.

Each rank is a worker of its own that holds only its shard. What stands in the trace was seen
here, not reported: who exchanged with whom, how many bytes, how often, in which order.
"""

from __future__ import annotations

import select
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ringlab.comm.memory import MemoryReport
from ringlab.comm.outcome import Outcome
from ringlab.comm.protocol import CONTROL
from ringlab.comm.trace import Trace
from ringlab.comm.waiting import Half, deadlock, mismatch, unfinished
from ringlab.course.judge.exchanges import Form, Posted, is_integer, read_exchange
from ringlab.course.judge.process import Overdue, WorkerDied, WorkerProcess
from ringlab.course.judge.protocol import Frame, ProtocolError
from ringlab.errors import MismatchError, RinglabError

QUEUED_BYTES = 1 << 30  # of messages that nobody has taken yet
CONTROL_BYTES = 4096  # that one rank may send under control tags in a run; what goes beyond counts


class RankRaised(RinglabError):
    """The learner's program raised on one rank: `rank`, and `report`, the fields of its error frame."""

    def __init__(self, rank: int, report: dict[str, Any]) -> None:
        super().__init__("a program that ends on every rank", f"rank {rank} raised {report.get('type')}")
        self.rank, self.report = rank, report


@dataclass(eq=False)
class _Rank:
    """Where one rank's program stands; `waiting` is the exchange it cannot go on without."""

    rank: int
    worker: WorkerProcess
    state: str = "called"
    waiting: Posted | None = None
    works: list[Posted] = field(default_factory=list)
    unwaited: dict[int, Posted] = field(default_factory=dict)
    base: int = 0
    peak: int = 0
    result: Any = None


class Network:
    """One run of a ring program on `workers`, one per rank, all of which have loaded the program."""

    def __init__(self, workers: Sequence[WorkerProcess], call: int, seconds: float) -> None:
        self.ranks = [_Rank(rank, worker) for rank, worker in enumerate(workers)]
        self.call, self.seconds = call, seconds
        self.start = time.monotonic()
        self.deadline = self.start + seconds
        self.sends: dict[tuple[int, int], deque[Half]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[Half]] = defaultdict(deque)
        self.queued = 0

    def run(self, function: str, arguments: Sequence[tuple[Any, ...]], keywords: dict[str, Any]) -> Outcome:
        """Return the outcome of `function(ring, *arguments[rank], **keywords)` on every rank.

        `memory` holds, per rank, what the operating system says the worker's process grew by,
        from the moment its arguments were there to the return of the function, at its highest:
        tensors, the message in flight, scratch space of operators; not the arguments, not what
        child processes use. Single allocations are not seen: `largest_bytes` is the peak as well.

        Raises: RankRaised; DeadlockError, MismatchError, UnreceivedError; Overdue, WorkerDied,
        ProtocolError. After the first two kinds the workers can take another call; of the others,
        those for which `idle` is false are to be killed.
        """
        self._begin(function, arguments, keywords)
        while any(rank.state != "result" for rank in self.ranks):
            self._step()
        leftovers = [half for queue in (*self.sends.values(), *self.receives.values()) for half in queue]
        unwaited = [work for rank in self.ranks for work in rank.unwaited.values()]
        if leftovers or unwaited:
            raise unfinished(leftovers, unwaited)
        memory = [MemoryReport(r.rank, r.peak, r.peak, 0) for r in self.ranks]
        return Outcome([rank.result for rank in self.ranks], self._trace(), memory)

    def idle(self, rank: int) -> bool:
        """Whether this rank's worker has ended its call and can take another."""
        return self.ranks[rank].state in ("result", "error")

    def abort(self, seconds: float = 2.0) -> None:
        """End the call on every rank that is still at it, as far as it lets itself be ended."""
        self.deadline = time.monotonic() + seconds
        told: set[int] = set()
        while time.monotonic() < self.deadline and not all(self.idle(r.rank) for r in self.ranks):
            for rank in self.ranks:
                if (rank.waiting or rank.state == "ready") and rank.rank not in told:
                    told.add(rank.rank)
                    try:
                        self._send(rank, "abort")
                    except RinglabError:
                        return
            try:
                self._read(aborting=True)
            except RinglabError:
                return

    def _begin(self, function: str, arguments: Sequence[tuple[Any, ...]], keywords: dict[str, Any]) -> None:
        for rank, own in zip(self.ranks, arguments, strict=True):
            place = {"function": function, "rank": rank.rank, "world_size": len(self.ranks)}
            self._send(rank, "ring", (tuple(own), keywords), **place)
        while any(rank.state == "called" for rank in self.ranks):
            self._read()
        self.start = time.monotonic()
        for rank in self.ranks:
            rank.worker.reset_peak()
            rank.base = rank.worker.resident()
        for rank in self.ranks:
            rank.state = "running"
            self._send(rank, "go")

    def _step(self) -> None:
        self._read()
        for rank in self.ranks:
            if rank.waiting and rank.waiting.done:
                self._deliver(rank, rank.waiting)
        going = [rank for rank in self.ranks if rank.state == "running"]
        if going and all(rank.waiting for rank in going) and not any(r.state == "done" for r in self.ranks):
            raise deadlock({rank.rank: rank.waiting for rank in going if rank.waiting})

    def _read(self, aborting: bool = False) -> None:
        """Wait for bytes from the ranks that owe some, and take all complete frames."""
        owing = [r for r in self.ranks if not self.idle(r.rank)]
        left_over = any(r.worker.frames for r in owing)  # by an error, while one rank's frames were taken
        waiting = 0.0 if left_over else max(0.0, self.deadline - time.monotonic())
        readable, _, _ = select.select([r.worker.socket for r in owing], [], [], waiting)
        if not readable and time.monotonic() >= self.deadline:
            late = [str(r.rank) for r in owing if not r.waiting] or [str(r.rank) for r in owing]
            raise Overdue("an end of the program in time", f"rank {', '.join(late)} still running")
        for rank in owing:
            try:
                if rank.worker.socket in readable:
                    rank.worker.read_available()
            except WorkerDied as error:
                raise WorkerDied(error.needed, f"rank {rank.rank}: {error.got}") from None
            while rank.worker.frames:
                self._take(rank, rank.worker.frames.pop(0), aborting)

    def _take(self, rank: _Rank, frame: Frame, aborting: bool) -> None:
        if frame.fields.get("call") != self.call:
            raise ProtocolError("answers to the call under way", "a frame of another call")
        expected = {"called": ("ready",), "running": ("exchange", "wait", "done"), "done": ("result",)}
        if frame.kind == "error":
            rank.state, rank.waiting = "error", None
            if not aborting:
                raise RankRaised(rank.rank, frame.fields)
        elif frame.kind not in expected.get(rank.state, ()) or rank.waiting:
            raise ProtocolError("frames in their order", f"{frame.kind[:20]!r} from rank {rank.rank}")
        elif frame.kind == "ready":
            rank.state = "ready"
        elif frame.kind == "result":
            rank.result, rank.state = frame.value, "result"
        elif frame.kind == "done":
            rank.peak = max(0, rank.worker.peak() - rank.base)
            rank.state = "done"
            self._send(rank, "deliver")
        elif frame.kind == "wait":
            self._wait(rank, frame)
        elif not aborting:
            self._post(rank, frame)

    def _post(self, rank: _Rank, frame: Frame) -> None:
        now = time.monotonic() - self.start
        work = read_exchange(frame, rank.rank, len(self.ranks), len(rank.works), now)
        self.queued += work.sent
        if self.queued > QUEUED_BYTES:
            raise ProtocolError(f"at most {QUEUED_BYTES} bytes under way", "more")
        rank.works.append(work)
        rank.unwaited[work.index] = work
        for half in list(work.open_ends):
            self._match(half)

    def _match(self, half: Half) -> None:
        """Pair this end with the first of the other ends that wait for one, if any."""
        mine, others = (self.sends, self.receives) if half.sending else (self.receives, self.sends)
        if not others[half.pair]:
            mine[half.pair].append(half)
            return
        other = others[half.pair].popleft()
        send, receive = (half, other) if half.sending else (other, half)
        problem = mismatch(send, receive)
        if problem:
            raise MismatchError(*problem)
        for end in (send, receive):
            end.work.open_ends.remove(end)
            end.work.arrival = time.monotonic() - self.start
        sent = cast(Form, send.tensor)
        cast(Posted, receive.work).arrived[receive.place] = sent.data
        self.queued -= sent.nbytes

    def _wait(self, rank: _Rank, frame: Frame) -> None:
        index: Any = frame.fields.get("index")
        work = rank.unwaited.pop(index, None) if is_integer(index) else None
        if work is None:
            raise ProtocolError("a wait for an exchange that was posted", "another")
        work.waited, rank.waiting = time.monotonic() - self.start, work

    def _deliver(self, rank: _Rank, work: Posted) -> None:
        rank.waiting = None
        self._send(rank, "received", tuple(work.arrived[place] for place in sorted(work.arrived)))
        work.arrived.clear()

    def _send(self, receiver: _Rank, kind: str, value: Any = None, **fields: Any) -> None:
        receiver.worker.send(Frame(kind, {"call": self.call, **fields}, value), self.deadline)

    def _trace(self) -> Trace:
        trace = Trace(len(self.ranks))
        for rank in self.ranks:
            control = 0
            for work in rank.works:
                if work.tag.startswith(CONTROL):
                    control += work.sent
                    if control > CONTROL_BYTES:  # a meter leaves control out, so data must not pass as such
                        work.tag = "data as " + work.tag
                trace.events.append(work.event())
        return trace
