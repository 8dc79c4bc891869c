"""`latent_attention`: multi-head latent attention over a ring. The latent travels, not K and V."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.arguments import CAUSAL, Arguments, Modes, check_arguments, describe_arguments
from ringlab.attention import (
    differentiate_in_graph,
    from_numbers,
    in_numbers,
    options_fit_a_graph,
    plan_call,
    run,
    run_in_graph,
    shapes_in_graph,
)
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError, DeviceError, DtypeError, ShapeError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.rank_agreement import checked_over
from ringlab.schedules.block_schedule import BlockSchedule
from ringlab.schedules.expansion import LatentExpansion, UpKeys, UpValues
from ringlab.schedules.protocol import Schedule, ScheduledCall
from ringlab.torch_modes import as_autocast, autocast_dtype, ends_graphs, refuse_transforms
from ringlab.types import Query


def latent_attention(
    q: Query,
    latent: Float[Tensor, "B Lq R"],
    k_rope: Float[Tensor, "B Lq Dr"],
    w_k: UpKeys,
    w_v: UpValues,
    *,
    ring: Ring,
    layout: Layout,
    causal: bool = CAUSAL,
    mask: Mask | None = None,
    scale: float | None = None,
    block: str | Block = "auto",
    schedule: str | Schedule = "ring",
    return_lse: bool = False,
    validate: bool = True,
) -> Any:
    """Return this rank's rows of attention whose keys and values are made from a latent.

    Head h has the keys [latent·w_k[h]ᵀ, k_rope] and the values latent·w_v[h]ᵀ, so R + Dr numbers travel for
    each token instead of H·(Dn + Dr + Dv). Each rank makes K and V from the block that it holds, and makes
    them again in backward. The result is differentiable in all five tensors.
    q: (B, H, L, Dn + Dr). Its last Dr dims are rotated by global positions, and so is k_rope.
    w_k, w_v: (H, Dn, R) and (H, Dv, R), the same on all ranks. The gradients on each rank come only from
    that rank's rows: sum them over the ranks. Under autocast all five tensors are cast, as `ring_attention`
    casts q, k and v.
    scale: (Dn + Dr)^−½ by default. schedule: any schedule but "ulysses", "hybrid" and "multi-ring", which
    deal K/V heads to the ranks. The other arguments are those of `ring_attention`; out is (B, H, L, Dv).

    Raises: the errors of `ring_attention`, on the same ranks; BackendError for a schedule that deals heads.
    Source: arXiv 2405.04434, section 2.1.

    >>> import torch
    >>> import ringlab
    >>> layout = ringlab.zigzag(16, 2)
    >>> q, latent, k_rope = torch.randn(1, 4, 16, 12), torch.randn(1, 16, 6), torch.randn(1, 16, 4)
    >>> w_k, w_v = torch.randn(4, 8, 6), torch.randn(4, 8, 6)
    >>> def program(ring):
    ...     own = layout.shard((q, latent, k_rope), ring.rank)
    ...     return latent_attention(*own, w_k, w_v, ring=ring, layout=layout)
    >>> out = layout.unshard(ringlab.VirtualCluster(2).run(program).results)
    >>> k = torch.cat((latent[:, None] @ w_k.mT, k_rope[:, None].expand(-1, 4, -1, -1)), dim=-1)
    >>> weights = (q @ k.mT * 12**-0.5).masked_fill(torch.ones(16, 16).triu(1) > 0, -torch.inf).softmax(-1)
    >>> torch.allclose(out, weights @ (latent[:, None] @ w_v.mT), atol=1e-5)
    True
    """
    tensors = q, latent, k_rope, w_k, w_v
    given = Arguments(
        q=q, k=latent, v=latent, ring=ring, layout=layout, causal=causal, mask=mask, scale=scale, softcap=None,
        dropout=0.0, seed=None, sinks=None, block=block, schedule=schedule, return_lse=return_lse, validate=validate,
    )  # fmt: skip
    traced = torch.compiler.is_dynamo_compiling() and _fits_a_graph(tensors, given)
    return _in_graph(tensors, given) if traced else _attend(tensors, given)


Tensors = tuple[Any, Any, Any, Any, Any]
"""q, latent, k_rope, w_k and w_v."""


@ends_graphs
def _attend(tensors: Tensors, given: Arguments) -> Any:
    """Return the result of `latent_attention` by calling its stages, one after the other."""
    modes = _modes_of(tensors)
    q, latent, k_rope, w_k, w_v = as_autocast(*tensors)
    call = _begin((q, latent, k_rope, w_k, w_v), replace(given, modes=modes))
    out, lse = run(call, q, latent[:, None], k_rope[:, None], w_k, w_v)
    return (out, lse) if given.return_lse else out


def _begin(tensors: Tensors, given: Arguments) -> ScheduledCall:
    """Return this rank's call, checked and planned. No data has moved yet."""
    q, latent, k_rope, w_k, w_v = tensors
    keys = _stand_in(q, latent, q.shape[-1] if isinstance(q, Tensor) else 0)
    values = _stand_in(q, latent, w_v.shape[1] if isinstance(w_v, Tensor) and w_v.ndim == 3 else 0)
    given = replace(given, q=q, k=keys, v=values)

    def check() -> tuple[ScheduledCall, str]:
        refuse_transforms(*tensors)
        _check_latent(*tensors)
        call = check_arguments(given)
        if not isinstance(call.schedule, BlockSchedule):
            needed = "a schedule in which whole blocks or rows travel"
            raise BackendError(
                needed, f"schedule='{call.schedule.name}', which deals heads", "schedule='ring'"
            )
        sizes = f" latent={latent.shape[-1]}+{k_rope.shape[-1]}"
        return call, describe_arguments(given, call) + sizes if given.validate else ""

    call = plan_call(checked_over(given.ring, check, given.validate), given.block)
    return replace(call, expansion=LatentExpansion(w_k.detach(), w_v.detach(), k_rope.shape[-1]))


