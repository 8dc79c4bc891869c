"""Repairs Triton's interpreter, so that with TRITON_INTERPRET=1 a kernel on the CPU computes exactly.

The interpreter of Triton 3.6 to 3.9 has faults. It multiplies bfloat16 as if the bits were integers,
truncates when it rounds to bfloat16, and mixes up the programs of two threads that launch at the same time.
`repair` replaces the faulty functions, each by one entry of `REPAIRS`, and does nothing if kernels are
compiled. Two entries change no result: they skip useless work, which would take most of the time of a small
tile.

These faults are not repaired, because no kernel here is affected: float8, atomics on bfloat16, casts with an
explicit rounding mode, and index reductions of NaN. After the repair a float32 `tl.dot` is exact whatever its
input_precision, and `tl.sum` of 16-bit numbers adds in float32 and rounds once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from inspect import signature
from types import ModuleType
from typing import Any

from ringlab.blocks.triton import rounding
from ringlab.errors import BackendError

KNOWN = "3.6 to 3.9"  # the versions of Triton for which every repair is tested

# Allows one launch at a time, because the interpreter keeps the program's index in a global variable and
# replaces the functions of triton.language while a kernel runs. It is reentrant, so that a hook can launch a
# kernel.
_LAUNCHING = threading.RLock()
# For each running launch, the ids of the globals of the modules whose triton.language is prepared.
_prepared: list[set[int]] = []
_MARK = "_ringlab_repaired"


@dataclass(frozen=True)
class Repair:
    """One function of the interpreter and its replacement.

    owner: a class in triton.runtime.interpreter, or "" for the module. parameters: the parameters of the
    function that `make` relies on. make: takes the module and the faulty function, and returns the
    replacement. Versions of Triton before `since`, and from `fixed_in` on, do not need the repair.
    """

    why: str
    owner: str
    function: str
    parameters: tuple[str, ...]
    make: Callable[[ModuleType, Callable[..., Any]], Callable[..., Any]]
    since: tuple[int, int] = (0, 0)
    fixed_in: tuple[int, int] = (99, 0)

    def place(self, interpreter: ModuleType) -> Any:
        """Return the object whose attribute is replaced, or None if this Triton does not have the object."""
        return getattr(interpreter, self.owner, None) if self.owner else interpreter

    def needed(self, version: str) -> bool:
        """Return whether this version of Triton, such as "3.7.1", has the fault."""
        major, minor, *_ = version.split(".")
        return self.since <= (int(major), int(minor)) < self.fixed_in

    def fits(self, interpreter: ModuleType) -> bool:
        """Return whether the function exists with the parameters that the repair relies on."""
        found = getattr(self.place(interpreter), self.function, None)
        return (
            callable(found) and tuple(signature(found).parameters)[: len(self.parameters)] == self.parameters
        )


def interpreting() -> bool:
    """Return whether Triton is installed and runs kernels in its interpreter on the CPU."""
    if find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def repair() -> bool:
    """Repair the interpreter if kernels run in it, and return whether they do. Further calls change nothing.

    Raises: BackendError if TRITON_INTERPRET was set after Triton was imported, or the installed Triton has an
    interpreter that this module does not know.
    """
    if not interpreting():
        return False
    import triton.language
    import triton.runtime.interpreter as interpreter

    if not isinstance(triton.language.standard.sum, interpreter.InterpretedFunction):
        raise BackendError(
            "TRITON_INTERPRET=1 before Triton is imported, because the import decides how its functions run",
            "the variable was set later",
            "set it before Python starts, or in the first line of the program or notebook, and restart",
        )
    with _LAUNCHING:
        if not hasattr(interpreter, _MARK):
            _replace(interpreter, triton.__version__)
            setattr(interpreter, _MARK, True)
    return True


def _replace(interpreter: ModuleType, version: str) -> None:
    """Install every repair that this version needs, or none of them."""
    needed = [each for each in REPAIRS if each.needed(version)]
    strange = [f"{r.owner}.{r.function}".lstrip(".") for r in needed if not r.fits(interpreter)]
    if strange:
        raise BackendError(
            f"the interpreter of Triton {KNOWN}, which ringlab knows how to make exact",
            f"Triton {version}, in which these have changed: {', '.join(strange)}",
            "pip install 'triton>=3.6,<3.10', or unset TRITON_INTERPRET and use block='native'",
        )
    for each in needed:
        original = getattr(each.place(interpreter), each.function)
        setattr(each.place(interpreter), each.function, wraps(original)(each.make(interpreter, original)))


def _launch(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a launch that no other launch in the process overlaps, and that does not warn of inf − inf."""
    import numpy as np

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _LAUNCHING, np.errstate(all="ignore"), _fresh():
            return original(self, *args, **kwargs)

    return call


@contextmanager
def _fresh() -> Iterator[None]:
    """Return a context for a launch, with its own record of modules whose triton.language is prepared."""
    _prepared.append(set())
    try:
        yield
    finally:
        _prepared.pop()


def _patch_lang(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_patch_lang` that prepares a module once per launch, and not again at each `tl.sum`.

    Preparing the module takes longer than the sum.
    """

    def patch_lang(fn: Any) -> Any:
        if _prepared and id(fn.__globals__) in _prepared[-1]:
            return None  # calls within a kernel do not use the returned scope
        if _prepared:
            _prepared[-1].add(id(fn.__globals__))
        return original(fn)

    return patch_lang


def _overflow_check(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a check that skips recomputing integer sums in 64 bits where the result would be ignored."""

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if not isinstance(self.builder, interpreter.InterpreterBuilder) or self.builder.options.debug:
            original(self, lhs, rhs, binary_op)

    return check


def _loop_bound(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch with which a loaded number can be the bound of a loop.

    Triton 3.6 converts an array of one element to an integer, which NumPy 2.4 refuses.
    """

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _argument(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a conversion of float arguments to float32, as in a compiled kernel.

    The interpreter would keep float64.
    """
    import numpy as np
    import triton.language as tl

    def convert(arg: Any) -> Any:
        if isinstance(arg, float):
            return tl.tensor(interpreter.TensorHandle(np.array([arg], np.float32), tl.float32), tl.float32)
        return original(arg)

    return convert


def _masked_load(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a load whose masked elements are NaN if `other` is not passed.

    These elements are undefined on a GPU. The interpreter would return 0.
    """
    import numpy as np

    def load(self: Any, ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        kind = ptrs.get_element_ty()
        if other is None and kind.is_floating() and not kind.is_fp8() and not mask.data.all():
            blank = np.full(ptrs.data.shape, np.nan, np.float32)
            other = self.cast_impl(interpreter.TensorHandle(blank, interpreter.tl.float32), kind)
        return original(self, ptrs, mask, other, *args, **kwargs)

    return load


REPAIRS = (
    Repair("threads", "GridExecutor", "__call__", ("self", "args_dev"), _launch),
    Repair("device calls", "", "_patch_lang", ("fn",), _patch_lang),
    Repair(
        "overflow checks",
        "TritonSemantic",
        "binary_op_sanitize_overflow_impl",
        ("self", "lhs", "rhs", "binary_op"),
        _overflow_check,
    ),
    Repair("loop bounds", "", "_patch_lang_tensor", ("tensor", "scope"), _loop_bound, fixed_in=(3, 7)),
    Repair("float arguments", "", "_implicit_cvt", ("arg",), _argument),
    Repair(
        "masked loads",
        "InterpreterBuilder",
        "create_masked_load",
        ("self", "ptrs", "mask", "other"),
        _masked_load,
    ),
    *(Repair(*each) for each in rounding.REPAIRS),
)
