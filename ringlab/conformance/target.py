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

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

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
    causal: the masks it computes. grouped: fewer key/value heads than query heads. ragged: lengths that are
    not divisible by the ranks, so that some ranks hold fewer tokens, or none. backward: it has gradients.
    split_heads: ranks share out the heads, as Ulysses does, so P divides H, and one of P and K divides the other.
    axes: "BHLD", "BLHD", "LBHD", or "LHD" for sequences without a batch. schedule: "ring" promises P − 1 hops to one neighbour and no gather; "any"
    promises nothing about what is sent and held.
    options: more arguments, passed by name at each call; what a functools.partial binds is fixed in the same way.
    allow: checks whose failure is on purpose, each with its reason.

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
        fixed = {**bound(self.function), **self.options}
        said = next((bool(fixed[name]) for name in ("causal", "is_causal") if name in fixed), None)
        causal = tuple(self.causal) or ((False, True) if masked else (False,))
        if said is not None and not self.causal:
            causal = (said,)
        grouped = self.grouped and "qkv" not in names
        name = self.name or name_of(self.function)
        return replace(self, over=over, layouts=layouts, causal=causal, name=name, grouped=grouped)

    def claims(self) -> Claims:
        """Return the claims as plain data. Raises: BackendError for an invalid claim, or a function that no call can be made of."""
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
        self._check_calls()
        self._check_calls()
        return Claims(
            name=self.name, over=self.over, layouts=tuple(self.layouts), causal=tuple(self.causal),
            dtypes=tuple(self.dtypes), ranks=tuple(self.ranks), grouped=self.grouped, ragged=self.ragged,
            backward=self.backward, split_heads=self.split_heads, schedule=self.schedule, scale=self.takes_scale, axes=self.axes, autograd=self.gradients is None,
            whole_documents=not self.ragged and any(map(_cuts_documents, self._functions())),
            takes=tuple(sorted(parameters(self.function) - {*self.options})),
            through=tuple(name for name in THROUGH if _swallows(self.function) and name not in self.options),
            takes_mask=self.takes_mask, allow=tuple(self.allow.items()),
            required=self.required, open=self._open(),
        )  # fmt: skip

    def _open(self) -> tuple[str, ...]:
        """The parameters that no option and no tensor fills, with the stars of `*args` and `**kwargs`, of both functions."""
        filled = {*self.options, *tensor_names(self.function)}
        of_forward = [name for name in written(self.function) if name not in filled]
        if self.gradients is None:
            return tuple(of_forward)
        filled = {*tensor_names(self.gradients), *GRADIENTS_OF}
        return tuple(
            dict.fromkeys([*of_forward, *(name for name in written(self.gradients) if name not in filled)])
        )

    def _check_calls(self) -> None:
        """Return if a plain call gives the function, and `gradients`, all that they require. Raises: BackendError otherwise."""
        mask = {"mask"} if self.takes_mask else set()
        _check_call(self.function, {*PLAIN, *mask, *self.options})
        if self.gradients is not None:
            _check_call(self.gradients, {*PLAIN, *mask, *self.options, *GRADIENTS_OF})

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

    takes: names of parameters that its options do not fix; through: arguments that its `**kwargs` are given. required: names
    without a default. open: names that neither an option nor a tensor fills, and `*args` and `**kwargs` if it has them.
    whole_documents: the length of each packed document has to be divisible by twice the ranks, as a layout cuts it by itself. can_die: its
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
    required: frozenset[str] = frozenset()
    open: tuple[str, ...] = ()
    can_die: bool = True


def as_target(value: Any, **claims: Any) -> Target:
    """Return `value` as a target with these claims.

    Raises: BackendError unless it is a function or a Target.
    """
    target = value if isinstance(value, Target) else None
    check_callable(target.function if target else value)
    return replace(target or Target(value), **claims).completed()


def check_callable(value: Any) -> None:
    """Return if `value` can be called as it is. Raises: BackendError, also for a class in place of an instance."""
    needed = "a function, or a ringlab.conformance.Target of one"
    if inspect.isclass(value):
        remedy = (
            f"{value.__name__}.apply" if issubclass(value, torch.autograd.Function) else "an instance of it"
        )
        raise BackendError(needed, f"the class {value.__name__}", f"give {remedy}")
    if not callable(value):
        raise BackendError(needed, type(value).__name__)


class CannotCall(BackendError):
    """A call that could not be made: its arguments do not fit the function's parameters, so no line of it has run."""


