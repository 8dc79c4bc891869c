"""`ring_attention`: attention over a sequence that is spread over the ranks of a ring.

`_attend` calls the stages in order. Each stage passes a `ScheduledCall` to the next one:

validate   checks this rank's arguments and fills in every default            `ringlab.arguments`
agree      compares all ranks' calls; if one is wrong, all raise an error     `ringlab.rank_agreement`
plan       names the call and records its block backend in the trace          `ringlab.blocks`
run        lets this rank's rows attend to each K/V block that arrives        `ringlab.schedules`
save       saves what backward needs                                          `_RingAttention`

`_RingAttention.backward` loads the tensors that forward saved, and passes through `agree` and `run` again.
The gradients that it returns raise an error if they are differentiated again.

`ringlab.plain_ring` is the same algorithm in one file: read it first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ringlab.arguments import CAUSAL, Arguments, Modes, check_arguments, describe_arguments, modes_of
from ringlab.blocks import record_block
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring
from ringlab.handles import Handled, handle_of, object_of
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.merge import state_dtype
from ringlab.rank_agreement import agree, compared_over, errors_told
from ringlab.schedules.protocol import ForwardResult, Gradients, Schedule, ScheduledCall
from ringlab.torch_modes import (
    as_autocast,
    differentiable_once,
    ends_graphs,
    graph_anchor,
    owned,
    refuse_second_derivatives,
    refuse_transforms,
    ticket_of,
    without_autocast,
)
from ringlab.types import BlockTensor, KeyValue, Out, Query, RowState, Sinks, Value


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
    """Return this rank's rows of softmax(scale·Q·Kᵀ)·V over the whole sequence. They are differentiable.

    q, k, v: this rank's shards under `layout`. q is (B, H, L, D), k and v are (B, K, L, D) with H % K == 0.
    K/V are sent with their K heads, never repeated for query heads. The head dim of v may differ from that of
    k, as in latent attention; out has the head dim of v. Under autocast, q, k and v are cast as torch's own attention
    casts them. Swapped axes of heads and tokens are noticed only if their sizes differ.
    causal: query i sees keys j ≤ i, in global positions.
    mask: in place of `causal`, a mask with a window, a prefix or packed documents. Every block and schedule
    supports every mask.
    scale: D^−½ by default.
    softcap: scores s become softcap·tanh(s/softcap).
    dropout: each weight is dropped with this probability, and the weights that stay are divided by 1 −
    dropout. The dropped weights are drawn from `seed`, a 64-bit integer, and from batch, head and global
    positions (`ringlab.scores`), so they are the same in backward and under every layout.
    sinks: (H,) logits, one for each query head, that take weight but contribute no value. lse includes the
    sinks. They are neither scaled nor capped. All ranks pass the same sinks. The gradient on each rank is
    only that rank's part: sum it over the ranks.
    block: "native", "blockwise", "naive", "triton", "cudnn", "flash", "flex", or "auto", whose choice is
    recorded in the trace; or a block object such as TritonBlock(precision="tf32x3"). All blocks support
    softcap, and all but "flex" support dropout. With softcap or dropout, "native", "cudnn" and "flash" let
    "blockwise" compute all tiles, which is also recorded in the trace. "flash" is the newest installed version
    of flash-attn that supports the tensors.
    schedule: how rows and K/V blocks meet, one of `ringlab.schedules`: "ring", "allgather", "ulysses",
    "hybrid(ring=4, ulysses=2)", "double-ring(node=8)", "query-ring", "burst", "bidirectional",
    "multi-ring(rings=4)"; or a schedule object.
    return_lse: return (out, lse). lse is (B, H, L), a natural logarithm, and differentiable. After a loss on
    lse, such as a z-loss, the backward of "native", "cudnn" and "flash" is computed by "blockwise".
    validate: whether the ranks compare their calls before each forward and each backward, by messages of 512 bytes.
    Each comparison makes Python wait for log2(P) exchanges on the CPU. Without validation, all ranks must run the
    backwards of several calls in the same order, as `loss.backward()` does. In another order, gradients of equal
    shapes could reach the wrong call without an error. With `return_lse`, the backward of Ulysses and of hybrids
    always makes Python wait: the U ranks that share heads find out whether any of them has a gradient of lse, by
    log2(U) exchanges of one byte per rank.
    position_ids: the positions by which q and k were rotated, global or in their documents. If they are
    passed, they are compared with the positions that the layout gives this rank. A tensor does not show
    which tokens it contains, so only this comparison notices tokens of another rank, or of another layout
    with equal lengths.

    Only first derivatives by backward are supported. Other derivatives raise GradientError. torch.compile makes the
    call one operator of its graph; a block or schedule object that is not `ringlab.handles.Handled` ends the
    graph.

    Raises: before any data moves, ShapeError, DtypeError, DeviceError, LayoutError, MaskError,
    WorldSizeError, BackendError or GradientError on a rank with wrong arguments, and AgreementError on all
    other ranks.
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
    given = Arguments(
        q=q, k=k, v=v, ring=ring, layout=layout, causal=causal, mask=mask, scale=scale, softcap=softcap,
        dropout=dropout, seed=seed, sinks=sinks, block=block, schedule=schedule, return_lse=return_lse,
        validate=validate, position_ids=position_ids,
    )  # fmt: skip
    traced = torch.compiler.is_dynamo_compiling() and _fits_a_graph(given)
    return _in_graph(given) if traced else _attend(given)


