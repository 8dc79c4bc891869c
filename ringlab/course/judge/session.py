"""The workers of one submission, and the subject that checks talk to. Workers never serve two submissions."""

from __future__ import annotations

import builtins
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ringlab.errors
from ringlab.course.contract import Crashed, Failure, NotWritten
from ringlab.course.judge.process import Overdue, WorkerDied, WorkerProcess
from ringlab.course.judge.protocol import Frame, ProtocolError
from ringlab.course.judge.records import taken_in
from ringlab.course.judge.sandbox import Bounds
from ringlab.course.subject import Measured, Recorded, as_failure, crashed
from ringlab.errors import CommError

if TYPE_CHECKING:
    from ringlab.course.judge.network import Network

LOSSES = 3  # workers that may be lost before a submission is given up


class Condemned(Failure):
    """The submission broke the protocol: nothing it answers counts, before or after."""


class Session:
    """Workers that have loaded one submission's code.

    seconds: for each call. total_seconds: for the whole submission; what comes later fails unrun.
    """

    def __init__(
        self,
        cells: Sequence[str],
        functions: Sequence[str],
        *,
        torch: bool,
        kernels: bool = False,
        unsafe: bool = False,
        bounds: Bounds | None = None,
        seconds: float = 20.0,
        total_seconds: float = 300.0,
    ) -> None:
        self.cells, self.functions = list(cells), list(functions)
        self.torch, self.kernels, self.unsafe, self.bounds = torch, kernels, unsafe, bounds
        self.seconds, self.total_seconds = seconds, total_seconds
        self.deadline = time.monotonic() + total_seconds
        self.condemned, self.losses, self.calls = "", 0, 0
        self.notes: list[str] = []
        self._starting: list[WorkerProcess] = []
        self._loaded: list[WorkerProcess] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        for worker in [*self._starting, *self._loaded]:
            worker.kill()
        self._starting, self._loaded = [], []

    def prestart(self, count: int) -> None:
        """Have `count` workers start side by side; returns at once."""
        while len(self._starting) + len(self._loaded) < count:
            self._starting.append(
                WorkerProcess(self.bounds, torch=self.torch, kernels=self.kernels, unsafe=self.unsafe)
            )

    def workers(self, count: int) -> list[WorkerProcess]:
        """Return `count` workers that have loaded the code. Raises: Failure; SandboxError."""
        self._refuse_if_over()
        self.prestart(count)
        while len(self._loaded) < count:
            worker = self._starting.pop(0)
            worker.ready()
            self._load(worker)
        return self._loaded[:count]

    def _load(self, worker: WorkerProcess) -> None:
        deadline = self.limit()
        try:
            worker.send(Frame("load", {"call": 0, "functions": self.functions}, self.cells), deadline)
            frame = worker.receive(deadline)
            if frame.kind != "loaded" or not isinstance(frame.value, list):
                raise ProtocolError("the code loaded", f"a frame {frame.kind[:20]!r}")
        except (Overdue, WorkerDied, ProtocolError) as error:
            worker.kill()
            raise self.lost("the notebook's code", error) from None
        self.notes = [shown(note)[:500] for note in frame.value[:20]]
        self._loaded.append(worker)

    def limit(self) -> float:
        """Return the time at which a call that begins now must have ended."""
        return min(time.monotonic() + self.seconds, self.deadline)

    def discard(self, worker: WorkerProcess) -> None:
        """End a worker that cannot be used again."""
        worker.kill()
        if worker in self._loaded:
            self._loaded.remove(worker)

    def lost(self, what: str, error: Exception) -> Failure:
        """Return the failure for a worker that had to be ended because of `error`."""
        self.losses += 1
        if isinstance(error, ProtocolError):
            self.condemned = f"it interfered with the judge: needed {error.needed}, got {error.got}"
            return Condemned("This submission interfered with the judge; nothing in it counts.")
        if isinstance(error, Overdue):
            return Crashed(f"{what} did not end within {self.seconds:g} s.")
        return Crashed(
            f"{what} ended its process, or used more than the {(self.bounds or Bounds()).memory_bytes >> 30} GiB "
            "of memory it may use."
        )

    def _refuse_if_over(self) -> None:
        if self.condemned:
            raise Condemned("This submission interfered with the judge; nothing in it counts.")
        if self.losses >= LOSSES:
            raise Crashed(f"Not run: {LOSSES} of this submission's processes had to be ended already.")
        if time.monotonic() > self.deadline:
            raise Crashed(f"Not run: this submission has used up its {self.total_seconds:g} s.")


