"""`ring_attention`: attention over a sequence that is spread over the ranks of a ring."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringlab.agreement import agree
from ringlab.blocks import get_block
from ringlab.blocks.protocol import Block
from ringlab.comm.protocol import side_by_side
from ringlab.comm.ring import Ring
from ringlab.errors import DeviceError, DtypeError, LayoutError, ShapeError, WorldSizeError
from ringlab.layout import Layout
from ringlab.merge import state_dtype
from ringlab.schedules import backward, forward, get_schedule
from ringlab.schedules.call import Call, Saved
from ringlab.schedules.protocol import Schedule


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring,
    layout: Layout,
    causal: bool = ...,
    scale: float | None = ...,
    block: str | Block = ...,
    schedule: str = ...,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
) -> Tensor: ...


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring,
    layout: Layout,
    causal: bool = ...,
    scale: float | None = ...,
    block: str | Block = ...,
    schedule: str = ...,
    return_lse: Literal[True],
    validate: bool = ...,
) -> tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring,
    layout: Layout,
    causal: bool = True,
    scale: float | None = None,
    block: str | Block = "auto",
    schedule: str = "ring",
    return_lse: bool = False,
    validate: bool = True,
) -> Any:
    """Return this rank's rows of softmax(scale·Q·Kᵀ)·V over the whole sequence; differentiable.

    q is (B, H, L, D), k and v are (B, K, L, D): this rank's shards under `layout`, H % K == 0,
    and K/V travel as they are, never repeated. `causal` is in global positions. scale defaults to
    D^−½. `block`: "native", "blockwise", "naive", "triton" or "auto", whose choice is told in
    the trace, or a block object, such as TritonBlock(precision="tf32x3") of
    `ringlab.blocks.triton`. `schedule`: "ring" or "allgather".
    With `return_lse` the result is (out, lse), lse (B, H, L) a natural logarithm, not
    differentiable. `validate` makes the ranks compare their calls first (512 bytes each).

    Raises: ShapeError, DtypeError, DeviceError, LayoutError, WorldSizeError or BackendError on a
    rank that is called wrongly, AgreementError on all others, before any data moves.
    Source: arXiv 2310.01889.
    """
    error: Exception | None = None
    try:
        _check(q, k, v, ring, layout)
        _check_scale(scale, q.dtype)
        chosen, plan = get_block(block, q), get_schedule(schedule)
    except (ShapeError, DtypeError, DeviceError, LayoutError, WorldSizeError, ValueError) as raised:
        error = raised
    if validate and isinstance(ring, Ring):
        device = q.device if isinstance(q, Tensor) else "cpu"
        said = "" if error else _describe(q, k, v, layout, causal, scale, chosen.name, schedule)
        agree(ring.comm, said, error, device)
    elif error is not None:
        raise error
    if block == "auto":
        ring.comm.chose("block='auto'", chosen.name)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    call = Call(ring, layout, chosen, bool(causal), scale)
    out, lse = _RingAttention.apply(q, k, v, plan, call)
    return (out, lse) if return_lse else out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, call: Call
    ) -> tuple[Tensor, Tensor]:
        partial = forward(schedule, call, q.detach(), k.detach(), v.detach())
        out, lse = partial.out.to(q.dtype), partial.lse
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.schedule, ctx.call = schedule, call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout.contiguous()
        delta = ctx.call.ring.compute("delta", _delta, dout, out)
        saved = Saved(q, out, lse, dout, delta)
        dq, dk, dv = backward(ctx.schedule, ctx.call, saved, k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


@side_by_side
def _delta(dout: Tensor, out: Tensor) -> Tensor:
    """rowsum(dout·out), in the state dtype."""
    dtype = state_dtype(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(dim=-1)


def _check(q: Any, k: Any, v: Any, ring: Ring, layout: Layout) -> None:
    """Raise what is wrong with this rank's arguments, if anything is."""
    if not isinstance(ring, Ring):
        raise WorldSizeError(
            "ring= a ringlab.Ring", repr(ring), "use the one that your program is called with"
        )
    if not isinstance(layout, Layout):
        raise LayoutError("layout= a ringlab layout, such as zigzag(S, P)", repr(layout))
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.ndim != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"{name} as a tensor (batch, heads, tokens, head dim)", str(got))
    _check_kinds(named)
    if layout.P != ring.world_size:
        raise WorldSizeError(f"a layout for {ring.world_size} ranks", repr(layout))
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape != v.shape:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
        raise ShapeError("q (B, H, L, D), and k and v both (B, K, L, D)", shapes)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError("query heads divisible by key/value heads", f"{q.shape[1]} and {k.shape[1]}")
    if q.shape[3] == 0:
        raise ShapeError("a head dim of at least 1", f"q {tuple(q.shape)}")
    length = layout.length(ring.rank)
    for name, x in named.items():
        if x.shape[2] != length:
            whole = x.shape[2] == layout.S
            raise ShapeError(
                f"{name} with the {length} tokens that rank {ring.rank} owns under {layout!r}",
                f"{x.shape[2]} tokens" + (", the whole sequence" if whole else ""),
                f"pass layout.shard({name}, ring.rank)"
                if whole
                else "build the layout for this sequence length",
            )


def _check_scale(scale: Any, dtype: torch.dtype) -> None:
    """Raise unless `scale` is finite in the dtype that scores of tensors of `dtype` have."""
    if scale is None:
        return
    of_scores = state_dtype(dtype)
    largest = torch.finfo(of_scores).max
    if not (isinstance(scale, (int, float)) and -largest <= scale <= largest):  # NaN is not between them
        raise DtypeError(f"scale= a number that is finite in {of_scores}, or None for D^−½", repr(scale))


def _check_kinds(named: dict[str, Tensor]) -> None:
    dtypes = {name: x.dtype for name, x in named.items()}
    if len(set(dtypes.values())) > 1 or not named["q"].is_floating_point():
        raise DtypeError(
            "q, k and v of one floating point dtype", str(dtypes), "convert them with .to(dtype)"
        )
    devices = {name: str(x.device) for name, x in named.items()}
    if len(set(devices.values())) > 1:
        raise DeviceError("q, k and v on one device", str(devices), "move them with .to(device)")


def _describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    causal: bool,
    scale: float | None,
    block: str,
    schedule: str,
) -> str:
    """What must be equal on all ranks."""
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    sizes = f"B={q.shape[0]} H={q.shape[1]} K={k.shape[1]} D={q.shape[3]} {q.dtype}"
    how = f"causal={bool(causal)} scale={scale} block={block} schedule={schedule} gradients={grad}"
    digest = hashlib.sha256(repr(layout.ranks).encode()).hexdigest()[:12]  # names may be equal by chance
    return f"{layout!r} #{digest} {sizes} {how}"
