"""The learner's code as a check sees it: something that can be called, wherever it runs."""

from __future__ import annotations

import contextlib
import copy
import linecache
import re
import sys
import sysconfig
import traceback
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ringlab.course.contract import Crashed, Failure, NotWritten, Stage
from ringlab.errors import CommError, DeadlockError, RankFailedError

if TYPE_CHECKING:
    from ringlab.blocks.triton.accesses import Access
    from ringlab.course.faults import Faults
    from ringlab.course.mesh.examine import Examined


@dataclass(frozen=True)
class Measured:
    """A call's answer and the most bytes it held at once beyond its arguments."""

    answer: Any
    peak_bytes: int


@dataclass(frozen=True)
class Recorded:
    """A call's answer and the `Access`es of its Triton kernels, in the order in which they happened.

    Whoever runs the kernels wrote them down. For a sandboxed submission that is its own worker: what a
    check proves by values is certain, what it counts here is only as honest as the submission.
    """

    answer: Any
    accesses: tuple[Access, ...]


class Subject(Protocol):
    """One stage's function, callable by checks.

    Arguments and answers are arrays (NumPy or torch), numbers, strings, booleans, None, and tuples,
    lists and dicts of these: nothing else crosses to a sandboxed worker.
    effort: what `efforts` counts.
    """

    function: str
    effort: str

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the learner's function answers. Raises: NotWritten, Crashed."""

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        """Return the answer with the peak of memory the call held. Raises: NotWritten, Crashed."""

    def record(self, *args: Any, **kwargs: Any) -> Recorded:
        """Return the answer with what the call's Triton kernels read and wrote. Raises: NotWritten, Crashed."""

    def examine(self, *args: Any, **kwargs: Any) -> Examined:
        """Return what came of a JAX program on a mesh; arguments as for `ringlab.course.mesh.examine`, the program left out.

        Raises: NotWritten, Crashed; Failure where JAX cannot run here.
        """

    def run_ring(
        self, world_size: int, *per_rank: Sequence[Any], faults: Faults | None = None, **kwargs: Any
    ) -> Any:
        """Return the Outcome (results, trace, memory) of the learner's program on every rank.

        Each of `per_rank` holds `world_size` entries, one for each rank; `kwargs` go to all ranks.
        `faults` says what the network is like. Once a rank was killed nothing is raised for the ranks
        that break off: the result of each that did is an `Ended`, and there is no trace and no memory.
        Raises: NotWritten, Crashed (a deadlock or a mismatched message too).
        """

    def efforts(self, world_size: int, *per_rank: Sequence[Any], **kwargs: Any) -> list[float]:
        """Return how much each rank computes in one run, for comparing ranks with each other; arguments as in `run_ring`."""

    def other(self, function: str) -> Subject:
        """Return the subject for another function of the same submission, one of the stage's helpers."""


