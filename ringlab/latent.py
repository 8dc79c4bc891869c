"""`latent_attention`: multi-head latent attention over a ring around which the latent is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.arguments import CAUSAL, Arguments, check_arguments, describe_arguments
from ringlab.attention import plan_call, run
from ringlab.blocks.protocol import Block
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError, DeviceError, DtypeError, ShapeError
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.rank_agreement import checked_over
from ringlab.schedules.block_schedule import BlockSchedule
from ringlab.schedules.expansion import LatentExpansion, UpKeys, UpValues
from ringlab.schedules.protocol import Schedule, ScheduledCall
from ringlab.torch_modes import as_autocast, ends_graphs, refuse_transforms
from ringlab.types import Query


@ends_graphs
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
    w_k, w_v: (H, Dn, R) and (H, Dv, R), the same on all ranks. The gradients on each rank come from that
    rank's rows
    only: sum them over the ranks.
    Under autocast all five tensors are cast, as `ring_attention` casts q, k and v.
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
    q, latent, k_rope, w_k, w_v = as_autocast(q, latent, k_rope, w_k, w_v)
    keys = _stand_in(q, latent, q.shape[-1] if isinstance(q, Tensor) else 0)
    values = _stand_in(q, latent, w_v.shape[1] if isinstance(w_v, Tensor) and w_v.ndim == 3 else 0)
    given = Arguments(
        q=q, k=keys, v=values, ring=ring, layout=layout, causal=causal, mask=mask, scale=scale, softcap=None,
        dropout=0.0, seed=None, sinks=None, block=block, schedule=schedule, return_lse=return_lse, validate=validate,
    )  # fmt: skip
    weights = w_k, w_v

    def check() -> tuple[ScheduledCall, str]:
        refuse_transforms(q, latent, k_rope, *weights)
        _check_latent(q, latent, k_rope, *weights)
        call = check_arguments(given)
        if not isinstance(call.schedule, BlockSchedule):
            needed = "a schedule in which whole blocks or rows travel"
            raise BackendError(
                needed, f"schedule='{call.schedule.name}', which deals heads", "schedule='ring'"
            )
        sizes = _describe_latent(latent, k_rope, *weights)
        return call, describe_arguments(given, call) + sizes if validate else ""

    call = plan_call(checked_over(ring, check, validate), block)
    call = replace(call, expansion=LatentExpansion(w_k.detach(), w_v.detach(), k_rope.shape[-1]))
    out, lse = run(call, q, latent[:, None], k_rope[:, None], *weights)
    return (out, lse) if return_lse else out


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


def _describe_latent(latent: Tensor, k_rope: Tensor, *weights: Tensor) -> str:
    """Return a text about the latent that must be equal on all ranks, like `describe_arguments`."""
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (latent, k_rope, *weights))
    return f" latent={latent.shape[-1]}+{k_rope.shape[-1]} of_latent={grad}"
