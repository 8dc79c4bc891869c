"""Watch a learner's function while it runs, for calls of code that is off limits and for changed arguments.

`with_gradient` also checks whether gradients flow through the function's answer.

The judge enforces the same rules (`OffLimits`, `Stage.may_change`): its workers cannot reach code that is off
limits.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import inspect
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import numpy as np

from ringlab.layout import Layout
from ringlab_course.checking.failures import Failure, is_ours, is_own
from ringlab_course.checking.forbidden import OffLimits, refuse

Prints = dict[str, tuple[object, ...]]
"""Fingerprints of arguments by name."""
_HOOKS = ("__torch_dispatch__", "__torch_function__")
"""Methods of meters that PyTorch calls on its own."""
_IMPORTING = "<frozen importlib"
"""The prefix of the file names that frames of Python's import machinery have."""
_BY_OPERATOR = ("decompose", "redispatch")
"""The methods of PyTorch's operators that run one of the operator's kernels."""


class _NoCollection:
    """Keeps the garbage collector off, because its calls would look like calls by the learner's function."""

    def __init__(self) -> None:
        self._lock, self._inside, self._enabled = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._enabled:
                gc.enable()


_no_collection = _NoCollection()


class Guard:
    """Raises OffLimitsError in the learner's function if it calls code that is off limits, by any name."""

    def __init__(self, limits: OffLimits) -> None:
        self._limits = limits
        # The keys are ids, because hashing a code object takes longer than running many functions, and a
        # class may be unhashable. The values refer to the objects, which therefore stay alive, so no id is
        # used twice.
        self._codes: dict[int, tuple[CodeType, str]] = {}
        self._builtins: dict[tuple[str | int, str], tuple[object, str]] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Return a context that watches the calls of this thread."""
        before = sys.getprofile()
        with _no_collection:
            sys.setprofile(self._on_call)
            try:
                yield
            finally:
                sys.setprofile(before)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its calls watched, in whichever thread it runs."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.watch():
                return function(*args, **kwargs)

        return watched

    def _on_call(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            known = self._codes.get(id(frame.f_code))
            used, caller = known[1] if known else self._of_code(frame), frame.f_back
        elif event == "c_call":
            home = _home(called)
            key = home if isinstance(home, str) else id(home), called.__name__
            if key not in self._builtins:
                self._builtins[key] = home, self._of_builtin(home, called.__name__)
            used, caller = self._builtins[key][1], frame
        else:
            return
        if used and _is_asked_by_own(caller):
            refuse(used)

    def _of_code(self, frame: FrameType) -> str:
        """Return the dotted name of a Python function if it is off limits, else ""."""
        code = frame.f_code
        if code.co_name in _BY_OPERATOR and frame.f_globals.get("__name__") == "torch._ops":
            operator = getattr(frame.f_locals.get("self"), "__name__", "").partition(".")[0]
            return f"torch.{operator}" if self._limits.refuses("torch", operator) else ""
        module, name = str(frame.f_globals.get("__name__", "")), code.co_qualname
        if code.co_name == "__init__":  # the __init__ of a dataclass does not carry the name of its class
            name = type(frame.f_locals.get(code.co_varnames[0])).__qualname__
        refused = any(self._limits.refuses(module, part) for part in (name, *name.split(".")))
        refused = refused and code.co_name not in _HOOKS
        used = f"{module}.{name}" if refused else ""
        self._codes[id(code)] = code, used
        return used

    def _of_builtin(self, home: object, name: str) -> str:
        """Return the dotted name of a compiled function if it is off limits, else ""."""
        module = home if isinstance(home, str) else str(getattr(home, "__module__", ""))
        return f"{module}.{name}" if self._limits.refuses(module, name) else ""


def _home(called: Any) -> object:
    """Return the name of a compiled function's module or, for a method, its type."""
    if called.__module__ is not None:
        return called.__module__
    owner = called.__self__
    return owner if isinstance(owner, type) else type(owner)


