"""A ring attention that is checked, and its claims: the attention that it computes, and its layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab.conformance.cases import LAYOUTS
from ringlab.conformance.target.argument_names import (
    FLEX_MASKS,
    FLEX_SCORES,
    GRADIENTS_OF,
    PLAIN,
    SCALES,
    THROUGH,
)
from ringlab.conformance.target.calling import (
    AXES,
    annotated,
    bound,
    check_call,
    check_callable,
    name_of,
    parameters,
    required,
    swallows,
    tensor_names,
    written,
)
from ringlab.errors import BackendError, LayoutError
from ringlab.layout import Layout, layout_names

Positions = Callable[..., Sequence[Any]]
"""A function (S, P) → the global positions of each rank's tokens, in the order in which the rank holds them.

A layout that cuts each packed document separately takes a third argument, the lengths of the documents, which
is () for one document."""
ORDERS: dict[str, Callable[[int, int], list[np.ndarray]]] = {
    "descending": lambda S, P: [each[::-1].copy() for each in np.array_split(np.arange(S), P)],
    "late piece first": lambda S, P: _late_piece_first(S, P),
    "two chunks exchanged": lambda S, P: [_exchanged(each) for each in np.array_split(np.arange(S), P)],
    "chunks in no order": lambda S, P: _in_no_order(S, P, -(-S // (4 * P))),
    "tokens in no order": lambda S, P: _in_no_order(S, P, 1),
}
"""Shards in orders that only positions can describe."""
LENGTHS: dict[str, Callable[[int, int], list[np.ndarray]]] = {
    "a short shard between long ones": lambda S, P: _cut(S, [1 if rank % 2 else 4 for rank in range(P)]),
    "a shard of one token, then an empty one": lambda S, P: _one_and_none(S, P),
}
"""Contiguous shards of lengths that only positions can describe."""
BY_POSITIONS = ORDERS | LENGTHS
"""The shards of a target that is told positions and no layout, besides those of its layouts."""
RING, TORCH = "ring", "torch.distributed"
FLEX = (*FLEX_MASKS, *FLEX_SCORES)
BOTTOM_RIGHT, TOP_LEFT = "bottom-right", "top-left"
"""The two alignments of a causal mask over more keys than queries."""
BOTH, LEFT, PAST = "both", "left", "past"
"""The meanings of a window of one number w without a causal mask. BOTH: a row sees keys up to w − 1 tokens away
on both sides. LEFT: it sees all later keys too. PAST: it sees its own key and the w − 1 keys before it."""
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Target:
    """A function to check, and its claims; only the claims are checked.

    over: "ring" (ringlab's Comm, on the virtual cluster or on processes) or "torch.distributed".
    layouts: names of ringlab's layouts, or a mapping of names to functions `(S, P) -> positions per rank`.
    causal: the masks that it computes. grouped: whether it supports fewer key/value heads than query heads.
    ragged: whether it supports lengths that are not divisible by the ranks, so that some ranks hold fewer
    tokens, or none. backward: whether it has gradients.
    split_heads: whether ranks divide the heads, as in Ulysses, so that P divides H and K. Other numbers of
    heads are tested by `uneven heads` only, and may be refused.
    axes: "BHLD", "BLHD", "LBHD", or "LHD" for sequences without a batch. schedule: "ring" promises P − 1 hops
    to one neighbour and no gather; "any" promises nothing about messages and memory.
    alignment: which keys a causal mask shows if there are more keys than queries: "bottom-right", as in
    flash-attn, where the last query sees all keys, or "top-left", as in torch. By default, either may hold.
    window: the meaning of a window of one number without a causal mask: "both", for both sides of a row, "left", which
    limits earlier keys only, or "past", which hides later keys too. By default, any of them may hold.
    cross: whether keys may differ in number from the queries. By default, wrong results for such calls do not
    fail a target, because a ring for self-attention may return some, but the report names the calls at its end.
    A claimed alignment claims such keys too.
    slopes_of_each: whether slopes of ALiBi may differ between sequences, (B, H), as in flash-attn. By default, wrong results
    for such slopes do not fail a target, but the report names them at its end, as with `cross`.
    options: further arguments that are passed by name at each call; arguments that a functools.partial binds
    are fixed in the same way.
    allow: the checks that may fail, each with the reason.

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
    alignment: str = ""
    window: str = ""
    cross: bool | None = None
    slopes_of_each: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    allow: Mapping[str, str] = field(default_factory=dict)

    def positions(self, layout: str, S: int, P: int, documents: tuple[int, ...] = ()) -> list[np.ndarray]:
        """Return each rank's global positions.

        Raises: LayoutError for an unknown layout, or unless every token has exactly one owner.
        """
        if layout in BY_POSITIONS and layout not in self.layouts:
            return BY_POSITIONS[layout](S, P)
        known = self.known_layout(layout, S, P)
        if known is not None:
            return [known.positions(rank) for rank in range(P)]
        make = dict(self.layouts)[layout] if isinstance(self.layouts, Mapping) else None
        if not callable(make):
            raise LayoutError(
                f"one of the layouts {', '.join(LAYOUTS)}, or a function of its own", repr(layout)
            )
        made = make(S, P, documents) if _cuts_documents(make) else make(S, P)
        owned = [np.asarray(each, dtype=np.int64).reshape(-1) for each in made]
        if len(owned) != P or sorted(np.concatenate([*owned, []]).tolist()) != list(range(S)):
            got = f"{[len(each) for each in owned]} positions"
            raise LayoutError(f"positions that give each of {S} tokens to one of {P} ranks", got)
        return owned

    def known_layout(self, layout: str, S: int, P: int) -> Layout | None:
        """Return ringlab's own layout of this name if the target uses one, otherwise None."""
        meant = self.layouts.get(layout, layout) if isinstance(self.layouts, Mapping) else layout
        return LAYOUTS[meant](S, P) if isinstance(meant, str) and meant in LAYOUTS else None

    def completed(self) -> Target:
        """Return the target with missing claims filled in from the function's parameters."""
        names = parameters(self.function)
        over = self.over or (RING if "ring" in names or "comm" in names else TORCH)
        any_layout = "layout" in names or "positions" in names
        layouts = self.layouts or (layout_names() if any_layout else ("contiguous",))
        masked = not names or bool({"causal", "is_causal", *FLEX} & names)
        fixed = {**bound(self.function), **self.options}
        said = next((bool(fixed[name]) for name in ("causal", "is_causal") if name in fixed), None)
        causal = tuple(self.causal) or ((False, True) if masked else (False,))
        if said is not None and not self.causal:
            causal = (said,)
        grouped = self.grouped and "qkv" not in names
        name = self.name or name_of(self.function)
        return replace(self, over=over, layouts=layouts, causal=causal, name=name, grouped=grouped)

    def claims(self) -> Claims:
        """Return the claims as plain data. Raises: BackendError for an invalid claim or function."""
        for what, value, among in (
            ("over", self.over, (RING, TORCH)),
            ("axes", self.axes, tuple(AXES)),
            ("schedule", self.schedule, ("ring", "any")),
            ("alignment", self.alignment, ("", BOTTOM_RIGHT, TOP_LEFT)),
            ("window", self.window, ("", BOTH, LEFT, PAST)),
        ):
            if value not in among:
                raise BackendError(f"{what}= one of {', '.join(among)}", repr(value))
        named = self.layouts.values() if isinstance(self.layouts, Mapping) else self.layouts
        for layout in named:
            if not callable(layout) and layout not in LAYOUTS:
                raise BackendError(f"one of the layouts {', '.join(LAYOUTS)}, or a function", repr(layout))
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise BackendError(f"one of the dtypes {', '.join(DTYPES)}", repr(dtype))
        self._check_calls()
        return Claims(
            name=self.name, over=self.over, layouts=tuple(self.layouts), causal=tuple(self.causal),
            dtypes=tuple(self.dtypes), ranks=tuple(self.ranks), grouped=self.grouped, ragged=self.ragged,
            backward=self.backward, split_heads=self.split_heads, schedule=self.schedule, scale=self.takes_scale, axes=self.axes, autograd=self.gradients is None,
            whole_documents=not self.ragged and any(map(_cuts_documents, self._functions())),
            takes=self.takes, alignment=self.alignment, window=self.window, cross=self.cross, slopes_of_each=self.slopes_of_each,
            through=tuple(name for name in THROUGH if swallows(self.function) and name not in self.options),
            takes_mask=self.takes_mask, tensor_scale=self.takes_a_tensor_as_scale, allow=tuple(self.allow.items()),
            required=self.required, open=self._open(),
        )  # fmt: skip

    def _open(self) -> tuple[str, ...]:
        """Return the parameters of both functions that no option and no tensor fills, with `*args` and `**kwargs`."""
        filled = {*self.options, *tensor_names(self.function)}
        of_forward = [name for name in written(self.function) if name not in filled]
        if self.gradients is None:
            return tuple(of_forward)
        filled = {*tensor_names(self.gradients), *GRADIENTS_OF}
        return tuple(
            dict.fromkeys([*of_forward, *(name for name in written(self.gradients) if name not in filled)])
        )

    def _check_calls(self) -> None:
        """Check that a plain call passes all arguments that both functions require. Raises: BackendError."""
        mask = {*FLEX, *(("mask",) if self.takes_mask else ())}
        check_call(self.function, {*PLAIN, *mask, *self.options})
        if self.gradients is not None:
            check_call(self.gradients, {*PLAIN, *mask, *self.options, *GRADIENTS_OF})

    def _functions(self) -> Sequence[Any]:
        """Return the layouts that are functions."""
        named = self.layouts.values() if isinstance(self.layouts, Mapping) else ()
        return [layout for layout in named if callable(layout)]

    @cached_property
    def required(self) -> frozenset[str]:
        """Return the names of the parameters that have no default."""
        return frozenset(required(self.function))

    def packed(self, qkv: tuple[Any, ...]) -> dict[str, Tensor]:
        """Return q, k and v stacked, by the names of the packed parameters that the function has."""
        names = {"qkv", "kv"} & parameters(self.function)
        return {name: torch.stack(qkv[-len(name) :], dim=self.axes.index("H")) for name in names}

    @property
    def takes(self) -> tuple[str, ...]:
        """Return the names of the parameters that the options do not fix."""
        return tuple(sorted(parameters(self.function) - {*self.options}))

    @property
    def told_positions_alone(self) -> bool:
        """Return whether the function takes positions and no layout, so that it can get any order of tokens."""
        return {"positions", "layout"} & parameters(self.function) == {"positions"}

    @property
    def takes_mask(self) -> bool:
        """Return whether the function takes ringlab's Mask."""
        return "mask" in parameters(self.function) and "layout" in parameters(self.function)

    @property
    def takes_scale(self) -> bool:
        """Return whether the function takes a scale."""
        return bool({*SCALES} & parameters(self.function))

    @property
    def takes_a_tensor_as_scale(self) -> bool:
        """Return whether an annotation says that a scale may be a tensor."""
        return any("Tensor" in annotated(self.function).get(name, "") for name in SCALES)


@dataclass(frozen=True)
class Claims:
    """A target's claims as data that can be sent between processes.

    takes: the names of parameters that its options do not fix. takes_mask: whether it takes ringlab's Mask.
    through: the arguments that its `**kwargs` get. required: the parameter names without a default. open: the
    parameter names that neither an option nor a tensor fills, with `*args` and `**kwargs`. whole_documents:
    whether the length of each packed document must be divisible by twice the number of ranks, because a layout
    cuts each document separately. can_die: whether its ranks may be killed to see how the others react.
    tensor_scale: whether its scale may be a tensor.
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
    alignment: str = ""
    tensor_scale: bool = False
    window: str = ""
    cross: bool | None = None
    slopes_of_each: bool | None = None

    @property
    def any_mask(self) -> bool:
        """Return whether the target takes a whole mask, as ringlab's Mask or FlexAttention's functions."""
        return self.takes_mask or bool({*FLEX} & {*self.takes})


def as_target(value: Any, **claims: Any) -> Target:
    """Return `value` as a target with these claims.

    Raises: BackendError unless it is a function or a Target.
    """
    target = value if isinstance(value, Target) else None
    check_callable(target.function if target else value)
    return replace(target or Target(value), **claims).completed()


def _late_piece_first(S: int, P: int) -> list[np.ndarray]:
    """Return zig-zag shards, each with its later piece in front."""
    pieces = np.array_split(np.arange(S), 2 * P)
    return [np.concatenate((pieces[2 * P - 1 - rank], pieces[rank])) for rank in range(P)]


def _exchanged(shard: np.ndarray) -> np.ndarray:
    """Return the shard with its second and third quarter exchanged: length, first, last and sum are as before."""
    a, b, c, d = np.array_split(shard, 4)
    return np.concatenate((a, c, b, d))


def _in_no_order(S: int, P: int, chunk: int) -> list[np.ndarray]:
    """Return shards of equal length, to which chunks of the sequence are dealt in random order."""
    chunks = np.split(np.arange(S), range(chunk, S, chunk))
    dealt = [chunks[at] for at in np.random.default_rng([S, P]).permutation(len(chunks))]
    return np.array_split(np.concatenate(dealt), P)


def _cut(S: int, shares: Sequence[int]) -> list[np.ndarray]:
    """Return contiguous shards whose lengths are in the ratio of these shares."""
    ends = np.cumsum(shares) * S // sum(shares)
    return np.split(np.arange(S), ends[:-1])


def _one_and_none(S: int, P: int) -> list[np.ndarray]:
    """Return contiguous shards of one token, of no token, and of equal parts of the rest; all tokens if P is 1."""
    few = [np.arange(1), np.arange(0)][: P - 1]
    return [*few, *np.array_split(np.arange(1 if few else 0, S), P - len(few))]


def _cuts_documents(layout: Callable[..., Any]) -> bool:
    return len(parameters(layout)) == 3
