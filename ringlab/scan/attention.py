"""`linear_attention`: linear attention and the gated delta rule over a sequence spread over a ring.

A state passes from token to token, and so from rank to rank. It has D · Dv numbers per head, however long the
sequence is. The stages of a call:

1. check     this rank's arguments                                         `ringlab.scan.arguments`
2. agree     all ranks compare their calls; a wrong one raises on all      `ringlab.rank_agreement`
3. forward   compute each rank's passage, pass states, compute outputs      `ringlab.scan.program`
4. backward  the same from the last token to the first, with gradients     `ringlab.scan.program`

Read `ringlab.scan.plain` first: the recurrence, the chunk form and a relay over ranks on one page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ringlab.comm.ring import Ring
from ringlab.errors import BackendError
from ringlab.layout import Layout
from ringlab.rank_agreement import agree, checked_over
from ringlab.scan.arguments import Arguments, ScanCall, check_arguments, describe_arguments
from ringlab.scan.chunk import Tokens
from ringlab.scan.program import backward, forward
from ringlab.torch_modes import as_autocast, ends_graphs, without_autocast
from ringlab.types import Gate, Keys, State, Values


@overload
def linear_attention(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    ring: Ring,
    layout: Layout,
    decay: Gate | None = ...,
    beta: Gate | None = ...,
    scale: float | None = ...,
    documents: tuple[int, ...] = ...,
    initial_state: State | None = ...,
    scan: str = ...,
    chunk: int = ...,
    return_state: Literal[False] = ...,
    validate: bool = ...,
) -> Tensor: ...


@overload
def linear_attention(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    ring: Ring,
    layout: Layout,
    decay: Gate | None = ...,
    beta: Gate | None = ...,
    scale: float | None = ...,
    documents: tuple[int, ...] = ...,
    initial_state: State | None = ...,
    scan: str = ...,
    chunk: int = ...,
    return_state: Literal[True],
    validate: bool = ...,
) -> tuple[Tensor, Tensor]: ...


@ends_graphs
def linear_attention(
    q: Keys,
    k: Keys,
    v: Values,
    *,
    ring: Ring,
    layout: Layout,
    decay: Gate | None = None,
    beta: Gate | None = None,
    scale: float | None = None,
    documents: tuple[int, ...] = (),
    initial_state: State | None = None,
    scan: str = "all-gather",
    chunk: int = 64,
    return_state: bool = False,
    validate: bool = True,
) -> Any:
    """Return this rank's rows of linear attention over the whole sequence. The result is differentiable.

    Token t makes the state S_t = α_t S_{t−1} + k_t u_tᵀ, and its output is scale · S_tᵀ q_t; u_t is v_t, or
    with the delta rule β_t (v_t − α_t S_{t−1}ᵀ k_t).

    q, k, v: this rank's shards. q and k are (B, K, L, D), and v is (B, H, L, Dv) with H % K == 0: several
    heads of v may share one head of q and k. Under autocast they are cast as `ring_attention` casts them.
    decay, beta and initial_state keep their own dtypes, because rounding errors of logarithms would add up
    over the sequence.
    layout: must give each rank stretches of adjacent tokens, as `contiguous` and `zigzag` do.
    decay: (B, H, L) natural logarithms of α, ≤ 0; −inf forgets everything. None means α = 1.
    beta: (B, H, L). If given, the delta rule is used. It is stable for keys of length 1 and β from 0 to 2;
    the caller normalises the keys.
    scale: D^−½ by default.
    documents: the lengths of packed documents, in order; the state begins with zeros in each.
    initial_state: the state before the first token, (B, H, D, Dv), the same on all ranks; only the first
    document sees it. Each rank computes a part of its gradient, so sum the gradient over the ranks.
    scan: how states pass from rank to rank, one of `ringlab.scan.graph.SCANS`: "relay" takes P − 1 hops of a
    state, "all-gather" one round, and "doubling" log2 P rounds.
    chunk: the number of tokens that are computed at once.
    return_state: return (out, state). The state after the last token is (B, H, D, Dv), the same on all ranks,
    and float32 (float64 for float64 inputs). If several ranks compute a loss on it, all these losses add up.
    validate: whether the ranks compare their calls first, forward and backward, as in `ring_attention`.

    Only first derivatives by backward are supported. torch.func and forward-mode differentiation raise
    GradientError.

    Raises: before any data moves, ShapeError, DtypeError, DeviceError, LayoutError, MaskError,
    WorldSizeError, BackendError or GradientError on a rank that is called wrongly, and AgreementError on all
    other ranks.
    Source: arXiv 2412.06464 (gated delta rule), 2404.02882 and 2502.07563 (over ranks).

    >>> import torch
    >>> import ringlab
    >>> layout = ringlab.contiguous(16, 2)
    >>> q, k, v = torch.randn(3, 1, 4, 16, 8).unbind()
    >>> decay = -torch.rand(1, 4, 16)
    >>> def program(ring):
    ...     shards = layout.shard((q, k, v), ring.rank)
    ...     return linear_attention(*shards, ring=ring, layout=layout, decay=layout.shard(decay, ring.rank, dim=-1))
    >>> out = layout.unshard(ringlab.VirtualCluster(2).run(program).results)
    >>> from ringlab.scan import oracle
    >>> torch.allclose(out.double(), torch.from_numpy(oracle.linear_attention(q, k, v, decay=decay).out), atol=1e-5)
    True
    """
    q, k, v = as_autocast(q, k, v)
    given = Arguments(
        q, k, v, ring, layout, decay, beta, scale, documents, initial_state, scan, chunk, return_state, validate,
    )  # fmt: skip

    def check() -> tuple[ScanCall, str]:
        return check_arguments(given), describe_arguments(given) if validate else ""

    call = checked_over(ring, check, validate)
    call = replace(call, name=ring.comm.name_call())
    out, state = _LinearAttention.apply(q, k, v, decay, beta, initial_state, call)
    return (out, state) if return_state else out


class _LinearAttention(torch.autograd.Function):
    """The differentiable part of linear attention.

    For backward it saves its inputs and the states that enter this rank's elements.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Keys,
        k: Keys,
        v: Values,
        decay: Gate | None,
        beta: Gate | None,
        initial_state: State | None,
        call: ScanCall,
    ) -> tuple[Tensor, Tensor]:
        tokens = Tokens(*(None if x is None else x.detach() for x in (q, k, v, decay, beta)))  # type: ignore[arg-type]
        with without_autocast(q.device.type):
            out, state, entering = forward(call, tokens, initial_state)
        ctx.save_for_backward(q, k, v, decay, beta, *entering)
        ctx.call, ctx.initial_dtype = call, None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        if not call.return_state:
            ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a second derivative would silently ignore the saved tensors
            raise BackendError("a first derivative of linear attention", "create_graph=True")
        q, k, v, decay, beta, *entering = ctx.saved_tensors
        tokens, call = Tokens(q, k, v, decay, beta), ctx.call
        dout = torch.zeros_like(tokens.v) if dout is None else dout
        with without_autocast(dout.device.type):
            if call.validate:
                agree(call.ring.comm, f"backward through {call.name}", None)
            found, dinitial = backward(call, tokens, entering, dout, dstate)
        ddecay, dbeta = (None if x is None else y for x, y in ((decay, found.ddecay), (beta, found.dbeta)))
        return *found[:3], ddecay, dbeta, dinitial.to(ctx.initial_dtype) if ctx.initial_dtype else None, None