def _is_asked_by_own(frame: FrameType | None) -> bool:
    """Return whether the nearest caller outside of libraries is the learner's own code and not ringlab's.

    Calls that a module makes while it is being imported are the module's own. If one of them were refused, the module would
    stay half imported in the learner's session.
    """
    while frame is not None:
        if is_ours(frame) or frame.f_code.co_filename.startswith(_IMPORTING):
            return False
        if is_own(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def with_gradient(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ring program that returns the answer and its gradient with respect to the first argument after the ring.

    The gradient is None if none flows, or if the answer is not a single number.
    """

    def differentiated(ring: Any, first: Any, *others: Any, **shared: Any) -> tuple[Any, Any]:
        answer = program(ring, first, *others, **shared)
        if not getattr(answer, "requires_grad", False) or answer.numel() != 1:
            return answer, None
        import torch

        (gradient,) = torch.autograd.grad(answer, [first], torch.ones_like(answer), allow_unused=True)
        return answer.detach(), gradient

    return differentiated


def expect_unchanged(name: str, before: Prints, after: Prints, may_change: Sequence[str] = ()) -> None:
    """Return None if a call of the function `name` left its arguments as they were.

    before, after: the `fingerprints` of its arguments. may_change: the names of the arguments that it may
    change.
    Raises: Failure, which names the argument.
    """
    if (argument := changed_argument(before, after, may_change)) is not None:
        raise changed(name, argument)


def changed(function: str, argument: str) -> Failure:
    """Return the Failure for a function that changed an argument; the name of the argument may be empty."""
    which = f"its argument {argument}" if argument else "an argument"
    return Failure(
        f"`{function}` changed {which} in place. Its caller goes on with the changed array: make a new one, "
        "as x = x + y does and x += y does not."
    )


def changed_argument(before: Prints, after: Prints, may_change: Sequence[str] = ()) -> str | None:
    """Return the name of the first argument that differs before and after a call, or None if none differs."""
    return next((name for name in before if name not in may_change and before[name] != after[name]), None)


def fingerprints(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prints:
    """Return a fingerprint of the arrays in each argument, by the argument's name in `function`."""
    names, arrays = arrays_by_argument(function, args, kwargs)
    return {name: prints(each) for name, each in zip(names, arrays, strict=True)}


def arrays_by_argument(
    function: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[str], list[list[Any]]]:
    """Return the names of the arguments in `function`, and the arrays in each argument, in a fixed order."""
    counted = [f"number {number + 1}" for number in range(len(args))]
    names = [*_parameters(function), *counted][: len(args)] if function is not None else counted
    return [*names, *kwargs], [list(_arrays(value)) for value in (*args, *kwargs.values())]


def text_of(function: Callable[..., Any], name: str) -> str:
    """Return a function's source renamed to `name`, without comments and layout; "" if it has no source."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return ""
    if not isinstance(node, ast.FunctionDef):
        return ""
    node.name = name
    return ast.unparse(node)


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _arrays(value: Any) -> Iterator[Any]:
    if dataclasses.is_dataclass(value) and not isinstance(
        value, (type, Layout)
    ):  # a dataclass is sent to a worker as a tuple
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)
    elif hasattr(value, "detach") or hasattr(value, "dtype"):
        yield value


def prints(arrays: Sequence[Any]) -> tuple[object, ...]:
    """Return a fingerprint of the arrays: shapes, dtypes and a sum of the bytes of each."""
    return tuple(map(_print, arrays))


def _print(value: Any) -> object:
    if hasattr(value, "detach"):
        import torch

        # An empty tensor is replaced, because `view` refuses its stride of 0. Other tensors are not copied,
        # because a copy would count as memory of the learner's function.
        flat = value.detach().contiguous().view(-1) if value.numel() else torch.empty(0)
        return value.shape, value.dtype, zlib.crc32(flat.view(torch.uint8).numpy().data)
    array = np.ascontiguousarray(value)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:  # longdouble is sent to a worker as float64
        array = array.astype(np.float64)
    return array.shape, array.dtype, zlib.crc32(array.reshape(-1).view(np.uint8).data)
