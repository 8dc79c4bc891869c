"""The workers of one submission, and the subject that checks call. No worker serves two submissions."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ringlab.errors
from ringlab.errors import CommError, OffLimitsError
from ringlab_course.checking import failures
from ringlab_course.checking.failures import Crashed, Failure, NotWritten, as_failure, crashed
from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.guard import arrays_by_argument, changed, prints
from ringlab_course.checking.protocol import Frame, ProtocolError
from ringlab_course.checking.subject import Measured, Recorded
from ringlab_course.judge.allowance import Allowance, Waits, Watch
from ringlab_course.judge.deadline import Deadline
from ringlab_course.judge.process import Endless, Growth, Held, Overdue, WorkerDied, WorkerProcess
from ringlab_course.judge.records import taken_in
from ringlab_course.judge.sandbox import Bounds
from ringlab_course.mesh.examine import Examined
from ringlab_course.mesh.examine import taken_in as examined

if TYPE_CHECKING:
    from ringlab_course.checking.faults import Faults
    from ringlab_course.judge.network import Network

LOSSES = 3
"""The number of workers that may be lost before a function is given up.

If workers are lost while they load the code, the whole submission is given up.
"""

READ: dict[str, Callable[[Any], Any]] = {"record": taken_in, "examine": examined}
"""The functions that read a worker's answer, by the way in which the worker watches the call."""


class Condemned(Failure):
    """The submission broke the protocol, so none of its answers count, neither earlier nor later ones."""


