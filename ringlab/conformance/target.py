"""A ring attention to be checked, and its claims: how it is called, and how its ranks share the sequence.

A bare function is enough if its arguments have the usual names. Each argument is passed by name if the
function has it:

    q k v            this rank's shards, (B, H, L, D) and (B, K, L, D), or as `axes` says
    ring, comm       ringlab's Ring or Comm of this rank, for functions over those
    group            the default group of torch.distributed, for functions over that
    rank world_size  of this rank
    causal           or is_causal; the mask is in global positions
    layout           the ringlab Layout, for layouts that ringlab knows, else the layout's name
    positions        a list with the global positions of each rank's tokens, int64 tensors
    scale            or softmax_scale; None stands for D^−½
    return_lse       True
    qkv, kv          in place of q, k and v, or of k and v: stacked before the heads, (B, L, 3, H, D) for "BLHD"
    window cu_seqlens sinks …   what else the function has a parameter for (see `ringlab.conformance.given`)
    dout out lse     for `gradients` only: of the loss, and what the forward gave

The first three required parameters with other names are taken for q, k and v. The function returns out,
or (out, lse, …); gradients come from autograd, or from `gradients`, a function that returns (dq, dk, dv).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab.conformance.cases import LAYOUTS
from ringlab.errors import BackendError, LayoutError
from ringlab.layout import Layout, layout_names

Positions = Callable[..., Sequence[Any]]
"""(S, P) → the global positions of each rank's tokens, in the order in which the rank holds them.

