"""Runs the learner's function in this process, for the notebook's `check()` and for tests."""

from __future__ import annotations

import contextlib
import copy
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringlab_course.checking.contract import Stage
from ringlab_course.checking.failures import Failure, NotWritten, as_failure, not_an_answer
from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.guard import (
    Guard,
    expect_unchanged,
    fingerprints,
    text_of,
    with_gradient,
)
from ringlab_course.checking.protocol import ProtocolError, carried
from ringlab_course.checking.subject import Measured, Recorded

if TYPE_CHECKING:
    from ringlab_course.checking.faults import Faults
    from ringlab_course.mesh.examine import Examined


class InProcessSubject:
    """The learner's function in this process, for the notebook's `check()` and for tests.

    Arguments are copied, so that a function that writes into them cannot alter the check's own arrays. The
    write is detected.

    limits: the code that the function may not call; without limits it may call everything. memory: whether the bytes
    of each rank's tensors are counted in a ring.
    """

    effort = "FLOPs of products, or elements written where there are none"

    def __init__(
        self,
        stage: Stage,
        namespace: Mapping[str, Any],
        limits: OffLimits | None = None,
        *,
        memory: bool = True,
    ) -> None:
        self.function, self._own = stage.function, find_function(stage, namespace)
        self._function = Guard(limits).around(self._own) if limits else self._own
        self._kernels = stage.kind == "kernel"
        self._stage, self._namespace, self._limits = stage, namespace, limits
        self._memory = memory

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self._kernels:  # recording turns an access outside of its tensor from a crash into an error
            return self.record(*args, **kwargs).answer
        return self._called(args, kwargs, contextlib.nullcontext())[0]

    def _called(
        self, args: Any, kwargs: Any, watch: contextlib.AbstractContextManager[Any]
    ) -> tuple[Any, Any]:
        """Return the answer to copies of the arguments, and the value of the context `watch`.

        Nothing but the call runs inside `watch`.
        """
        given, named = copied(args), copied(kwargs)
        with self._arguments_kept(given, named), watch as watched:
            answer = _guarded(self.function, self._function, *given, **named)
        return _as_sent(self.function, answer), watched

    @contextlib.contextmanager
    def _arguments_kept(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Raise Failure if these arguments change inside the context and the function launches no kernels."""
        if self._stage.kind == "kernel":  # a kernel writes its result into its arguments
            yield
            return
        before = fingerprints(self._own, args, kwargs)
        yield
        after = fingerprints(self._own, args, kwargs)
        expect_unchanged(self.function, before, after, self._stage.may_change)

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        answer, peak = self._called(args, kwargs, _Peak())
        return Measured(answer, peak.bytes)

    def record(self, *args: Any, **kwargs: Any) -> Recorded:
        from ringlab.blocks.triton.interpreter import interpreting
        from ringlab_course.checking.accesses import record_accesses

        if not interpreting():
            raise Failure(
                "This check runs kernels in Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported, at the "
                "top of the notebook, and restart the kernel."
            )
        answer, accesses = self._called(args, kwargs, record_accesses())
        return Recorded(answer, tuple(accesses))

    def examine(self, *args: Any, **kwargs: Any) -> Examined:
        from ringlab_course.mesh import examine as mesh

        return _guarded(self.function, mesh.examine, self._function, *copied(args), **copied(kwargs))

    def run_ring(
        self,
        world_size: int,
        *per_rank: Sequence[Any],
        faults: Faults | None = None,
        gradient: bool = False,
        **kwargs: Any,
    ) -> Any:
        program = with_gradient(self._function) if gradient else self._function
        return self._on_virtual_ranks(program, world_size, per_rank, faults, kwargs)

    def efforts(self, world_size: int, *per_rank: Sequence[Any], **kwargs: Any) -> tuple[Any, list[float]]:
        """Return the Outcome of one run and the FLOPs of the matrix products that each rank computes in it.

        If no rank computes a matrix product, return the number of elements that torch's operators write on
        each rank instead, because a product that is written by hand writes one element for each result.
        """
        from ringlab.comm.ring import Ring
        from ringlab.conformance.run.meters import Metered, PassMeter
        from ringlab_course.checking.virtual_ranks import Elements

        flops, elements = [0.0] * world_size, [0.0] * world_size

        def counted(ring: Ring, *own: Any, **shared: Any) -> Any:
            metered, written = Metered(ring.comm), Elements()
            metered.meter = PassMeter(ring.rank, world_size, lambda: None, strict=False)
            with metered.meter.watch(), written:
                result = self._function(Ring(metered), *own, **shared)
            flops[ring.rank], elements[ring.rank] = metered.meter.flops, written.count
            return result

        outcome = self._on_virtual_ranks(counted, world_size, per_rank, None, kwargs)
        return outcome, flops if any(flops) else elements

    def _on_virtual_ranks(
        self,
        function: Callable[..., Any],
        world_size: int,
        per_rank: tuple[Sequence[Any], ...],
        faults: Faults | None,
        kwargs: dict[str, Any],
    ) -> Any:
        from ringlab_course.checking.faults import Ended
        from ringlab_course.checking.virtual_ranks import run_virtual

        for argument in per_rank:
            if len(argument) != world_size:
                raise ValueError(f"{world_size} entries are needed, one per rank, not {len(argument)}")
        if faults:
            faults.require(world_size)
        shards, shared = copied(list(per_rank)), copied(kwargs)

        def program(ring: Any) -> Any:
            return function(ring, *(argument[ring.rank] for argument in shards), **copied(shared))

        with self._arguments_kept((None, *shards), {}):
            outcome = _guarded(self.function, run_virtual, world_size, program, faults, memory=self._memory)
        ends = [end if isinstance(end, Ended) else _as_sent(self.function, end) for end in outcome.results]
        return replace(outcome, results=ends)

    def texts(self, functions: Sequence[str]) -> dict[str, str]:
        found = {name: self._namespace.get(name) for name in functions}
        texts = {name: text_of(function, name) for name, function in found.items() if callable(function)}
        return {name: text for name, text in texts.items() if text}

    def alone(self, module: str, functions: Sequence[str]) -> InProcessSubject:
        space: dict[str, Any] = {"__name__": "__main__"}
        for text in (f"from {module} import *", *self.texts(functions).values()):
            exec(compile(text, "<the function alone>", "exec"), space)
        return InProcessSubject(self._stage, space, self._limits)

    def other(self, function: str) -> InProcessSubject:
        return InProcessSubject(replace(self._stage, function=function), self._namespace, self._limits)


def find_function(stage: Stage, namespace: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the stage's function from a notebook's namespace. Raises: NotWritten if it is not there."""
    function = namespace.get(stage.function)
    if function is None:
        raise NotWritten(f"there is no function `{stage.function}` here yet: run the cell that defines it.")
    if not callable(function):
        raise Failure(f"`{stage.function}` is a {type(function).__name__}, not a function.")
    return function


def copied(value: Any) -> Any:
    """Return `value` with every array in it copied; other objects are not copied."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(copied, value))
    if hasattr(value, "clone") and hasattr(value, "detach"):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.deepcopy(value) if hasattr(value, "dtype") else value


def _guarded(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the learner's code. An exception that it raises becomes NotWritten or Crashed."""
    try:
        return function(*args, **kwargs)
    except Failure:
        raise
    except Exception as error:
        raise as_failure(name, error) from None


def _as_sent(name: str, answer: Any) -> Any:
    """Return an answer as it would reach the judge, so that notebook and judge accept the same answers.

    Raises: Failure if the answer cannot be sent.
    """
    try:
        return carried(answer)
    except ProtocolError as error:
        raise not_an_answer(name, f"the answer holds {error.got}") from None


class _Peak:
    """Counts the bytes that NumPy and torch hold at once while the block runs."""

    def __enter__(self) -> _Peak:
        # The meter is opened before tracemalloc starts, because its first use imports many modules.
        self._torch, self._watch = _torch_meter()
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
    """Return a meter of torch's allocations and its open context; (None, nullcontext()) without torch."""
    if "torch" not in sys.modules:
        return None, contextlib.nullcontext()
    import torch

    from ringlab.comm.memory import MemoryMeter

    warm, meter = MemoryMeter(), MemoryMeter()
    with warm.watch():
        torch.zeros(1)  # this first operation imports modules, whose memory must not count for the learner
    watch = meter.watch()
    watch.__enter__()
    return meter, watch