class InProcessSubject:
    """The learner's function in this process: for the notebook's `check()` and for tests.

    Arguments are copied, so that a function that writes into them cannot alter the check's own.
    """

    effort = "FLOPs of products, or elements written where there are none"

    def __init__(self, stage: Stage, namespace: Mapping[str, Any]) -> None:
        self.function, self._function = stage.function, find_function(stage, namespace)
        self._kernels = stage.kind == "kernel"
        self._stage, self._namespace = stage, namespace

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self._kernels:  # recorded, so that an access outside of a tensor is an error and not a crash
            return self.record(*args, **kwargs).answer
        return _guarded(self.function, self._function, *copied(args), **copied(kwargs))

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        args, kwargs = copied(args), copied(kwargs)
        with _Peak() as peak:
            answer = _guarded(self.function, self._function, *args, **kwargs)
        return Measured(answer, peak.bytes)

    def record(self, *args: Any, **kwargs: Any) -> Recorded:
        from ringlab.blocks.triton.accesses import record_accesses
        from ringlab.blocks.triton.interpreter import interpreting

        if not interpreting():
            raise Failure(
                "This check runs kernels in Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported, at the "
                "top of the notebook, and restart the kernel."
            )
        args, kwargs = copied(args), copied(kwargs)
        with record_accesses() as accesses:
            answer = _guarded(self.function, self._function, *args, **kwargs)
        return Recorded(answer, tuple(accesses))

    def examine(self, *args: Any, **kwargs: Any) -> Examined:
        from ringlab.course.mesh import examine as mesh

        return _guarded(self.function, mesh.examine, self._function, *copied(args), **copied(kwargs))

    def run_ring(
        self, world_size: int, *per_rank: Sequence[Any], faults: Faults | None = None, **kwargs: Any
    ) -> Any:
        return self._on_virtual_ranks(self._function, world_size, per_rank, faults, kwargs)

    def efforts(self, world_size: int, *per_rank: Sequence[Any], **kwargs: Any) -> list[float]:
        """Return the FLOPs of the products of matrices that each rank makes in one run.

        Where no rank makes any, the elements that torch's operators write: a product by hand is an element each.
        """
        from ringlab.comm.ring import Ring
        from ringlab.conformance.meters import Metered, PassMeter
        from ringlab.course.in_process import Elements

        flops, elements = [0.0] * world_size, [0.0] * world_size

        def counted(ring: Ring, *own: Any, **shared: Any) -> Any:
            metered, written = Metered(ring.comm), Elements()
            metered.meter = PassMeter(ring.rank, world_size, lambda: None, strict=False)
            with metered.meter.watch(), written:
                result = self._function(Ring(metered), *own, **shared)
            flops[ring.rank], elements[ring.rank] = metered.meter.flops, written.count
            return result

        self._on_virtual_ranks(counted, world_size, per_rank, None, kwargs)
        return flops if any(flops) else elements

    def _on_virtual_ranks(
        self,
        function: Callable[..., Any],
        world_size: int,
        per_rank: tuple[Sequence[Any], ...],
        faults: Faults | None,
        kwargs: dict[str, Any],
    ) -> Any:
        from ringlab.course.in_process import run_virtual

        for argument in per_rank:
            if len(argument) != world_size:
                raise ValueError(f"{world_size} entries, one per rank, not {len(argument)}")
        if faults:
            faults.require(world_size)
        shards, shared = copied(list(per_rank)), copied(kwargs)

        def program(ring: Any) -> Any:
            return function(ring, *(argument[ring.rank] for argument in shards), **copied(shared))

        return _guarded(self.function, run_virtual, world_size, program, faults)

    def other(self, function: str) -> InProcessSubject:
        return InProcessSubject(replace(self._stage, function=function), self._namespace)