class Session:
    """Workers that have loaded one submission's code.

    functions: the names of the functions; as a mapping, it also gives the arguments that each function may
    change in place.
    limits: modules that the code may not use; if None, all of ringlab except its checks is available.
    seconds: the time limit of each call.
    total_seconds: the time limit of the whole submission; later calls fail without being run.
    patience: multiplies both limits, and the computing time that the checks of a tier may take
    (`allowance.begin`).
    """

    def __init__(
        self,
        cells: Sequence[str],
        functions: Mapping[str, Sequence[str]] | Sequence[str],
        *,
        torch: bool,
        kernels: bool = False,
        mesh: bool = False,
        unsafe: bool = False,
        bounds: Bounds | None = None,
        limits: OffLimits | None = None,
        seconds: float = 20.0,
        total_seconds: float = 300.0,
        patience: float = 1.0,
    ) -> None:
        self.cells = list(cells)
        may_change = functions if isinstance(functions, Mapping) else dict.fromkeys(functions, ())
        self.functions = {name: list(arguments) for name, arguments in may_change.items()}
        self.arrays = "triton" if kernels else "jax" if mesh else "torch" if torch else "numpy"
        self.kernels, self.unsafe = kernels, unsafe
        bounds = bounds or Bounds()
        self.bounds = replace(bounds, cpu_seconds=math.ceil(bounds.cpu_seconds * max(1.0, patience)))
        self.limits = limits
        self.watch = Watch(self.bounds)
        self.allowance = Allowance(patience)
        self.seconds, self.total_seconds = seconds * patience, total_seconds * patience
        self.waits = Waits()
        self.deadline = self._deadline(self.total_seconds)
        self.condemned, self.losses, self.calls, self.overdue = "", 0, 0, 0
        self.answered: set[str] = set()  # functions that have answered, so they are written
        self._function, self._losses, self._unloaded = "", dict[str, int](), 0
        self._exceeded: dict[str, str] = {}
        self.notes: list[str] = []
        self.concealed = False
        self._starting: list[WorkerProcess] = []
        self._loaded: list[WorkerProcess] = []
        self._parts: dict[
            WorkerProcess, tuple[str, ...]
        ] = {}  # the loaded part, for each worker that has loaded only part of the code
        self._texts: dict[str, str] | None = None
        self._imported: Held | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        self.watch.close()
        for worker in [*self._starting, *self._loaded]:
            worker.kill()
        self._starting, self._loaded = [], []

    def conceal(self) -> None:
        """Keep workers' texts out of `notes` and `condemned` from now on: workers see hidden probes."""
        self.concealed = True

    def turn_to(self, function: str) -> None:
        """Count lost workers for `function` from now on.

        So an endless loop, or too much memory, in one function costs no points of another.
        """
        self._losses[self._function] = self.losses
        if self.watch.exceeded:  # the watch has ended all workers
            self._exceeded[self._function], self.watch.exceeded = self.watch.exceeded, ""
            self.discard_all()
        self._function, self.losses = function, self._losses.get(function, 0)

    def prestart(self, count: int) -> None:
        """Start workers, without waiting for them, until `count` workers are starting or have loaded the code."""
        while len(self._starting) + len(self._loaded) < count:
            worker = WorkerProcess(self.bounds, arrays=self.arrays, unsafe=self.unsafe, limits=self.limits)
            self._starting.append(worker)

    def workers(self, count: int, part: tuple[str, ...] = ()) -> list[WorkerProcess]:
        """Return `count` workers that have loaded the whole code, or only the cells in `part`.

        A worker in which the submission keeps memory of earlier calls is replaced by a fresh one.

        Raises: Failure; SandboxError.
        """
        self._refuse_if_over()
        ready: list[WorkerProcess] = []
        for worker in [worker for worker in self._loaded if self._parts.get(worker, ()) == part]:
            if len(ready) == count:
                break
            if self._beyond(worker) > worker.loaded:
                self.discard(worker)
            else:
                ready.append(worker)
        self.prestart(len(self._loaded) + count - len(ready))
        while len(ready) < count:
            ready.append(self._fresh())
            self._load(ready[-1], part)
        return ready

    def _fresh(self) -> WorkerProcess:
        """Return a worker that has not run any of the submission's code."""
        self.prestart(len(self._loaded) + 1)
        worker = self._starting.pop(0)
        worker.ready()
        worker.settled = worker.tasks()
        self.watch.add(worker)
        self.waits.add(worker)
        return worker

    def _load(self, worker: WorkerProcess, part: tuple[str, ...]) -> None:
        try:
            notes = self._asked(worker, "load", part or self.cells, "loaded", list)
        except (Overdue, WorkerDied, ProtocolError) as error:
            self.discard(worker)
            self._unloaded += 1
            raise self.lost("the notebook's code", error) from None
        if part:
            self._parts[worker] = part
        elif not self.concealed:
            self.notes = [shown(note)[:500] for note in notes[:20]]
        self.allowance.computed.add(worker)
        self._loaded.append(worker)
        worker.loaded = self._beyond(worker)
        if worker.loaded and not part and not self.concealed:
            self.notes.append(
                f"once loaded, the notebook's code holds {worker.loaded / 2**20:.0f} MiB more than it may: "
                "checks of memory count them"
            )

    def _beyond(self, worker: WorkerProcess) -> int:
        """Return the bytes that the submission holds in a worker beyond its allowance.

        They are 0 for kernels and meshes, because their compilers keep much memory, and no check measures it.
        """
        if self.arrays not in ("numpy", "torch") or not worker.beyond():
            return 0
        if self._imported is None:
            self._imported = self._imports()
        worker.imported = self._imported
        return worker.beyond()

    def _imports(self) -> Held:
        """Return the memory that the submission's imports need, measured in a worker that only imports."""
        worker = self._fresh()
        try:
            self._asked(worker, "import", self.cells, "imported", list)
            return worker.added()
        except (Overdue, WorkerDied, ProtocolError):
            return Held()
        finally:
            self.discard(worker)

    def texts(self) -> dict[str, str]:
        """Return the text of each function, by name, as read by a worker that never runs the code.

        Raises: Failure; SandboxError.
        """
        if self._texts is None:
            self._refuse_if_over()
            worker = self._fresh()
            try:
                self._texts = self._asked(worker, "read", self.cells, "sources", dict)
            except (Overdue, WorkerDied, ProtocolError) as error:
                raise self.lost("reading the notebook's code", error) from None
            finally:
                self.discard(worker)
        return self._texts

    def _asked(
        self, worker: WorkerProcess, kind: str, cells: Sequence[str], answer: str, form: type[Any]
    ) -> Any:
        """Return a worker's answer to a frame with cells. Raises: Overdue, WorkerDied, ProtocolError."""
        deadline = self._deadline(self.seconds, self.deadline)
        fields = {"call": 0, "functions": list(self.functions), "seconds": self.seconds / 4}
        worker.send(Frame(kind, fields, list(cells)), deadline)
        frame = worker.receive(deadline)
        if frame.kind != answer or not isinstance(frame.value, form):
            raise ProtocolError(f"a frame {answer!r}", f"a frame {frame.kind[:20]!r}")
        return frame.value

    def limit(self) -> Deadline:
        """Return the deadline of a call that begins now."""
        return self._deadline(self.call_seconds, self.deadline)

    def _deadline(self, seconds: float, within: Deadline | None = None) -> Deadline:
        return Deadline(seconds, self.waits.total, self.allowance.computed.total, within)

    @property
    def call_seconds(self) -> float:
        """The time limit of a call in seconds.

        It is shorter after calls that took too long, because the function may hang in every check.
        """
        return self.seconds / min(4, 2**self.overdue)

    def discard(self, worker: WorkerProcess) -> None:
        """End a worker that cannot be used again."""
        self.watch.remove(worker)
        self.allowance.computed.remove(worker)
        self.waits.remove(worker)
        self._parts.pop(worker, None)
        worker.kill()
        if worker in self._loaded:
            self._loaded.remove(worker)

    def discard_all(self) -> None:
        """End all workers that have loaded the code."""
        for worker in list(self._loaded):
            self.discard(worker)

    def lost(self, what: str, error: Exception) -> Failure:
        """Return the failure for a worker that had to be ended because of `error`."""
        self.losses += 1
        if isinstance(error, ProtocolError):
            reason = "in a hidden check" if self.concealed else f"needed {error.needed}, got {error.got}"
            self.condemned = (
                f"it interfered with the judge: {reason}; if nothing in it was meant to, report this"
            )
            return Condemned("This submission interfered with the judge; nothing in it counts.")
        if isinstance(error, Endless):
            return Crashed(f"{what} was ended: {error.got}. Is there a loop that never ends?")
        if isinstance(error, Overdue):
            seconds, self.overdue = self.call_seconds, self.overdue + 1
            return Crashed(f"{what} did not end within {seconds:g} s.")
        if self.watch.exceeded:
            return Crashed(f"{what} was ended: the submission's workers together {self.watch.exceeded}.")
        return Crashed(
            f"{what} ended its process, or used more than the {self.bounds.memory_bytes / 2**30:g} GiB "
            "of memory it may use."
        )

    def _refuse_if_over(self) -> None:
        if self.condemned:
            raise Condemned("This submission interfered with the judge; nothing in it counts.")
        if exceeded := self.watch.exceeded or self._exceeded.get(self._function):
            raise Crashed(f"Not run: in this function's checks the workers together {exceeded}.")
        if self._unloaded >= LOSSES:
            raise Crashed(
                f"Not run: {LOSSES} processes had to be ended while they loaded the notebook's code."
            )
        if self.losses >= LOSSES:
            raise Crashed(f"Not run: {LOSSES} processes had to be ended in this function's checks already.")
        if self.deadline.over:
            raise Crashed(f"Not run: this submission has used up its {self.total_seconds:g} s.")
        self.allowance.require()