@ends_graphs
def _attend(given: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """Return the result of `ring_attention` by calling its stages, one after the other."""
    q, k, v = as_autocast(given.q, given.k, given.v)
    given = replace(given, q=q, k=k, v=v)
    call = begin(given)
    out, lse = run(call, q, k, v, *(() if given.sinks is None else (given.sinks,)))
    return (out, lse) if given.return_lse else out


def begin(given: Arguments) -> ScheduledCall:
    """Return this rank's call, checked and planned. No data has moved yet."""
    with errors_told(compared_over(given.ring, given.validate)):
        call = validate(given)
    agree_on(call, call.description)
    return plan_call(call, given.block)


def validate(given: Arguments) -> ScheduledCall:
    """Return this rank's checked call, with a description if it will be compared with the other ranks' calls.

    Raises: GradientError inside transforms of torch, and the errors of `check_arguments`.
    """
    refuse_transforms(given.q, given.k, given.v)
    call = check_arguments(given)
    compared = call.validate and call.ring.world_size > 1
    return replace(call, description=describe_arguments(given, call)) if compared else call


def agree_on(call: ScheduledCall, description: str) -> None:
    """Wait until all ranks have sent the same `description`. Without validation, do nothing.

    Raises: AgreementError if the descriptions differ.
    """
    if call.validate:
        agree(call.ring.comm, description, None)


def plan_call(call: ScheduledCall, block: str | Block) -> ScheduledCall:
    """Return the call with a unique name, equal on all ranks, and record the block that "auto" chose."""
    record_block(call.ring.comm, block, call.block, call.rules.requirements)
    # Name the call even if no trace needs the name, so that all ranks count the same calls.
    return replace(call, name=call.ring.comm.name_call())


def run(
    call: ScheduledCall, q: Query, k: BlockTensor, v: BlockTensor, *weights: Float[Tensor, "..."]
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's rows, differentiable in q, k, v and `weights`.

    weights: the sinks, or the weights of an expansion. If the caller did not ask for lse, it is empty under
    schedules that would have to send it.
    """
    out, lse = _RingAttention.apply(call, graph_anchor(q, k, v, *weights), q, k, v, *weights)
    return out, lse


class _RingAttention(torch.autograd.Function):
    """The differentiable part of a call. Its gradients raise an error if they are differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, call: ScheduledCall, anchor: Tensor | None, q: Query, k: Tensor, v: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        result = run_forward(call, q, k, v)
        return _save(ctx, call, anchor, result, weights)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call, anchor, saved = _load(ctx)
        given = ctx.no_gradient() if dout is None else dout
        with torch.no_grad():
            agree_on(call, f"backward through {call.name}")
        gradients = run_backward(call, saved, given, dlse)
        # One gradient for each argument of `apply`: call, anchor, then q, k, v and the weights.
        return None, None, *differentiable_once(gradients, anchor, dout, dlse)


def run_forward(call: ScheduledCall, q: Query, k: BlockTensor, v: BlockTensor) -> ForwardResult:
    """Return (out, lse, tensors to save) of this rank's rows."""
    with without_autocast(q.device.type):
        return ForwardResult(*call.schedule.forward(call, q.detach(), k.detach(), v.detach()))


def _save(
    ctx: Any, call: ScheduledCall, anchor: Tensor | None, result: ForwardResult, weights: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Save the tensors that backward needs, and return (out, lse), which the caller may write into."""
    out, lse, saved = result
    ctx.call, ctx.saved_count = call, len(saved)
    ctx.save_for_backward(*saved, anchor, *weights)  # autograd notices if saved weights change
    ctx.set_materialize_grads(False)  # backward must see whether lse has a gradient
    ctx.no_gradient = partial(torch.zeros, out.shape, dtype=out.dtype, device=out.device)
    if not call.wants_lse:
        ctx.mark_non_differentiable(lse)
    # A block may return a view, such as one of split heads. Autograd would not
    # let the caller change such a view in place, for example to add a residual.
    out = out.clone() if out._is_view() else out
    return out, lse.clone() if call.wants_lse else lse  # backward needs the saved lse unchanged


def _load(ctx: Any) -> tuple[ScheduledCall, Tensor | None, tuple[Tensor, ...]]:
    """Return what `_save` saved: the call, the anchor, and the tensors of the schedule."""
    tensors = ctx.saved_tensors  # read once: a checkpoint unpacks the tensors at every access
    return ctx.call, tensors[ctx.saved_count], tensors[: ctx.saved_count]


def run_backward(
    call: ScheduledCall, saved: tuple[Shaped[Tensor, "..."], ...], dout: Out, dlse: RowState | None
) -> tuple[Float[Tensor, "..."], ...]:
    """Return the gradients of q, k, v and of the weights of `run`."""
    with torch.no_grad(), without_autocast(dout.device.type):
        if call.expansion is not None:
            call = replace(call, expansion=call.expansion.begin_backward())
        made = Gradients(*call.schedule.backward(call, saved, dout.contiguous(), dlse))
        of_weights = () if call.expansion is None else call.expansion.weight_gradients()
        gradients = tuple(x.to(dout.dtype) for x in (made.dq, made.dk, made.dv, *of_weights))
    return gradients if made.dsinks is None else (*gradients, made.dsinks)


# Under torch.compile, a call is one operator of the graph. Its kernel passes through the same stages while the graph
# runs, so ranks agree on every call. Outside torch.compile there is no operator, because dispatch modes, such as
# memory meters and selective checkpoints, would then see attention as a whole instead of its parts.


def _fits_a_graph(given: Arguments) -> bool:
    """Return whether the operator can take these arguments.

    Otherwise the graph ends before the call, and `_attend` may raise an error.
    """
    tensors = (given.q, given.k, given.v)
    return all(
        isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point() for x in tensors
    ) and options_fit_a_graph(given)


def options_fit_a_graph(given: Arguments) -> bool:
    """Return whether an operator can take these arguments besides q, k and v. This function is traced."""
    objects = (given.ring, given.layout)
    named = (given.block, given.schedule)
    numbers = (given.scale, given.softcap)
    return (
        all(x is None or isinstance(x, Tensor) for x in (given.sinks, given.position_ids))
        and all(isinstance(x, Handled) for x in objects)
        and (given.mask is None or isinstance(given.mask, Handled))
        and all(isinstance(x, (str, Handled)) for x in named)
        and all(x is None or isinstance(x, (int, float)) for x in numbers)
        and isinstance(given.dropout, (int, float))
        and (given.seed is None or (isinstance(given.seed, int) and 0 <= given.seed < 1 << 64))
        and (given.causal is CAUSAL or isinstance(given.causal, bool))
    )


def _in_graph(given: Arguments) -> Tensor | tuple[Tensor, Tensor]:
    """Return the result of `ring_attention` from the operator. This function is traced."""
    q, k, v = as_autocast(given.q, given.k, given.v)
    modes = modes_of(given)
    seed = given.seed
    if seed is not None and seed >= 1 << 63:
        seed -= 1 << 64  # operators take signed numbers of 64 bits
    out, lse, _ = torch.ops.ringlab.attention(
        [q, k, v] if given.sinks is None else [q, k, v, given.sinks], given.position_ids, *in_numbers(given),
        given.scale, given.softcap, given.dropout, seed, given.return_lse, given.validate, modes.gradients,
        modes.autocast,
    )  # fmt: skip
    return (out, lse) if given.return_lse else out


def in_numbers(given: Arguments) -> tuple[list[int], str, str, bool | None]:
    """Return a call's objects, block, schedule and `causal` in the form in which an operator takes them.

    This function is traced. `from_numbers` is its inverse.
    """
    block, schedule = (x if isinstance(x, str) else "" for x in (given.block, given.schedule))
    handles = [handle_of(x) for x in (given.ring, given.layout, given.mask, given.block, given.schedule)]
    return handles, block, schedule, None if given.causal is CAUSAL else given.causal


def from_numbers(handles: list[int], block: str, schedule: str, causal: bool | None) -> dict[str, Any]:
    """Return the arguments, by name, from which `in_numbers` made these values."""
    ring, layout, mask, own_block, own_schedule = map(object_of, handles)
    return {
        "ring": ring, "layout": layout, "mask": mask, "block": block or own_block,
        "schedule": schedule or own_schedule, "causal": CAUSAL if causal is None else causal,
    }  # fmt: skip


class _Kept(Handled):
    """The objects that a call's forward keeps for its backward.

    saved: the tensors that the schedule saved. The graph itself saves (out, q, k, v, sinks), so each of
    these tensors is replaced by its index in this tuple. The compiler does not know of references that are kept
    here, and may write into the memory of the five tensors before backward. A view of one of them, such as the
    sinks of some heads, is therefore replaced by a copy.
    """

    def __init__(self, call: ScheduledCall, saved: tuple[Tensor, ...], places: tuple[Tensor, ...]) -> None:
        self.call = call
        self.saved = [_index_or_own(x, places) for x in saved]

    def tensors(self, places: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors that the schedule saved, given the tensors of the graph."""
        return tuple(places[x] if isinstance(x, int) else x for x in self.saved)


def _index_or_own(x: Tensor, places: tuple[Tensor, ...]) -> int | Tensor:
    """Return the index of `x` in `places`. If `x` is not there, return `x`, or a copy if `x` is a view of a place."""
    if found := [number for number, place in enumerate(places) if x.is_set_to(place)]:
        return found[0]
    memory = x.untyped_storage().data_ptr()
    return x.clone() if any(place.untyped_storage().data_ptr() == memory for place in places) else x


@torch.library.custom_op(
    "ringlab::attention",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),  # it sends messages, and plans on the CPU
    schema="(Tensor[] tensors, Tensor? position_ids, SymInt[] handles, str block, str schedule, bool? causal,"
    " float? scale, float? softcap, float dropout, SymInt? seed, bool return_lse, bool validate, bool gradients,"
    " ScalarType? autocast) -> (Tensor out, Tensor lse, Tensor ticket)",
)
def _operator(
    tensors: list[Tensor], position_ids: Tensor | None, handles: list[int], block: str, schedule: str,
    causal: bool | None, scale: float | None, softcap: float | None, dropout: float, seed: int | None,
    return_lse: bool, validate: bool, gradients: bool, autocast: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the results of `run_in_graph`. tensors: q, k, v and the sinks, if there are any."""
    q, k, v, *sinks = (x.detach() for x in tensors)
    call = begin(Arguments(
        q=q, k=k, v=v, scale=scale, softcap=softcap, dropout=dropout, seed=None if seed is None else seed % (1 << 64),
        sinks=sinks[0] if sinks else None, return_lse=return_lse, validate=validate, position_ids=position_ids,
        modes=Modes(gradients, autocast), **from_numbers(handles, block, schedule, causal),
    ))  # fmt: skip
    return run_in_graph(call, return_lse, q, k, v)


def run_in_graph(
    call: ScheduledCall, return_lse: bool, q: Query, k: BlockTensor, v: BlockTensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of an operator: out, lse if it is asked for, and the ticket of a `_Kept`."""
    out, lse, saved = run_forward(call, q, k, v)
    kept = _Kept(call, saved, (out, q, k, v, *(() if call.sinks is None else (call.sinks,))))
    # Backward needs the saved lse unchanged, so the caller gets a copy.
    lse = lse.clone(memory_format=torch.contiguous_format) if return_lse else lse.new_empty(0)
    return owned(out), lse, ticket_of(kept)


def shapes_in_graph(q: Query, value_dim: int, return_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors shaped like the results of `run_in_graph`. value_dim: the head dim of v."""
    lse = q.new_empty(q.shape[:-1] if return_lse else (0,), dtype=state_dtype(q.dtype))
    return q.new_empty((*q.shape[:-1], value_dim)), lse, torch.empty((), dtype=torch.int64, device="cpu")


@_operator.register_fake
def _shapes(tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, *_ = tensors
    return shapes_in_graph(q, v.shape[-1], options[9])


def differentiate_in_graph(operator: Any, return_lse: int, arguments: int) -> None:
    """Register the gradients of an operator that returns the results of `run_in_graph`.

    operator: its first argument is the list of the tensors of `run`. return_lse: the place of the argument
    that says whether lse is asked for. arguments: how many arguments there are.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        out, lse, ticket = output
        ctx.save_for_backward(ticket, out, *inputs[0])
        if not inputs[return_lse]:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # backward must see whether lse has a gradient

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
        ticket, out, *tensors = ctx.saved_tensors
        given = torch.zeros_like(out) if dout is None else dout
        gradients = torch.ops.ringlab.attention_backward(given, dlse, ticket, out, tensors)
        return gradients, *(None,) * (arguments - 1)

    operator.register_autograd(backward, setup_context=save)


differentiate_in_graph(_operator, return_lse=10, arguments=14)


@torch.library.custom_op(
    "ringlab::attention_backward",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),  # it sends messages, and plans on the CPU
    schema="(Tensor dout, Tensor? dlse, Tensor ticket, Tensor out, Tensor[] tensors) -> Tensor[]",
)
def _backward_operator(
    dout: Tensor, dlse: Tensor | None, ticket: Tensor, out: Tensor, tensors: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of `tensors`, the tensors that were passed to `run`."""
    kept = object_of(int(ticket))
    with torch.no_grad():
        agree_on(kept.call, f"backward through {kept.call.name}")
        given = [x.detach() for x in tensors]
        saved, call = kept.tensors((out, *given)), kept.call
        if call.expansion is not None:
            call = replace(call, expansion=call.expansion.with_weights(*given[3:]))
        elif call.sinks is not None:
            call = replace(call, sinks=given[3])
    return [owned(x) for x in run_backward(call, saved, dout, dlse)]


@_backward_operator.register_fake
def _shapes_of_gradients(
    dout: Tensor, dlse: Tensor | None, ticket: Tensor, out: Tensor, tensors: list[Tensor]
) -> list[Tensor]:
    return [x.new_empty(x.shape, dtype=dout.dtype) for x in tensors]


_backward_operator.register_autograd(refuse_second_derivatives)