A layout that cuts each packed document by itself has a third parameter, the lengths of the documents, () if there is one.
"""

RING, TORCH = "ring", "torch.distributed"
_FIRST = ("ring", "comm")


DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Target:
    """A function to be checked, with its claims; only its claims are checked.

    over: "ring" (ringlab's Comm, on the virtual cluster or on processes) or "torch.distributed".
    layouts: names among ringlab's, or a mapping of names to functions `(S, P) -> positions per rank`.
    causal: the masks it computes. grouped: fewer key/value heads than query heads. ragged: lengths that do
    not divide by the ranks, so that some ranks hold fewer tokens, or none. backward: it has gradients.
    split_heads: ranks share out the heads, as Ulysses does, so P divides H, and K unless K is 1.
    axes: "BHLD", "BLHD", "LBHD", or "LHD" for sequences without a batch. schedule: "ring" promises P − 1 hops to one neighbour and no gather; "any"
    promises nothing about what is sent and held.
    options: more arguments, passed by name at each call. allow: checks whose failure is on purpose, each with its reason.

    >>> Target(len, layouts={"mine": lambda S, P: [[0, 3], [1, 2]]}).positions("mine", 4, 2)
    [array([0, 3]), array([1, 2])]
    """

    function: Callable[..., Any]
    name: str = ""
    over: str = ""
    layouts: Mapping[str, Positions | str] | Sequence[str] = ()
    causal: Sequence[bool] = ()
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16", "float64")
    ranks: Sequence[int] = (1, 2, 3, 4, 8, 16)
    grouped: bool = True
    ragged: bool = True
    backward: bool = True
    split_heads: bool = False
    axes: str = "BHLD"
    schedule: str = "ring"
    gradients: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    allow: Mapping[str, str] = field(default_factory=dict)

    def positions(self, layout: str, S: int, P: int, documents: tuple[int, ...] = ()) -> list[np.ndarray]:
        """Return each rank's global positions.

        Raises: LayoutError for an unknown layout, or unless every token has exactly one owner.
        """
        known = self.known_layout(layout, S, P)
        if known is not None:
            return [known.positions(rank) for rank in range(P)]
        make = dict(self.layouts)[layout] if isinstance(self.layouts, Mapping) else None
        if not callable(make):
            raise LayoutError(f"a layout among {', '.join(LAYOUTS)}, or a function of its own", repr(layout))
        made = make(S, P, documents) if _cuts_documents(make) else make(S, P)
        owned = [np.asarray(each, dtype=np.int64).reshape(-1) for each in made]
        if len(owned) != P or sorted(np.concatenate([*owned, []]).tolist()) != list(range(S)):
            got = f"{[len(each) for each in owned]} positions"
            raise LayoutError(f"positions that give each of {S} tokens to one of {P} ranks", got)
        return owned

    def known_layout(self, layout: str, S: int, P: int) -> Layout | None:
        """Return ringlab's own layout if the target claims one of these, otherwise None."""
        meant = self.layouts.get(layout, layout) if isinstance(self.layouts, Mapping) else layout
        return LAYOUTS[meant](S, P) if isinstance(meant, str) and meant in LAYOUTS else None

    def completed(self) -> Target:
        """Return the target with open claims filled in from the function's own parameters."""
        names = parameters(self.function)
        over = self.over or (RING if any(name in names for name in _FIRST) else TORCH)
        any_layout = "layout" in names or "positions" in names
        layouts = self.layouts or (layout_names() if any_layout else ("contiguous",))
        masked = "causal" in names or "is_causal" in names or not names
        causal = tuple(self.causal) or ((False, True) if masked else (False,))
        grouped = self.grouped and "qkv" not in names
        name = self.name or getattr(self.function, "__qualname__", type(self.function).__name__)
        return replace(self, over=over, layouts=layouts, causal=causal, name=name, grouped=grouped)

    def claims(self) -> Claims:
        """Return the claims as plain data. Raises: BackendError for an invalid claim."""
        for what, value, among in (
            ("over", self.over, (RING, TORCH)),
            ("axes", self.axes, tuple(AXES)),
            ("schedule", self.schedule, ("ring", "any")),
        ):
            if value not in among:
                raise BackendError(f"{what}= one of {', '.join(among)}", repr(value))
        named = self.layouts.values() if isinstance(self.layouts, Mapping) else self.layouts
        for layout in named:
            if not callable(layout) and layout not in LAYOUTS:
                raise BackendError(f"a layout among {', '.join(LAYOUTS)}, or a function", repr(layout))
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise BackendError(f"a dtype among {', '.join(DTYPES)}", repr(dtype))
        return Claims(
            name=self.name, over=self.over, layouts=tuple(self.layouts), causal=tuple(self.causal),
            dtypes=tuple(self.dtypes), ranks=tuple(self.ranks), grouped=self.grouped, ragged=self.ragged,
            backward=self.backward, split_heads=self.split_heads, schedule=self.schedule, scale=self.takes_scale, axes=self.axes, autograd=self.gradients is None,
            whole_documents=not self.ragged and any(map(_cuts_documents, self._functions())),
            takes=tuple(sorted(parameters(self.function) - {*self.options})),
            through=tuple(name for name in THROUGH if _swallows(self.function) and name not in self.options),
            takes_mask=self.takes_mask, allow=tuple(self.allow.items()),
        )  # fmt: skip

    def _functions(self) -> Sequence[Any]:
        """The layouts that are functions of their own."""
        named = self.layouts.values() if isinstance(self.layouts, Mapping) else ()
        return [layout for layout in named if callable(layout)]

    @cached_property
    def required(self) -> frozenset[str]:
        """Return the names of the parameters that have no default."""
        return frozenset(required(self.function))

    def packed(self, qkv: tuple[Float[Tensor, "..."], ...]) -> dict[str, Tensor]:
        """Return q, k and v stacked under the names of the packed parameters that the function has."""
        names = {"qkv", "kv"} & parameters(self.function)
        return {name: torch.stack(qkv[-len(name) :], dim=self.axes.index("H")) for name in names}

    @property
    def takes_mask(self) -> bool:
        """Return whether the function takes ringlab's Mask."""
        return "mask" in parameters(self.function) and "layout" in parameters(self.function)

    @property
    def takes_scale(self) -> bool:
        """Return whether the function takes a scale."""
        names = parameters(self.function)
        return "scale" in names or "softmax_scale" in names


@dataclass(frozen=True)
class Claims:
    """A target's claims, as data that can be sent between processes.

    takes: names of parameters that its options do not fix; through: arguments that its `**kwargs` are given.
    whole_documents: each packed document has to divide by twice the ranks, as a layout cuts it by itself. can_die: its
    ranks may be killed to see what the others do.
    """

    name: str
    over: str
    layouts: tuple[str, ...]
    causal: tuple[bool, ...]
    dtypes: tuple[str, ...]
    ranks: tuple[int, ...]
    grouped: bool
    ragged: bool
    backward: bool
    schedule: str
    scale: bool
    axes: str = "BHLD"
    autograd: bool = True
    takes: tuple[str, ...] = ()
    through: tuple[str, ...] = ()
    takes_mask: bool = False
    whole_documents: bool = False
    split_heads: bool = False
    allow: tuple[tuple[str, str], ...] = ()
    can_die: bool = True


def as_target(value: Any, **claims: Any) -> Target:
    """Return `value` as a target with these claims.

    Raises: BackendError unless it is a function or a Target.
    """
    if isinstance(value, Target):
        return replace(value, **claims).completed()
    if not callable(value):
        raise BackendError("a function, or a ringlab.conformance.Target", type(value).__name__)
    return Target(value, **claims).completed()


def call(
    function: Callable[..., Any], tensors: tuple[Float[Tensor, "..."], ...], known: Mapping[str, Any]
) -> Any:
    """Return `function` called with q, k and v, if there are `tensors`, and those of `known` that it has parameters for."""
    positional, named = arguments(function, tensors, known)
    return function(*positional, **named)


def arguments(
    function: Callable[..., Any], tensors: Sequence[Any], known: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments with which `call` would call a function, from these values, or any others."""
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return list(tensors), {}
    values = {**dict(zip("qkv", tensors, strict=False)), **known}
    in_order = iter([x for letter, x in zip("qkv", tensors, strict=False) if letter not in _names(given)])
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in given:
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= {name: values[name] for name in THROUGH if name in values and name not in named}
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
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


def _swallows(function: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in _parameters(function))


def required(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters that have no default, none if it hides them."""
    empty = inspect.Parameter.empty
    return {each.name for each in _parameters(function) if each.default is empty}


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters, none if it hides them."""
    return {each.name for each in _parameters(function)}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return []


THROUGH = ("sliding_window", "softcap", "s_aux")
"""Arguments that a function with `**kwargs` is given, too: code that swallows them computes another attention."""
AXES = {"BHLD": (0, 1, 2, 3), "BLHD": (0, 2, 1, 3), "LBHD": (2, 0, 1, 3), "LHD": (0, 2, 1, 3)}
"""The orders of axes that a target may take, each as a permutation of (B, H, L, D); "LHD" is "BLHD" without its one sequence."""


def _cuts_documents(layout: Callable[..., Any]) -> bool:
    return len(parameters(layout)) == 3


def as_axes(x: Float[Tensor, "B H L D"], axes: str) -> Float[Tensor, "..."]:
    """Return a tensor of axes "BHLD" with `axes`; dense."""
    dense = x.permute(AXES[axes]).contiguous()
    return dense[0] if axes == "LHD" else dense


def from_axes(x: Float[Tensor, "..."], axes: str) -> Float[Tensor, "B H L D"]:
    """Return a tensor of `axes` with axes "BHLD"."""
    return (x[None] if axes == "LHD" else x).permute(np.argsort(AXES[axes]).tolist())


def tensors_of(positions: Sequence[Int[np.ndarray, " _"]], device: str | torch.device) -> list[Tensor]:
    """Return positions as int64 tensors on `device`."""
    return [torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in positions]