class SandboxedSubject:
    """One stage's function in sandboxed workers; the same interface as `InProcessSubject`."""

    def __init__(self, session: Session, function: str) -> None:
        self.session, self.function = session, function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.measure(*args, **kwargs).answer

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        """Return the answer, and the most that the worker's process grew by during the call.

        The operating system's figure: arrays, scratch space of operators, small objects, in whole
        pages; not the arguments, not what child processes hold.
        """
        return Measured(*self._called(args, kwargs))

    def record(self, *args: Any, **kwargs: Any) -> Recorded:
        """Return the answer, and the accesses that the worker says its kernels made."""
        return Recorded(*self._called(args, kwargs, record=True)[0])

    def _called(self, args: Any, kwargs: Any, *, record: bool = False) -> tuple[Any, int]:
        (worker,) = self._ready(1)
        try:
            answer, peak = self._converse(worker, args, kwargs, record)
            return (taken_in(answer) if record else answer), peak
        except (Overdue, WorkerDied, ProtocolError) as error:
            self.session.discard(worker)
            raise self.session.lost(f"`{self.function}`", error) from None

    def run_ring(self, world_size: int, *per_rank: Sequence[Any], **kwargs: Any) -> Any:
        from ringlab.course.judge.network import Network, RankRaised  # loads torch

        for argument in per_rank:
            if len(argument) != world_size:
                raise ValueError(f"{world_size} entries, one per rank, not {len(argument)}")
        workers = self._ready(world_size)
        network = Network(workers, self._next_call(), self.session.limit() - time.monotonic())
        arguments = [tuple(argument[rank] for argument in per_rank) for rank in range(world_size)]
        try:
            return network.run(self.function, arguments, kwargs)
        except RankRaised as error:
            failure = _raised(self.function, error.report)
            failure.counterexample = f"rank {error.rank}: {failure.counterexample}".strip()
        except CommError as error:
            failure = as_failure(self.function, error)
        except (Overdue, WorkerDied, ProtocolError) as error:
            failure = self.session.lost(f"`{self.function}` on {world_size} ranks", error)
        self._recover(network, workers)
        raise failure

    def _recover(self, network: Network, workers: Sequence[WorkerProcess]) -> None:
        """Bring the ranks that are still in the call out of it, or end them."""
        if not self.session.condemned:
            network.abort()
        for rank, worker in enumerate(workers):
            if self.session.condemned or not network.idle(rank):
                self.session.discard(worker)

    def _ready(self, count: int) -> list[WorkerProcess]:
        workers = self.session.workers(count)
        if f"no code cell defines the function {self.function}" in self.session.notes:
            raise NotWritten(
                f"there is no function `{self.function}` in the notebook.", "\n".join(self.session.notes)
            )
        return workers

    def _next_call(self) -> int:
        self.session.calls += 1
        return self.session.calls

    def _converse(self, worker: WorkerProcess, args: Any, kwargs: Any, record: bool) -> tuple[Any, int]:
        call, deadline = self._next_call(), self.session.limit()

        def say(kind: str, value: Any = None, **fields: Any) -> None:
            worker.send(Frame(kind, {"call": call, **fields}, value), deadline)

        def hear(kind: str) -> Any:
            frame = worker.receive(deadline)
            if frame.fields.get("call") != call or frame.kind not in (kind, "error") or worker.frames:
                raise ProtocolError("one answer to the call under way", f"a frame {frame.kind[:20]!r}")
            if frame.kind == "error":
                raise _raised(self.function, frame.fields)
            return frame.value

        say("call", (args, kwargs), function=self.function, **({"record": True} if record else {}))
        hear("ready")
        worker.reset_peak()
        base = worker.resident()
        say("go")
        hear("done")
        peak = max(0, worker.peak() - base)
        say("deliver")
        return hear("result"), peak


def _raised(function: str, report: dict[str, Any]) -> Failure:
    """Return the failure for an exception in the learner's code, as the worker reports it.

    Text of the learner's making goes into the counterexample only: it may quote the probe, and
    counterexamples of hidden checks are not shown.
    """
    name, text = (shown(report.get(key)) for key in ("type", "text"))
    kind = _exception_class(name)
    if name == "ProtocolError":
        return Failure(f"`{function}` should answer with arrays, numbers, or tuples of them.", text)
    if kind is None:
        return Crashed(f"`{function}` raised an exception of its own.", text)
    if issubclass(kind, NotImplementedError):
        return NotWritten(f"`{function}` is not written yet.")
    if issubclass(kind, CommError):
        return Crashed(f"`{function}`: the ranks cannot finish ({name}).", text)
    return crashed(function, name, text)


def shown(text: Any) -> str:
    """Return what a worker wrote as text for a terminal: no control characters, a bounded length."""
    if not isinstance(text, str):
        return ""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text[:5000])


def _exception_class(name: str) -> type[BaseException] | None:
    """Return Python's or ringlab's exception of this name: no other name is repeated, it may be a probe."""
    found = getattr(builtins, name, None) or getattr(ringlab.errors, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