def call(
    function: Callable[..., Any], tensors: tuple[Float[Tensor, "..."], ...], known: Mapping[str, Any]
) -> Any:
    """Return `function` called with q, k and v, if there are `tensors`, and those of `known` that it has parameters for.

    Raises: CannotCall if Python refuses the arguments; the function's own errors.
    """
    return called(function, *arguments(function, tensors, known))


def called(function: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return `function(*positional, **named)`. Raises: CannotCall if Python refuses the arguments; the function's own errors."""
    try:
        return function(*positional, **named)
    except TypeError as error:
        if _came_of_binding(error):
            given = ", ".join([*["a tensor"] * len(positional), *(f"{name}=…" for name in named)])
            raise CannotCall(
                f"a function that can be called with ({given})",
                f"TypeError: {error}",
                "bind what it requires by functools.partial or Target(…, options=…), and let functools.wraps copy "
                "a signature only to a wrapper that hands all arguments on",
            ) from error
        raise


_BINDING = re.compile(
    r"missing \d+ required|missing a required|unexpected keyword argument|positional arguments? but|"
    r"multiple values for argument|takes no (keyword )?arguments|too many positional|Expected at most \d+ argument"
)
"""The words of Python, and of TorchScript, for arguments that do not fit."""


def _came_of_binding(error: TypeError) -> bool:
    """Whether the error is about the arguments of this very call: only functions that hand all of theirs on have run."""
    passing_on = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    while frames is not None:
        if frames.tb_frame.f_code.co_flags & passing_on != passing_on:
            return False
        frames = frames.tb_next
    return bool(_BINDING.search(str(error)))


def _check_call(function: Callable[..., Any], known: Collection[str]) -> None:
    """Return if q, k and v, and values of the names `known`, are all that `function` requires. Raises: BackendError otherwise."""
    there = _parameters(function)
    if there is None:
        return  # only the call itself can tell
    name = name_of(function)
    if not tensor_names(function):
        raise BackendError(
            "parameters for q, k and v (or qkv, or q and kv), by these names or as the first that are required",
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
            f"none for {', '.join(missing)}, which a plain call of attention does not have",
            f"Target({this}, options={{{one!r}: …}}), functools.partial({this}, {one}=…), or a default",
        )


def tensor_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters that get q, k and v, packed or not; () if the function lacks one for some of them."""
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
    """Return the positional and the named arguments with which `call` would call a function, from these values, or any others."""
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


def _swallows(function: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in _parameters(function) or [])


def required(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters that have no default, none if it hides them."""
    return {each.name for each in _parameters(function) or [] if _requires(each)}


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters, none if it hides them."""
    return _names(_parameters(function) or [])


def written(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return a function's parameters in order, as they are written: `*args` and `**kwargs` with their stars."""
    stars = dict(zip(_VARIADIC, ("*", "**"), strict=True))
    return tuple(stars.get(each.kind, "") + each.name for each in _parameters(function) or [])


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__name__))


def bound(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the keywords that functools.partial has bound."""
    return {**bound(function.func), **function.keywords} if isinstance(function, functools.partial) else {}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters that a call may fill, None if the function hides them; those that a partial has bound are left out.

    A module is called through `__call__(*args, **kwargs)`, which hands all on to `forward`; one that wraps another, as a
    compiled module and DistributedDataParallel do, hands on to that one's.
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


_Kind: TypeAlias = Any  # of a parameter; inspect does not name the type
_IN_ORDER: tuple[_Kind, ...] = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC: tuple[_Kind, ...] = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
GROUPS = ("group", "process_group", "cp_group", "ring_pg")
AROUND = ("ring", "comm", *GROUPS, "rank", "world_size")
CU_SEQLENS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_lens_q", "cu_seq_lens_k")
CU_PADDED = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_k_padded", "cu_seqlens_kv_padded")
MAX_SEQLENS = ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv")
IDS = ("segment_ids", "document_ids")
PACKING = (*CU_SEQLENS, *CU_PADDED, *MAX_SEQLENS, *IDS, "position_ids")
PLAIN = frozenset(
    {*AROUND, "causal", "is_causal", "layout", "positions", "scale", "softmax_scale", "return_lse", "qkv", "kv", *PACKING}
)  # fmt: skip
"""The names of the arguments of a plain call beside q, k and v; those of packed documents if a function requires them."""
GRADIENTS_OF = frozenset({"dout", "out", "lse"})
"""What `gradients` may take, too."""
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