class SandboxedSubject:
    """One stage's function in sandboxed workers, with the same interface as `InProcessSubject`."""

    effort = "seconds of processor time"

    def __init__(self, session: Session, function: str, part: tuple[str, ...] = ()) -> None:
        self.session, self.function, self._part = session, function, part

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.measure(*args, **kwargs).answer

    def texts(self, functions: Sequence[str]) -> dict[str, str]:
        return {name: text for name, text in self.session.texts().items() if name in functions}

    def alone(self, module: str, functions: Sequence[str]) -> SandboxedSubject:
        part = (f"from {module} import *", *self.texts(functions).values())
        return SandboxedSubject(self.session, self.function, part)

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        """Return the answer, and the peak growth of the worker's process during the call.

        The growth is the operating system's figure, in whole pages, without the arguments and without child
        processes.
        """
        return Measured(*self._called(args, kwargs))

    def record(self, *args: Any, **kwargs: Any) -> Recorded:
        """Return the answer, and the accesses that the worker reports for its kernels."""
        return Recorded(*self._called(args, kwargs, "record")[0])

    def examine(self, *args: Any, **kwargs: Any) -> Examined:
        """Return the outcome of the program on the worker's mesh, as the worker reports it."""
        return self._called(args, kwargs, "examine")[0]

    def _called(self, args: Any, kwargs: Any, how: str = "") -> tuple[Any, int]:
        (worker,) = self._ready(1)
        try:
            answer, peak = self._converse(worker, args, kwargs, how)
            self._settle([worker])
            return READ.get(how, lambda answer: answer)(answer), peak
        except (Overdue, WorkerDied, ProtocolError) as error:
            self.session.discard(worker)
            raise self.session.lost(f"`{self.function}`", error) from None

    def run_ring(
        self,
        world_size: int,
        *per_rank: Sequence[Any],
        faults: Faults | None = None,
        gradient: bool = False,
        **kwargs: Any,
    ) -> Any:
        return self._on_network(world_size, per_rank, faults, kwargs, gradient)[0]

    def efforts(self, world_size: int, *per_rank: Sequence[Any], **kwargs: Any) -> tuple[Any, list[float]]:
        """Return the Outcome of one run, and the CPU seconds of each rank's worker.

        The seconds are those that the operating system counts.
        """
        outcome, network = self._on_network(world_size, per_rank, None, kwargs)
        return outcome, [rank.computed for rank in network.ranks]

    def _on_network(
        self,
        world_size: int,
        per_rank: tuple[Sequence[Any], ...],
        faults: Faults | None,
        kwargs: dict[str, Any],
        gradient: bool = False,
    ) -> tuple[Any, Network]:
        from ringlab_course.judge.network import Network, RankRaised  # loads torch

        for argument in per_rank:
            if len(argument) != world_size:
                raise ValueError(f"{world_size} entries are needed, one per rank, not {len(argument)}")
        workers = self._ready(world_size)
        network = Network(workers, self._next_call(), self.session.limit(), faults)
        arguments = [tuple(argument[rank] for argument in per_rank) for rank in range(world_size)]
        try:
            outcome = network.run(self.function, arguments, kwargs, gradient)
            for rank, returned in enumerate(network.returned):
                if returned is not None:
                    self._expect_unchanged(returned, arguments[rank], kwargs)
            if gradient and not all(isinstance(each, tuple) and len(each) == 2 for each in outcome.results):
                raise ProtocolError("an answer and its gradient from each rank", "something else")
            if network.dead:
                self._recover(network, workers)
            self._settle([worker for worker in workers if worker in self.session._loaded])
            return outcome, network
        except RankRaised as error:
            failure = self._raised(error.report)
            failure.counterexample = f"rank {error.rank}: {failure.counterexample}".strip()
        except CommError as error:
            failure = as_failure(self.function, error)
        except (Overdue, WorkerDied, ProtocolError) as error:
            failure = self.session.lost(f"`{self.function}` on {world_size} ranks", error)
        self._recover(network, workers)
        raise failure

    def other(self, function: str) -> SandboxedSubject:
        return SandboxedSubject(self.session, function, self._part)

    def _settle(self, workers: Sequence[WorkerProcess]) -> None:
        """Record that the function is written. Raises: Crashed if one of its threads is still computing."""
        self.session.answered.add(self.function)
        if going := [worker for worker in workers if worker.goes_on()]:
            for worker in going:
                self.session.discard(worker)
            raise Crashed(
                f"`{self.function}` answers while one of its threads is still computing. "
                "Call thread.join() before you return."
            )

    def _raised(self, report: dict[str, Any]) -> Failure:
        failure = _raised(self.function, report, concealed=self.session.concealed)
        if isinstance(failure, NotWritten) and self.function in self.session.answered:  # but not this case
            return crashed(self.function, NotImplementedError.__name__, shown(report.get("text")))
        return failure

    def _recover(self, network: Network, workers: Sequence[WorkerProcess]) -> None:
        """End the call on the ranks that are still running it, or end their workers."""
        if not self.session.condemned:
            network.abort()
        for rank, worker in enumerate(workers):
            if self.session.condemned or not network.idle(rank):
                self.session.discard(worker)

    def _ready(self, count: int) -> list[WorkerProcess]:
        workers, notes = self.session.workers(count, self._part), self.session.notes
        if not self._part and f"no code cell defines the function {self.function}" in notes:
            raise NotWritten(f"there is no function `{self.function}` in the notebook.", "\n".join(notes))
        return workers

    def _next_call(self) -> int:
        self.session.calls += 1
        return self.session.calls

    def _converse(self, worker: WorkerProcess, args: Any, kwargs: Any, how: str) -> tuple[Any, int]:
        call, deadline = self._next_call(), self.session.limit()

        def say(kind: str, value: Any = None, **fields: Any) -> int:
            return worker.send(Frame(kind, {"call": call, **fields}, value), deadline)

        def hear(kind: str) -> Frame:
            frame = worker.receive(deadline)
            if frame.fields.get("call") != call or frame.kind not in (kind, "error") or worker.frames:
                raise ProtocolError("one answer to the call under way", f"a frame {frame.kind[:20]!r}")
            if frame.kind == "error":
                raise self._raised(frame.fields)
            return frame

        say("call", function=self.function, **({how: True} if how else {}))
        hear("listening")
        growth = Growth(worker)
        given = say("arguments", (args, kwargs))
        hear("ready")
        growth.begin(given)
        say("go")
        hear("done")
        peak = growth.bytes()
        say("deliver")
        result = hear("result")
        # measured again, because a worker may send `done` too early
        peak = max(peak, growth.with_answer(result.nbytes))
        say("return")
        self._expect_unchanged(hear("returned"), args, kwargs)
        return result.value, peak

    def _expect_unchanged(self, returned: Frame, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise Failure if the arguments that a worker returns are not those that it was given.

        The argument names come from the worker, and only their form is verified. Kernels are exempt, because
        they may write into their arguments.
        """
        if self.session.kernels:
            return
        _, given = arrays_by_argument(None, args, kwargs)
        names, found = returned.fields.get("names"), returned.value
        if not (isinstance(names, list) and len(names) == len(given)):
            names = [""] * len(given)
        found = found if isinstance(found, list) and len(found) == len(given) else [None] * len(given)
        for name, before, after in zip(names, given, found, strict=True):
            if name not in self.session.functions[self.function] and not _same(before, after):
                raise changed(self.function, "" if self.session.concealed or not _is_name(name) else name)


def _raised(function: str, report: dict[str, Any], *, concealed: bool) -> Failure:
    """Return the failure for an exception in the learner's code, as the worker reports it.

    Text that comes from the learner's code goes into the counterexample, or into the message if no hidden
    probe was seen yet. Such text may quote a hidden probe, and counterexamples of hidden checks are not
    shown.
    """
    name, text = (shown(report.get(key)) for key in ("type", "text"))
    kind = _exception_class(name)
    if name == "ProtocolError":
        return failures.not_an_answer(function, text)
    if kind is None:
        return Crashed(f"`{function}` raised an exception of its own.", text)
    if issubclass(kind, NotImplementedError):
        return NotWritten(f"`{function}` is not written yet.")
    if issubclass(kind, OffLimitsError):
        return failures.left_to_others(function, "" if concealed else text)
    if issubclass(kind, CommError):
        return Crashed(f"`{function}`: the ranks cannot finish ({name}).", text)
    return crashed(function, name, text)


def _same(before: Sequence[Any], after: Any) -> bool:
    if not isinstance(after, list) or not all(hasattr(each, "dtype") for each in after):
        return False
    return prints(before) == prints(after)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier()


def shown(text: Any) -> str:
    """Return a worker's text in a form for terminals, without control characters and with limited length."""
    if not isinstance(text, str):
        return ""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text[:5000])


def _exception_class(name: str) -> type[BaseException] | None:
    """Return the exception class of this name, if it is Python's or ringlab's.

    Other names are never repeated, because they may contain a probe.
    """
    found = getattr(builtins, name, None) or getattr(ringlab.errors, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
