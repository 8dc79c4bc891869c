"""The arguments of `ring_attention` on one rank, and the two stages of a call that check and describe them.

Nothing here communicates. `check_arguments` raises an error if this rank's arguments are wrong, and otherwise
returns the `ScheduledCall`. `describe_arguments` returns a text that must be equal on all ranks.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringlab.blocks import get_block
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring, check_ring
from ringlab.errors import (
    BackendError,
    DeviceError,
    DtypeError,
    LayoutError,
    MaskError,
    ShapeError,
)
from ringlab.layout import Layout
from ringlab.mask import Mask, as_mask, check_position_ids
from ringlab.schedules import get_schedule
from ringlab.schedules.protocol import Schedule, ScheduledCall
from ringlab.scores import ScoreRules, check_scale, check_sinks
from ringlab.torch_modes import autocast_dtype


class _ByDefault:
    """The default of `causal`.

    It means True unless `mask=` is passed. A mask alone decides which keys are seen.
    """

    def __repr__(self) -> str:
        return "True"


CAUSAL: Any = _ByDefault()


@dataclass(frozen=True)
class Modes:
    """The modes of torch in which a call was made: whether gradients are recorded, and autocast's dtype."""

    gradients: bool
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Arguments:
    """The arguments of `ring_attention` on one rank. They are not checked yet, so any may be wrong.

    modes: None means the modes that are active now. A compiled graph may run in other modes than those in
    which the call was made, so it passes the modes of the call.
    """

    q: Any
    k: Any
    v: Any
    ring: Ring
    layout: Layout
    causal: bool
    mask: Mask | None
    scale: float | None
    softcap: float | None
    dropout: float
    seed: int | None
    sinks: Any
    block: str | Block
    schedule: str | Schedule
    return_lse: bool
    validate: bool
    position_ids: Any = None
    modes: Modes | None = None


def modes_of(given: Arguments) -> Modes:
    """Return the modes that are active for a call with these arguments. q, k and v must be tensors."""
    leaves = (given.q, given.k, given.v) if given.sinks is None else (given.q, given.k, given.v, given.sinks)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    return Modes(gradients, autocast_dtype(given.q.device.type))


def check_arguments(given: Arguments) -> ScheduledCall:
    """Return the call that these arguments describe, with every default filled in.

    Raises: ShapeError, DtypeError, DeviceError, LayoutError, MaskError, WorldSizeError or BackendError if an
    argument is wrong.
    """
    _check_tensors(given.q, given.k, given.v, given.ring, given.layout)
    if given.validate and given.q.is_meta:
        needed, got = "tensors with data", "tensors on the device meta"
        raise DeviceError(
            needed, got, "make them on the CPU or a GPU; after model.to_empty(device=…), load the weights"
        )
    check_scale(given.scale, given.q.dtype)
    check_sinks(given.sinks, given.q)
    mask = _resolve_mask(given.causal, given.mask, given.layout)
    if given.position_ids is not None:
        check_position_ids(given.position_ids, given.layout, mask, given.ring.rank, or_global=True)
    rules = _resolve_rules(given.softcap, given.dropout, given.seed)
    block, schedule = (
        get_block(given.block, given.q, rules.requirements, given.v),
        get_schedule(given.schedule),
    )
    heads = given.q.shape[1], given.k.shape[1]
    schedule.check(*heads, given.ring.world_size)
    sinks = _resolve_sinks(given.sinks, schedule)
    scale = given.q.shape[-1] ** -0.5 if given.scale is None else float(given.scale)
    return ScheduledCall(
        ring=given.ring,
        layout=given.layout,
        schedule=schedule,
        block=block,
        mask=mask,
        scale=scale,
        heads=heads,
        wants_lse=given.return_lse,
        rules=rules,
        validate=given.validate,
        sinks=sinks,
    )


def describe_arguments(given: Arguments, call: ScheduledCall) -> str:
    """Return a text that must be equal on all ranks.

    It contains a digest of the layout's runs, because two different layouts may have the same name.
    """
    q, k, v = given.q, given.k, given.v
    rules, modes = call.rules, given.modes or modes_of(given)
    dims = f"D={q.shape[3]}" if q.shape[3] == v.shape[3] else f"D={q.shape[3]} Dv={v.shape[3]}"
    sizes = f"B={q.shape[0]} H={q.shape[1]} K={k.shape[1]} {dims} {q.dtype}"
    sizes += "" if modes.autocast is None else f" autocast={modes.autocast}"
    ruled = (
        f" softcap={rules.softcap} dropout={rules.dropout} seed={rules.seed}" if rules.requirements else ""
    )
    options = f"{_describe_mask(call.mask)} scale={given.scale}{ruled} block={call.block.name}"
    options += "" if given.sinks is None else " sinks"
    layout = f"{call.layout!r} #{_digest(repr(call.layout.ranks))}"
    return f"{layout} {sizes} {options} schedule={call.schedule.name} gradients={modes.gradients}"


