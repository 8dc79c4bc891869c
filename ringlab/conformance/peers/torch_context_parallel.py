"""torch's own context parallelism, contiguous or zig-zag, with torch's flash operator for CPUs as its kernel.

The public `context_parallel` supports only the operators for GPUs. So this module calls the functions behind
it, `_templated_ring_attention` and its backward, with the CPU's operator in place of a GPU's. Both functions
are private, and another version of torch may not have them. By default they gather K and V, so the target
does not promise a ring. Grouped heads are not supported.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ringlab.conformance.target.claims import Target
from ringlab.errors import BackendError

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SEQUENCE = 2


def make() -> Target:
    """Return the target. Raises: BackendError if this version of torch has no such functions."""
    _rings()

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, layout: Any, scale: float | None) -> Any:
        balanced = causal and layout.name == "zigzag"
        return _Attention.apply(q, k, v, causal, balanced, scale, torch.distributed.group.WORLD)

    return Target(
        attend, over="torch.distributed", layouts=("zigzag", "contiguous"), causal=(False, True),
        dtypes=("float32", "bfloat16"), ranks=(1, 2, 3, 4), grouped=False, ragged=False, schedule="any",
    )  # fmt: skip


def public() -> Target:
    """Return the public `context_parallel` as a target, forward only, for machines with a GPU.

    It requires a buffer to shard. q, k and v are shards already, so it gets a buffer of zeros.
    Raises: ImportError without the package.
    """
    experimental = importlib.import_module("torch.distributed.tensor.experimental")

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, world_size: int) -> Tensor:
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh(
            q.device.type, (world_size,)
        )
        zeros = torch.zeros(2 * world_size, device=q.device)
        with experimental.context_parallel(mesh, buffers=[zeros], buffer_seq_dims=[0]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Target(
        attend, over="torch.distributed", layouts=("zigzag",), causal=(True,), dtypes=("bfloat16",),
        ranks=(1, 2, 3, 4), grouped=False, ragged=False, backward=False, schedule="any",
    )  # fmt: skip


def without_gpu() -> BackendError | None:
    """Return the reason why the public function cannot run here, or None if it can."""
    if torch.cuda.is_available():
        return None
    return BackendError(
        "a GPU: torch's context_parallel has no rule for the attention operator that torch uses on a CPU",
        "no GPU",
        "ringlab check peer:torch-context-parallel, which gives the ring behind it the CPU's operator",
    )


def _rings() -> Any:
    needed = ("_templated_ring_attention", "_templated_ring_attention_backward", "_cp_options")
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        module = None
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        raise BackendError(f"{', '.join(missing)} in {_MODULE}", f"torch {torch.__version__} without them")
    return module


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = _KERNEL(q, k, v, 0.0, is_causal, scale=scale)
    return out, lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _KERNEL_BACKWARD(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale
    )
    return gradients


class _Attention(torch.autograd.Function):
    """The work of the public function's dispatcher: its forward, and its backward with the saved tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        balanced: bool,
        scale: float | None,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        module = _rings()
        module._cp_options.enable_load_balance = balanced
        out, lse = module._templated_ring_attention(
            group, _SEQUENCE, _forward, q, k, v, is_causal=causal, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = causal, balanced, scale, group
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        module, (q, k, v, out, lse) = _rings(), ctx.saved_tensors
        causal, balanced, scale, group = ctx.call
        module._cp_options.enable_load_balance = balanced
        dq, dk, dv = module._templated_ring_attention_backward(
            group, _SEQUENCE, _backward, dout, "grad_out", q, k, v, out, lse, causal, scale=scale
        )
        return dq, dk, dv, None, None, None, None
