"""`ring_attention`: attention over a sequence that is spread over the ranks of a ring.

Its stages, in call order:

1. check     this rank's arguments, and fill in every default             `ringlab.arguments`
2. agree     with all ranks on the call; a wrong one raises on all        `ringlab.agreement`
3. record    the block backend that computes, in the trace                `ringlab.blocks`
4. forward   blocks arrive, rows attend to them, (out, lse) is saved      `ringlab.schedules`
5. backward  blocks arrive again, their gradients return to the owners    `ringlab.schedules.block_schedule`

`ringlab.plain_ring` is the same algorithm in one file: read it first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ringlab.agreement import agree, checked_over
from ringlab.arguments import CAUSAL, Arguments, check_arguments, describe_arguments
from ringlab.blocks import block_choice
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.modes import (
    as_autocast,
    differentiable_once,
    refuse_transforms,
    without_autocast,
    witness,
)
from ringlab.schedules.call import Call
from ringlab.schedules.protocol import Gradients, Schedule
from ringlab.types import KeyValue, Query, Sinks, Travelling, Value


@overload
def ring_attention(
    q: Query,
    k: KeyValue,
    v: Value,
    *,
    ring: Ring,
    layout: Layout,
    causal: bool = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout: float = ...,
    seed: int | None = ...,
    sinks: Sinks | None = ...,
    block: str | Block = ...,
    schedule: str | Schedule = ...,
    return_lse: Literal[False] = ...,
    validate: bool = ...,
    position_ids: Int[Tensor, " Lq"] | None = ...,
) -> Tensor: ...


@overload
def ring_attention(
    q: Query,
    k: KeyValue,
    v: Value,
    *,
    ring: Ring,
    layout: Layout,
    causal: bool = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout: float = ...,
    seed: int | None = ...,
    sinks: Sinks | None = ...,
    block: str | Block = ...,
    schedule: str | Schedule = ...,
    return_lse: Literal[True],
    validate: bool = ...,
    position_ids: Int[Tensor, " Lq"] | None = ...,
) -> tuple[Tensor, Tensor]: ...


def ring_attention(
    q: Query,
    k: KeyValue,
    v: Value,
    *,
    ring: Ring,
    layout: Layout,
    causal: bool = CAUSAL,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    sinks: Sinks | None = None,
    block: str | Block = "auto",
    schedule: str | Schedule = "ring",
    return_lse: bool = False,
    validate: bool = True,
    position_ids: Int[Tensor, " Lq"] | None = None,
) -> Any:
    """Return this rank's rows of softmax(scale·Q·Kᵀ)·V over the whole sequence; differentiable.

    q, k, v: this rank's shards under `layout`, (B, H, L, D) and twice (B, K, L, D) with H % K == 0. K/V travel as they
    are, never repeated for query heads. v may have another head dim, as with latent attention; out has that of v. Under
    autocast they are cast as torch's own attention casts them. Heads and tokens in each other's place are noticed only if
    their numbers differ.
    causal: query i sees keys j ≤ i, in global positions.
    mask: in place of `causal`, a window, a prefix or packed documents; every block and schedule honours all of it.
    scale: D^−½ by default.
    softcap: scores s become softcap·tanh(s/softcap).
    dropout: weights are dropped with this probability and the others divided by 1 − dropout. Which ones follows from
    `seed`, a 64-bit integer, and from batch, head and global positions (`ringlab.scores`): the same in backward and
    under every layout.
    sinks: (H,) logits, one of each query head, that take weight and give no value; lse counts them. They are neither scaled
    nor capped. All ranks pass the same ones, and each has a part of their gradient: sum it over the ranks.
    block: "native", "blockwise", "naive", "triton", or "auto", whose choice is recorded in the trace; or a block
    object such as TritonBlock(precision="tf32x3"). All of them compute softcap and dropout; for "native" those tiles go
    to "blockwise", which is recorded too.
    schedule: how rows and K/V blocks meet, one of `ringlab.schedules`: "ring", "allgather", "ulysses",
    "hybrid(ring=4, ulysses=2)", "double-ring(node=8)", "query-ring", "burst", "bidirectional", "multi-ring(rings=4)"; or a
    schedule object.
    return_lse: return (out, lse), lse (B, H, L) a natural logarithm, differentiable too. After a loss on lse, such as a z-loss,
    the backward of block="native" is computed by "blockwise".
    validate: whether the ranks compare their calls first, forward and backward, by messages of 512 bytes. Without it, all
    ranks must go back through several calls in the same order, as `loss.backward()` does: gradients of equal shapes would
    otherwise reach the wrong call unnoticed.
    position_ids: the positions by which q and k were rotated, global or in their documents, if they are to be compared with those
    that the layout gives this rank. Tensors do not say whose tokens they are: those of another rank, or cut by another layout
    of equal lengths, are noticed only so.

    Derivatives are first ones, backward: torch.compile ends its graphs here, and GradientError refuses the rest.

    Raises: ShapeError, DtypeError, DeviceError, LayoutError, MaskError, WorldSizeError, BackendError or GradientError on a
    rank that is called wrongly, AgreementError on all others, before any data moves.
    Source: arXiv 2310.01889.

    >>> import torch
    >>> import ringlab
    >>> layout = ringlab.zigzag(16, 2)
    >>> q, k, v = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    >>> def program(ring):
    ...     return ring_attention(*layout.shard((q, k, v), ring.rank), ring=ring, layout=layout)
    >>> out = layout.unshard(ringlab.VirtualCluster(2).run(program).results)
    >>> torch.allclose(out.double(), torch.from_numpy(ringlab.oracle.attention(q, k, v, causal=True).out), atol=1e-5)
    True
    """
    attend = _outside_graphs if torch.compiler.is_compiling() else _attend
    return attend(
        q, k, v, ring, layout, causal, mask, scale, softcap, dropout, seed, sinks, block, schedule,
        return_lse, validate, position_ids,
    )  # fmt: skip


def _attend(q: Any, k: Any, v: Any, *options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Return what `ring_attention` returns, for its arguments in its order."""
    given = Arguments(*as_autocast(q, k, v), *options)

    def check() -> tuple[tuple[Schedule, Call], str]:
        refuse_transforms(given.q, given.k, given.v)
        chosen = check_arguments(given)
        return chosen, describe_arguments(given, *chosen) if given.validate else ""

    chosen_schedule, call = checked_over(given.ring, check, given.q, given.validate)
    call = named(call)
    record_block(given, call)
    qkv, sinks = (given.q, given.k, given.v), given.sinks
    out, lse = apply_attention(*qkv, chosen_schedule, call, *(() if sinks is None else (sinks,)))
    return (out, lse) if given.return_lse else out