def _check_tensors(q: Any, k: Any, v: Any, ring: Ring, layout: Layout) -> None:
    """Raise an error for tensors that are not this rank's shards under the layout."""
    check_ring(ring)
    if not isinstance(layout, Layout):
        raise LayoutError("layout= a ringlab layout, such as zigzag(S, P)", repr(layout))
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.ndim != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            needed = f"{name} as a tensor (batch, heads, tokens, head dim)"
            raise ShapeError(needed, str(got), _to_four_axes(name, x))
    _check_kinds(named)
    layout.of_ranks(ring.world_size)
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise ShapeError("q (B, H, L, D), k (B, K, L, D) and v (B, K, L, Dv); Dv may differ from D", shapes)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            "query heads divisible by key/value heads",
            f"{q.shape[1]} and {k.shape[1]}",
            _to_fitting_heads(q.shape[1], k.shape[1]),
        )
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise ShapeError("head dims of at least 1", f"q {tuple(q.shape)}, v {tuple(v.shape)}")
    length = layout.length(ring.rank)
    for name, x in named.items():
        if x.shape[2] != length:
            raise ShapeError(
                f"{name} with the {length} tokens that rank {ring.rank} owns under {layout!r}",
                *_wrong_length(name, x, length, layout.S),
            )


def _check_kinds(named: dict[str, Tensor]) -> None:
    """Raise an error for tensors of different or unsupported dtypes, or on different devices."""
    q, k, v = named.values()
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        dtypes = {name: x.dtype for name, x in named.items()}
        raise DtypeError(
            "q, k and v of one floating point dtype", str(dtypes), "convert them with .to(dtype)"
        )
    if not q.device == k.device == v.device:
        devices = {name: str(x.device) for name, x in named.items()}
        raise DeviceError("q, k and v on one device", str(devices), "move them with .to(device)")


def _to_four_axes(name: str, x: Any) -> str:
    """Return the likely remedy for a value that is not a tensor of four axes."""
    if not isinstance(x, Tensor):
        return f"{name} = torch.as_tensor({name})"
    return {
        2: f"{name}[None, None] for (tokens, head dim) of one head",
        3: f"{name}[None] for (heads, tokens, head dim), {name}.transpose(0, 1)[None] for (tokens, heads, head dim); "
        f"{name}.unflatten(-1, (heads, -1)).transpose(1, 2) for (batch, tokens, heads · head dim)",
    }.get(x.ndim, "pass q, k and v as three tensors: unbind a packed tensor")


def _to_fitting_heads(H: int, K: int) -> str:
    """Return the likely remedy for K key/value heads that do not divide H query heads."""
    if H and K and K % H == 0:
        return "q has at least as many heads as k: were the two swapped?"
    fitting = ", ".join(str(n) for n in range(1, H + 1) if H % n == 0)
    return f"k and v whose number of heads divides {H}: {fitting}" if H else "tensors with heads on axis 1"


def _resolve_sinks(sinks: Tensor | None, schedule: Schedule) -> Tensor | None:
    """Return the sinks, detached from autograd.

    Raises: BackendError for a schedule that would ignore them.
    """
    if sinks is None:
        return None
    if not getattr(schedule, "takes_sinks", False):
        raise BackendError(
            "a schedule that takes sinks", f"'{schedule.name}', which does not", "use schedule='ring'"
        )
    return sinks.detach()


def _wrong_length(name: str, x: Tensor, length: int, S: int) -> tuple[str, str]:
    """Return (got, remedy) for a tensor that is not a shard of `length` tokens."""
    if x.shape[2] == S:
        return f"{S} tokens, the whole sequence", f"pass layout.shard({name}, ring.rank)"
    if x.shape[1] in (length, S):
        return (
            f"{x.shape[2]} tokens and {x.shape[1]} heads",
            f"tensors are (batch, heads, tokens, head dim): pass {name}.transpose(1, 2) if tokens come before heads",
        )
    return f"{x.shape[2]} tokens", "build the layout for this sequence length"


def _resolve_mask(causal: bool, mask: Mask | None, layout: Layout) -> Mask:
    """Return the mask that `causal=` and `mask=` describe. Raises: MaskError."""
    if mask is None:
        return as_mask(True if causal is CAUSAL else causal)
    if not isinstance(mask, Mask):
        raise MaskError("mask= a ringlab.Mask", f"a {type(mask).__name__}", "such as Mask(window=4096)")
    if not causal:
        raise MaskError("either causal= or mask=", "both", "pass mask=Mask(causal=False, …)")
    if causal is not CAUSAL and not mask.causal:
        needed = "causal= and mask= that agree"
        raise MaskError(needed, f"causal={causal!r} and Mask(causal=False)", "pass mask= alone")
    return mask.of_length(layout.S)


def _resolve_rules(softcap: float | None, dropout: float, seed: int | None) -> ScoreRules:
    """Return the score rules of the call. Raises: MaskError."""
    if dropout and seed is None:
        raise MaskError(
            "seed=, an integer, if there is dropout",
            "None",
            "pass the same seed on all ranks, and a different one for each layer and training step",
        )
    return ScoreRules(softcap, dropout, 0 if seed is None else seed)


def _describe_mask(mask: Mask) -> str:
    if mask.plain:
        return f"causal={mask.causal}"
    documents = f" documents={len(mask.documents)}" if mask.documents else ""
    return f"causal={mask.causal} window={mask.window}{documents} mask #{_digest(repr(mask))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
