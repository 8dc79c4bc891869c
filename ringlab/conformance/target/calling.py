"""The way a function is called: its parameters, the arguments of a call, and the axes of its tensors."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab.conformance.target.argument_names import GRADIENTS_OF, PLAIN, THROUGH
from ringlab.errors import BackendError


def check_callable(value: Any) -> None:
    """Check that `value` can be called. Raises: BackendError if it cannot, or if it is a class."""
    needed = "a function, or a ringlab.conformance.Target of one"
    if inspect.isclass(value):
        remedy = (
            f"{value.__name__}.apply" if issubclass(value, torch.autograd.Function) else "an instance of it"
        )
        raise BackendError(needed, f"the class {value.__name__}", f"give {remedy}")
    if not callable(value):
        raise BackendError(needed, type(value).__name__)


class CannotCall(BackendError):
    """Raised if arguments do not fit the function's parameters, so that no line of the function has run."""


def call(function: Callable[..., Any], tensors: tuple[Any, ...], known: Mapping[str, Any]) -> Any:
    """Call `function` with `tensors` as q, k and v, and with each value in `known` for which it has a parameter.

    Raises: CannotCall if Python refuses the arguments; the function's own errors.
    """
    return called(function, *arguments(function, tensors, known))


def called(function: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return `function(*positional, **named)`. Raises: CannotCall if the arguments do not fit."""
    try:
        return function(*positional, **named)
    except TypeError as error:
        if _came_of_binding(error):
            given = ", ".join([*["a tensor"] * len(positional), *(f"{name}=…" for name in named)])
            raise CannotCall(
                f"a function that can be called with ({given})",
                f"TypeError: {error}",
                "bind the required arguments with functools.partial or Target(…, options=…); use functools.wraps only "
                "on a wrapper that passes all arguments on",
            ) from error
        raise


_BINDING = re.compile(
    r"missing \d+ required|missing a required|unexpected keyword argument|positional arguments? but|"
    r"multiple values for argument|takes no (keyword )?arguments|too many positional|Expected at most \d+ argument"
)
"""The words by which Python and TorchScript report that arguments do not fit."""


def _came_of_binding(error: TypeError) -> bool:
    """Return whether the error says that the arguments of this call do not fit.

    An error in such words may also be about a later call. It is about this call if every function in the
    traceback takes `*args` and `**kwargs`, and so only passes arguments on.
    """
    passing_on = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    while frames is not None:
        if frames.tb_frame.f_code.co_flags & passing_on != passing_on:
            return False
        frames = frames.tb_next
    return bool(_BINDING.search(str(error)))


def check_call(function: Callable[..., Any], known: Collection[str]) -> None:
    """Check that `function` requires only q, k, v and names in `known`. Raises: BackendError."""
    there = _parameters(function)
    if there is None:
        return  # only the call itself can show whether the arguments fit
    name = name_of(function)
    if not tensor_names(function):
        raise BackendError(
            "parameters q, k and v (or qkv, or q and kv), by these names or as the first required parameters",
            f"{name}({', '.join(written(function)) or ''})",
            "a function that names these parameters and calls it"
            + (", or functools.wraps on its decorator" if hasattr(function, "__qualname__") else ""),
        )
    filled = {*tensor_names(function), *known}
    missing = [each.name for each in there if _requires(each) and each.name not in filled]
    if missing:
        one, this = missing[0], name if hasattr(function, "__qualname__") else "it"
        raise BackendError(
            f"a value for every parameter that {name} requires",
            f"none for {', '.join(missing)}, which is no argument of a plain call",
            f"Target({this}, options={{{one!r}: …}}), functools.partial({this}, {one}=…), or a default",
        )


def tensor_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameter names that get q, k and v, packed or not; () if a tensor has no parameter."""
    there = _parameters(function) or []
    names = _names(there)
    if "qkv" in names or {"q", "kv"} <= names:
        return tuple(name for name in ("qkv", "q", "kv") if name in names)
    known = {*PLAIN, *GRADIENTS_OF, *"qkv"}
    free = [each.name for each in there if _requires(each) and each.name not in known]
    by_name = [letter for letter in "qkv" if letter in names]
    found = (*by_name, *free[: 3 - len(by_name)])
    return found if len(found) == 3 else ()


def _requires(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in _VARIADIC


def arguments(
    function: Callable[..., Any], tensors: Sequence[Any], known: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments by which `call` would call a function."""
    given = _parameters(function)
    if given is None:
        return list(tensors), {}
    values = {**dict(zip("qkv", tensors, strict=False)), **known}
    in_order = iter([x for letter, x in zip("qkv", tensors, strict=False) if letter not in _names(given)])
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in given:
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= {name: values[name] for name in THROUGH if name in values and name not in named}
        if parameter.kind in _VARIADIC:
            continue
        if parameter.name in values:
            value = values[parameter.name]
        elif parameter.default is parameter.empty:
            value = next(in_order, parameter.empty)
            if value is parameter.empty:
                continue  # the function itself reports the missing argument
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            value = parameter.default
        else:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[parameter.name] = value
    return positional, named


def _names(parameters: Sequence[inspect.Parameter]) -> set[str]:
    return {parameter.name for parameter in parameters}


def swallows(function: Callable[..., Any]) -> bool:
    """Return whether a function accepts arguments of any name."""
    return any(each.kind is each.VAR_KEYWORD for each in _parameters(function) or [])


def required(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters without a default; none if the function hides them."""
    return {each.name for each in _parameters(function) or [] if _requires(each)}


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters; none if the function hides them."""
    return _names(_parameters(function) or [])


def annotated(function: Callable[..., Any]) -> dict[str, str]:
    """Return the annotations of a function's parameters, as text."""
    return {each.name: str(each.annotation) for each in _parameters(function) or []}


def written(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return a function's parameters in order as written, with stars before `*args` and `**kwargs`."""
    stars = dict(zip(_VARIADIC, ("*", "**"), strict=True))
    return tuple(stars.get(each.kind, "") + each.name for each in _parameters(function) or [])


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of a callable object's class."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__name__))


def bound(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword arguments that functools.partial has bound."""
    return {**bound(function.func), **function.keywords} if isinstance(function, functools.partial) else {}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters that a call may fill, or None if the function hides them.

    Parameters that a partial has bound are left out. A module is called through `__call__(*args, **kwargs)`,
    which passes all arguments on to `forward`. A module that wraps another module, such as a compiled module
    or DistributedDataParallel, passes them on to the wrapped module.
    """
    if isinstance(function, functools.partial):
        inner = _parameters(function.func)
        if inner is None:
            return None
        open_ = [each for each in inner if each.name not in function.keywords]
        in_order = [each for each in open_ if each.kind in _IN_ORDER]
        filled = {each.name for each in in_order[: len(function.args)]}
        return [each for each in open_ if each.name not in filled]
    if isinstance(function, torch.nn.Module):
        inside = [getattr(function, name, None) for name in ("_orig_mod", "module")]
        wrapped = next((each for each in inside if isinstance(each, torch.nn.Module)), None)
        there = _parameters(function.forward)
        if wrapped is not None and (there is None or all(each.kind in _VARIADIC for each in there)):
            return _parameters(wrapped)
        return there
    schema = getattr(function, "schema", None)
    if isinstance(schema, torch._C.FunctionSchema):
        return [
            inspect.Parameter(
                each.name, inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=each.default_value if each.has_default_value() else inspect.Parameter.empty,
            )
            for each in schema.arguments if each.name != "self"
        ]  # fmt: skip
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


_Kind: TypeAlias = Any  # the kind of a parameter; inspect has no name for its type


_IN_ORDER: tuple[_Kind, ...] = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


_VARIADIC: tuple[_Kind, ...] = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


AXES = {"BHLD": (0, 1, 2, 3), "BLHD": (0, 2, 1, 3), "LBHD": (2, 0, 1, 3), "LHD": (0, 2, 1, 3)}
"""The orders of axes that a target may take, as permutations of (B, H, L, D); "LHD" is "BLHD" for B = 1."""


def as_axes(x: Float[Tensor, "B H L D"], axes: str) -> Float[Tensor, "..."]:
    """Return a dense tensor with these `axes`, made from one with the axes "BHLD"."""
    dense = x.permute(AXES[axes]).contiguous()
    return dense[0] if axes == "LHD" else dense


def from_axes(x: Float[Tensor, "..."], axes: str) -> Float[Tensor, "B H L D"]:
    """Return the tensor with the axes "BHLD", made from one with these `axes`."""
    return (x[None] if axes == "LHD" else x).permute(np.argsort(AXES[axes]).tolist())


def tensors_of(positions: Sequence[Int[np.ndarray, " _"]], device: str | torch.device) -> list[Tensor]:
    """Return positions as int64 tensors on `device`."""
    return [torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in positions]
