"""A record of the loads and stores of each program of a kernel, made while the interpreter runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ringlab.blocks.triton.interpreter import repair
from ringlab.errors import BackendError

_MARK = "_ringlab_records"
_ARGUMENT = "ringlab argument"  # the key under which a pointer stores the kernel argument that it points into
# The interpreter's functions that derive one pointer from another, under their names in all known versions of
# Triton.
_POINTER_STEPS = (
    "addptr",
    "splat",
    "unsplat",
    "broadcast",
    "expand_dims",
    "reshape",
    "trans",
    "bitcast",
    "select",
)


@dataclass(frozen=True, eq=False)
class Access:
    """One load or store of one program.

    offsets: distance in elements from the argument's first element, in block order; masked elements are left
    out. shape: the shape of the block; (1,) for a single number. masked: how many elements are masked. An
    atomic operation is recorded as a load and a store.
    """

    program: tuple[int, int, int]
    kind: Literal["load", "store"]
    argument: str
    offsets: NDArray[np.int64]
    shape: tuple[int, ...]
    masked: int


@dataclass
class _Argument:
    """A tensor argument of a launch: its name, its first element's address, and the bounds of its memory."""

    name: str
    first: int
    begin: int
    end: int


@dataclass
class _Recording:
    accesses: list[Access] = field(default_factory=list)
    arguments: dict[int, _Argument] = field(default_factory=dict)  # the key is id() of the tensor on the host

    def expect(self, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Register the tensor arguments of the launch that is about to start."""
        self.arguments.clear()
        for name, arg in [*zip(names, args, strict=False), *kwargs.items()]:
            tensor = getattr(arg, "base", arg)  # a tensor descriptor keeps its tensor in `base`
            if hasattr(tensor, "untyped_storage"):
                memory = tensor.untyped_storage()
                begin = memory.data_ptr()
                self.arguments[id(tensor)] = _Argument(
                    name, tensor.data_ptr(), begin, begin + memory.nbytes()
                )

    def note(self, program: tuple[int, int, int], kind: Any, pointers: Any, mask: Any) -> None:
        """Record one access.

        Raises: BackendError if the access is outside the argument's memory, before anything is read or
        written.
        """
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        wanted = np.broadcast_to(getattr(mask, "data", mask), pointers.data.shape)
        addresses = pointers.data[wanted].astype(np.int64)
        found = pointers.attr.get(_ARGUMENT, _Argument("", 0, 0, np.iinfo(np.int64).max))
        outside = (addresses < found.begin) | (addresses + width > found.end)
        offsets = (addresses - found.first) // width
        if outside.any():
            raise BackendError(
                f"a {kind} within the memory of '{found.name}'",
                f"program {program} at element {offsets[outside][0]} of it",
                "mask it: offsets past the end, and before the beginning, must be False in mask=",
            )
        shape = tuple(pointers.data.shape)
        access = Access(program, kind, found.name, offsets, shape, pointers.data.size - offsets.size)
        self.accesses.append(access)


_recording: ContextVar[_Recording | None] = ContextVar("recording", default=None)


@contextmanager
def record_accesses() -> Iterator[list[Access]]:
    """Return a context whose value lists the loads and stores of every kernel launched inside, in order.

    Only launches from the calling thread are recorded. A load or store outside its argument's memory raises
    BackendError. Without this check the interpreter would read or write memory outside the argument.
    Raises: BackendError if kernels do not run in the interpreter.
    """
    if not repair():
        raise BackendError(
            "Triton's interpreter, which can record every access",
            "kernels are compiled, or Triton is not installed",
            "set TRITON_INTERPRET=1 before Python starts",
        )
    import triton.runtime.interpreter as interpreter

    if not hasattr(interpreter, _MARK):
        _listen(interpreter)
        setattr(interpreter, _MARK, True)
    recording = _Recording()
    token = _recording.set(recording)
    try:
        yield recording.accesses
    finally:
        _recording.reset(token)


def _listen(interpreter: ModuleType) -> None:
    """Make the interpreter report every access to the current thread's recording, if there is one."""
    builder = interpreter.InterpreterBuilder
    _before(interpreter.GridExecutor, "__call__", _on_launch)
    _after(interpreter, "_implicit_cvt", _on_argument)
    for step in _POINTER_STEPS:
        _after(builder, f"create_{step}", _on_pointer)
    _after(interpreter.TensorDescHandle, "materialize_pointers", _on_descriptor)
    _before(builder, "create_masked_load", _on_load)
    _before(builder, "create_masked_store", _on_store)
    _before(builder, "create_atomic_rmw", _on_update)
    _before(builder, "create_atomic_cas", _on_compare_and_swap)


def _before(owner: Any, name: str, hook: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if recording := _recording.get():
            hook(recording, *args)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def _after(owner: Any, name: str, hook: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if recording := _recording.get():
            hook(recording, result, *args)
        return result

    setattr(owner, name, call)


def _on_launch(recording: _Recording, executor: Any, *_: Any) -> None:
    def hook(*args: Any, **kwargs: Any) -> None:
        recording.expect(executor.arg_names, args, kwargs)

    executor.pre_run_hooks = [*executor.pre_run_hooks, hook]


def _on_argument(recording: _Recording, converted: Any, given: Any) -> None:
    if id(given) in recording.arguments:
        converted.handle.attr[_ARGUMENT] = recording.arguments[id(given)]


def _on_pointer(recording: _Recording, made: Any, builder: Any, *sources: Any) -> None:
    for source in sources:
        if known := getattr(source, "attr", {}).get(_ARGUMENT):
            made.attr.setdefault(_ARGUMENT, known)


def _on_descriptor(recording: _Recording, made: Any, descriptor: Any, *_: Any) -> None:
    if known := descriptor.base.attr.get(_ARGUMENT):
        made[0].attr[_ARGUMENT] = known


def _on_load(recording: _Recording, builder: Any, pointers: Any, mask: Any, *_: Any) -> None:
    recording.note(builder.grid_idx, "load", pointers, mask)


def _on_store(recording: _Recording, builder: Any, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
    recording.note(builder.grid_idx, "store", pointers, mask)


def _on_update(
    recording: _Recording, builder: Any, kind: Any, pointers: Any, value: Any, mask: Any, *_: Any
) -> None:
    recording.note(builder.grid_idx, "load", pointers, mask)
    recording.note(builder.grid_idx, "store", pointers, mask)


def _on_compare_and_swap(recording: _Recording, builder: Any, pointers: Any, *_: Any) -> None:
    everything = np.ones(pointers.data.shape, dtype=bool)
    recording.note(builder.grid_idx, "load", pointers, everything)
    recording.note(builder.grid_idx, "store", pointers, everything)