def _modes_of(tensors: Tensors) -> Modes:
    """Return the modes that are active for a call with these tensors. This function is traced."""
    found = [x for x in tensors if isinstance(x, Tensor)]
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in found)
    return Modes(gradients, autocast_dtype(found[0].device.type) if found else None)


def _fits_a_graph(tensors: Tensors, given: Arguments) -> bool:
    """Return whether the operator can take these arguments.

    Otherwise the graph ends before the call, and `_attend` may raise an error.
    """
    return all(
        isinstance(x, Tensor) and x.is_floating_point() and x.ndim == axes
        for x, axes in zip(tensors, (4, 3, 3, 3, 3), strict=True)
    ) and options_fit_a_graph(given)


def _in_graph(tensors: Tensors, given: Arguments) -> Any:
    """Return the result of `latent_attention` from the operator. This function is traced."""
    modes = _modes_of(tensors)
    q, latent, k_rope, w_k, w_v = as_autocast(*tensors)
    out, lse, _ = torch.ops.ringlab.latent_attention(
        [q, latent[:, None], k_rope[:, None], w_k, w_v], *in_numbers(given), given.scale, given.return_lse,
        given.validate, modes.gradients, modes.autocast,
    )  # fmt: skip
    return (out, lse) if given.return_lse else out


@torch.library.custom_op(
    "ringlab::latent_attention",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),  # it sends messages, and plans on the CPU
    schema="(Tensor[] tensors, SymInt[] handles, str block, str schedule, bool? causal, float? scale, bool return_lse,"
    " bool validate, bool gradients, ScalarType? autocast) -> (Tensor out, Tensor lse, Tensor ticket)",
)
def _operator(
    tensors: list[Tensor], handles: list[int], block: str, schedule: str, causal: bool | None, scale: float | None,
    return_lse: bool, validate: bool, gradients: bool, autocast: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the results of `run_in_graph`.

    tensors: as for `run`, so the latent and k_rope have an axis of one head.
    """
    q, latent, k_rope, w_k, w_v = (x.detach() for x in tensors)
    call = _begin((q, latent[:, 0], k_rope[:, 0], w_k, w_v), Arguments(
        q=None, k=None, v=None, scale=scale, softcap=None, dropout=0.0, seed=None, sinks=None, return_lse=return_lse,
        validate=validate, modes=Modes(gradients, autocast), **from_numbers(handles, block, schedule, causal),
    ))  # fmt: skip
    return run_in_graph(call, return_lse, q, latent, k_rope)


@_operator.register_fake
def _shapes(tensors: list[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, *_, w_v = tensors
    return shapes_in_graph(q, w_v.shape[1], options[5])


differentiate_in_graph(_operator, return_lse=6, arguments=10)


def _stand_in(q: Any, latent: Any, head_dim: int) -> Any:
    """Return a tensor without memory that has the shape, dtype and device of the keys or values."""
    tensors = isinstance(q, Tensor) and isinstance(latent, Tensor) and q.ndim == 4 and latent.ndim == 3
    if not tensors:
        return latent
    return latent.new_empty(()).expand(*latent.shape[:1], q.shape[1], latent.shape[1], head_dim)


def _check_latent(q: Any, latent: Any, k_rope: Any, w_k: Any, w_v: Any) -> None:
    """Raise an error if the latent, k_rope and the weights do not make keys that fit q."""
    named = {"q": q, "latent": latent, "k_rope": k_rope, "w_k": w_k, "w_v": w_v}
    shapes = ", ".join(
        f"{n} {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}" for n, x in named.items()
    )
    needed = "q (B, H, L, Dn + Dr), latent (B, L, R), k_rope (B, L, Dr), w_k (H, Dn, R) and w_v (H, Dv, R)"
    fit = all(isinstance(x, Tensor) and x.ndim == (4 if n == "q" else 3) for n, x in named.items())
    if fit:
        H, D, R, Dv = q.shape[1], q.shape[3], latent.shape[2], w_v.shape[1]
        fit = (
            latent.shape[:2] == k_rope.shape[:2]
            and w_k.shape == (H, D - k_rope.shape[2], R)
            and w_v.shape == (H, Dv, R)
            and Dv >= 1
        )
    if not fit:
        raise ShapeError(needed, shapes)
    if len({x.dtype for x in named.values()}) > 1:
        dtypes = {name: x.dtype for name, x in named.items()}
        raise DtypeError(
            "q, the latent and the weights of one dtype", str(dtypes), "convert them with .to(dtype)"
        )
    if len({x.device for x in named.values()}) > 1:
        devices = {name: str(x.device) for name, x in named.items()}
        raise DeviceError(
            "q, the latent and the weights on one device", str(devices), "move them with .to(device)"
        )