def find_function(stage: Stage, namespace: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the stage's function out of a notebook's namespace. Raises: NotWritten if it is not there."""
    function = namespace.get(stage.function)
    if function is None:
        raise NotWritten(f"there is no function `{stage.function}` here yet: run the cell that defines it.")
    if not callable(function):
        raise Failure(f"`{stage.function}` is a {type(function).__name__}, not a function.")
    return function


def copied(value: Any) -> Any:
    """Return `value` with every array in it copied; other objects as they are."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(copied, value))
    if hasattr(value, "clone") and hasattr(value, "detach"):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.deepcopy(value) if hasattr(value, "dtype") else value


def own_lines(error: BaseException, limit: int = 3) -> str:
    """Return the last `limit` lines of the learner's own code on the way to `error`, and the error.

    Lines of ringlab, of the standard library and of installed packages are left out.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_own(f.filename)]
    lines = []
    for frame in frames[-limit:]:
        source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        lines.append(f"in {frame.name}, line {frame.lineno}: {source}")
    text = str(error) or "no message"
    return "\n".join([*lines, f"{type(error).__name__}: {text}"])


def _guarded(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the learner's code; whatever it raises becomes NotWritten or Crashed."""
    try:
        return function(*args, **kwargs)
    except Failure:
        raise
    except Exception as error:
        raise as_failure(name, error) from None


def cause_of(error: BaseException) -> BaseException:
    """Return what the learner's code raised, without what a virtual rank or Triton's interpreter put around it.

    A NotImplementedError of the interpreter itself stays wrapped: it speaks of Triton, not of the exercise.
    """
    while (inside := error.__cause__) is not None:
        wrapped = type(error).__name__ == "InterpreterError"
        if wrapped and isinstance(inside, NotImplementedError):
            raised = traceback.extract_tb(inside.__traceback__)
            wrapped = not raised or _is_own(raised[-1].filename)
        if not wrapped and not isinstance(error, RankFailedError):
            break
        error = inside
    return error


def as_failure(name: str, error: BaseException) -> Failure:
    """Return the Failure that tells the learner about an exception of their function `name`."""
    cause = cause_of(error)
    if isinstance(cause, NotImplementedError):
        return NotWritten(
            f"`{name}` is not written yet: {cause}" if str(cause) else f"`{name}` is not written yet."
        )
    if isinstance(cause, CommError):
        return stuck(name, cause)
    return crashed(name, type(cause).__name__, own_lines(cause))


def stuck(function: str, error: CommError) -> Crashed:
    """Return the Failure for an error of communication; a deadlock is told in words, rank by rank."""
    told = f"`{function}`: the ranks cannot finish ({type(error).__name__})."
    drawn = (error.got.splitlines() or [""])[
        -1
    ]  # no other line: tags are the learner's, and may say anything
    if isinstance(error, DeadlockError) and (found := _CYCLE.fullmatch(drawn.strip())):
        ranks = found[1].split(" → ")
        waits = [f"waits for rank {rank}" for rank in ranks[1:]]
        told += f" They wait for each other in a circle: rank {ranks[0]} {', which '.join(waits)}."
    elif isinstance(error, DeadlockError):
        told += " Somebody waits for a rank that has ended already."
    return Crashed(told, str(error))


def crashed(function: str, error: str, text: str) -> Crashed:
    """Return the Failure for an exception called `error`; `text` is what its message says."""
    if error == "BackendError" and "within the memory of" in text:
        return Crashed(
            f"`{function}`: a kernel reaches outside of a tensor's memory. On a GPU that is a fault, or somebody else's "
            "data. Is a mask missing, or a row's beginning wrong?",
            text,
        )
    return Crashed(f"`{function}` raised {error}.", text)


_CYCLE = re.compile(r"cycle: (\d{1,4}(?: → \d{1,4})+)")
_INSTALLED = [sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")]
_NOT_OWN = tuple(f"{Path(place).resolve()}/" for place in (*_INSTALLED, str(Path(__file__).parents[1])))


def _is_own(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return False
    return not str(Path(filename).resolve() if Path(filename).exists() else filename).startswith(_NOT_OWN)


class _Peak:
    """Counts the bytes that NumPy and torch hold at once while the block runs."""

    def __enter__(self) -> _Peak:
        self._torch, self._watch = _torch_meter()  # before tracemalloc: its first use imports much
        self._already = tracemalloc.is_tracing()
        if not self._already:
            tracemalloc.start()
        tracemalloc.reset_peak()
        self._base = tracemalloc.get_traced_memory()[0]
        return self

    def __exit__(self, *_: Any) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        if not self._already:
            tracemalloc.stop()
        self._watch.__exit__(None, None, None)
        self.bytes = max(0, peak - self._base) + (self._torch.report().peak_bytes if self._torch else 0)


def _torch_meter() -> tuple[Any, Any]:
    """Return a meter of torch's allocations and its open context; nothing where torch is not loaded."""
    if "torch" not in sys.modules:
        return None, contextlib.nullcontext()
    import torch

    from ringlab.comm.memory import MemoryMeter

    warm, meter = MemoryMeter(), MemoryMeter()
    with warm.watch():
        torch.zeros(1)  # the first operation under a mode imports modules; not the learner's memory
    watch = meter.watch()
    watch.__enter__()
    return meter, watch
