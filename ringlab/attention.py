"""`ring_attention`: attention over a sequence that is spread over the ranks of a ring."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringlab.agreement import agree
from ringlab.blocks import choice, get_block
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring
from ringlab.errors import DeviceError, DtypeError, LayoutError, MaskError, ShapeError, WorldSizeError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.schedules import get_schedule
from ringlab.schedules.call import Call
from ringlab.schedules.protocol import Schedule
from ringlab.scores import Scores, check_scale


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring,
    layout: Layout,
    causal: bool = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout: float = ...,
    seed: int | None = ...,
    block: str | Block = ...,
    schedule: str | Schedule = ...,
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
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout: float = ...,
    seed: int | None = ...,
    block: str | Block = ...,
    schedule: str | Schedule = ...,
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
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    block: str | Block = "auto",
    schedule: str | Schedule = "ring",
    return_lse: bool = False,
    validate: bool = True,
) -> Any:
    """Return this rank's rows of softmax(scale·Q·Kᵀ)·V over the whole sequence; differentiable.

    q is (B, H, L, D), k and v are (B, K, L, D): this rank's shards under `layout`, H % K == 0,
    and K/V travel as they are, never repeated. `causal` is in global positions; `mask` says more, a
    window, a prefix, packed documents, and stands in its place: every block and schedule honours all of it.
    scale defaults to D^−½. `softcap` c makes scores c·tanh(s/c). `dropout` drops weights with this probability
    and divides the others by 1 − dropout; which ones follows from `seed`, 64 bits, and from batch, head and global
    positions, so that they are the same in backward and however the sequence is laid out (`ringlab.scores`). All
    blocks compute both; for "native" the tiles go to "blockwise", which is told in the trace.
    `block`: "native", "blockwise", "naive", "triton" or "auto", whose choice is told in
    the trace, or a block object, such as TritonBlock(precision="tf32x3") of
    `ringlab.blocks.triton`. `schedule`: how the ranks' tokens meet, one of `ringlab.schedules`: "ring",
    "allgather", "ulysses", "hybrid(ring=4, ulysses=2)", "double-ring(node=8)", or such an object.
    With `return_lse` the result is (out, lse), lse (B, H, L) a natural logarithm, not
    differentiable. `validate` makes the ranks compare their calls first, forward and backward (512 bytes each). Without
    it, all ranks must go back through several calls in one order, as `loss.backward()` does: in another, gradients of
    equal shapes meet the wrong call, and nothing tells.

    Raises: ShapeError, DtypeError, DeviceError, LayoutError, MaskError, WorldSizeError or BackendError on a
    rank that is called wrongly, AgreementError on all others, before any data moves.
    Source: arXiv 2310.01889.
    """
    error: Exception | None = None
    try:
        _check(q, k, v, ring, layout)
        check_scale(scale, q.dtype)
        seen, scores = _mask(causal, mask, layout), _scores(softcap, dropout, seed)
        chosen, plan = get_block(block, q, scores.wishes), get_schedule(schedule)
        plan.check(q.shape[1], k.shape[1], ring.world_size)
    except (ShapeError, DtypeError, DeviceError, LayoutError, WorldSizeError, ValueError) as raised:
        error = raised
    if validate and isinstance(ring, Ring):
        device = q.device if isinstance(q, Tensor) else "cpu"
        said = "" if error else _describe(q, k, v, layout, seen, scale, scores, chosen.name, plan.name)
        agree(ring.comm, said, error, device)
    elif error is not None:
        raise error
    if told := choice(block, chosen, scores.wishes):
        ring.comm.chose(*told)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    name = ring.comm.name_call()  # whether it is compared or not: the next one counts on
    heads = q.shape[1], k.shape[1]
    call = Call(ring, layout, chosen, seen, scale, heads, return_lse, scores, name if validate else "")
    out, lse = _RingAttention.apply(q, k, v, plan, call)
    return (out, lse) if return_lse else out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, call: Call
    ) -> tuple[Tensor, Tensor]:
        out, lse, kept = schedule.forward(call, q.detach(), k.detach(), v.detach())
        ctx.save_for_backward(*kept)
        ctx.schedule, ctx.call = schedule, call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call.name:
            agree(ctx.call.ring.comm, f"backward through {ctx.call.name}", None, dout.device)
        gradients = ctx.schedule.backward(ctx.call, ctx.saved_tensors, dout.contiguous())
        dq, dk, dv = (x.to(dout.dtype) for x in gradients)
        return dq, dk, dv, None, None


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
            raise ShapeError(
                f"{name} with the {length} tokens that rank {ring.rank} owns under {layout!r}",
                *_other_length(name, x, length, layout.S),
            )


def _other_length(name: str, x: Tensor, length: int, S: int) -> tuple[str, str]:
    """Return what came in the place of a shard of `length` tokens, and the remedy."""
    if x.shape[2] == S:
        return f"{S} tokens, the whole sequence", f"pass layout.shard({name}, ring.rank)"
    if x.shape[1] in (length, S):
        return (
            f"{x.shape[2]} tokens and {x.shape[1]} heads",
            f"tensors are (batch, heads, tokens, head dim): {name}.transpose(1, 2), if they lie the other way round",
        )
    return f"{x.shape[2]} tokens", "build the layout for this sequence length"


def _mask(causal: bool, mask: Mask | None, layout: Layout) -> Mask:
    """Return the mask that is meant. Raises: MaskError."""
    if mask is None:
        return Mask(causal=causal)
    if not isinstance(mask, Mask):
        raise MaskError("mask= a ringlab.Mask", f"a {type(mask).__name__}", "such as Mask(window=4096)")
    if not causal:
        raise MaskError("causal= left alone beside mask=", "both", "say Mask(causal=False, …)")
    return mask.of_length(layout.S)


def _scores(softcap: float | None, dropout: float, seed: int | None) -> Scores:
    """Return what becomes of scores. Raises: MaskError."""
    if dropout and seed is None:
        raise MaskError(
            "seed= beside dropout=, an integer",
            "none",
            "give all ranks the same, and another to each layer and training step",
        )
    return Scores(softcap, dropout, 0 if seed is None else seed)


def _check_kinds(named: dict[str, Tensor]) -> None:
    dtypes = {name: x.dtype for name, x in named.items()}
    if len(set(dtypes.values())) > 1 or not named["q"].is_floating_point():
        raise DtypeError(
            "q, k and v of one floating point dtype", str(dtypes), "convert them with .to(dtype)"
        )
    devices = {name: str(x.device) for name, x in named.items()}
    if len(set(devices.values())) > 1:
        raise DeviceError("q, k and v on one device", str(devices), "move them with .to(device)")


def _told(mask: Mask) -> str:
    """What is said of a mask: the flag alone where it says all."""
    if mask.plain:
        return f"causal={mask.causal}"
    digest = hashlib.sha256(repr(mask).encode()).hexdigest()[:12]
    documents = f" documents={len(mask.documents)}" if mask.documents else ""
    return f"causal={mask.causal} window={mask.window}{documents} mask #{digest}"


def _describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    mask: Mask,
    scale: float | None,
    scores: Scores,
    block: str,
    schedule: str,
) -> str:
    """What must be equal on all ranks."""
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    sizes = f"B={q.shape[0]} H={q.shape[1]} K={k.shape[1]} D={q.shape[3]} {q.dtype}"
    more = f" softcap={scores.softcap} dropout={scores.dropout} seed={scores.seed}" if scores.wishes else ""
    how = f"{_told(mask)} scale={scale}{more} block={block} schedule={schedule} gradients={grad}"
    digest = hashlib.sha256(repr(layout.ranks).encode()).hexdigest()[:12]  # names may be equal by chance
    return f"{layout!r} #{digest} {sizes} {how}"