_outside_graphs = torch._disable_dynamo(_attend)
"""`_attend`, before and after which torch.compile ends a graph, because attention over a ring communicates.

As torch.compiler.disable, but without loading the compiler, two seconds, in programs that compile nothing.
"""


def named(call: Call) -> Call:
    """Return the call with a name of its own on all ranks."""
    return replace(
        call, name=call.ring.comm.name_call()
    )  # counted in every call: the ranks' counts must not differ


def record_block(given: Arguments, call: Call) -> None:
    """Record in the trace the block that computes, if the caller did not name it."""
    if choice := block_choice(given.block, call.block, call.rules.requirements):
        call.ring.comm.chose(*choice)


def apply_attention(
    q: Query, k: Travelling, v: Travelling, schedule: Schedule, call: Call, *weights: Float[Tensor, "..."]
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's rows, differentiable in q, k, v and `weights`: the sinks, or those of an expansion.

    lse is empty where nobody asked for it and it would have to be sent.
    """
    cause = witness(q, k, v, *weights)
    out, lse = _RingAttention.apply(q, k, v, schedule, call, cause, *weights)
    return out, lse


class _RingAttention(torch.autograd.Function):
    """The differentiable part: the schedule's forward and backward, and the tensors saved between them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Query,
        k: Tensor,
        v: Tensor,
        schedule: Schedule,
        call: Call,
        empty: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(q.device.type):
            out, lse, saved = schedule.forward(call, q.detach(), k.detach(), v.detach())
        ctx.save_for_backward(*saved, empty, *weights)  # the weights, so that autograd notices if they change
        ctx.saved_count = len(saved)
        ctx.schedule, ctx.call = schedule, call
        ctx.set_materialize_grads(False)  # backward must see whether lse has a gradient
        # A block may return a view, as of heads that it split. Autograd would let no caller write into that, as a residual does.
        out = out.clone() if out._is_view() else out
        if call.wants_lse:
            lse = lse.clone()  # the caller may change it, and backward needs it as it is
        else:
            ctx.mark_non_differentiable(lse)
        ctx.no_gradient = partial(torch.zeros, out.shape, dtype=out.dtype, device=out.device)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        given, call = ctx.no_gradient() if dout is None else dout, ctx.call
        tensors = ctx.saved_tensors  # once: a checkpoint unpacks them at each look
        saved, empty = tensors[: ctx.saved_count], tensors[ctx.saved_count]
        with torch.no_grad(), without_autocast(given.device.type):
            agree_on_backward(call, given.device)
            if call.expansion is not None:
                call = replace(call, expansion=call.expansion.begin_backward())
            made = Gradients(*ctx.schedule.backward(call, saved, given.contiguous(), dlse))
            of_weights = () if call.expansion is None else call.expansion.weight_gradients()
            gradients = tuple(x.to(given.dtype) for x in (*made[:3], *of_weights))
        gradients += () if made.dsinks is None else (made.dsinks,)
        dq, dk, dv, *rest = differentiable_once(gradients, empty, dout, dlse)
        return dq, dk, dv, None, None, None, *rest


def agree_on_backward(call: Call, device: torch.device) -> None:
    """Return once all ranks go back through the same call. Raises: AgreementError if they do not."""
    if call.validate:
        agree(call.ring.comm, f"backward through {call.name}", None, device)
