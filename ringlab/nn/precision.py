"""Mixed precision: a model computes in bfloat16, and is trained in float32.

    w₁₆ = bfloat16(w),   g = float32(∂loss/∂w₁₆),   w ← w − update(Σ over ranks of g)

The float32 weights w, called masters, are the model's own parameters. w₁₆ exists for one forward and
backward. The gradient is summed over ranks and micro-batches, clipped and applied in float32, and the
optimizer's state is float32. A bfloat16 weight near 1 would ignore updates below 0.002, half a unit in its
last place. A float32 master near 1 ignores only updates below 6e-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ringlab.errors import TrainingError
from ringlab.merge import state_dtype

PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
"""The dtypes in which a model may compute, by name."""


def master_dtype(precision: str) -> torch.dtype:
    """Return the dtype of weights, summed gradients and the optimizer's state, which is float32 at least.

    >>> master_dtype("bfloat16"), master_dtype("float64")
    (torch.float32, torch.float64)
    """
    return state_dtype(PRECISIONS[precision])


@contextmanager
def computing_in(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """Let `model` compute with its parameters cast to `dtype` inside the block. Gradients keep their dtype.

    Run both forward and backward inside the block, because layers that are recomputed read the parameters
    again. Any model can be used. Buffers keep their dtype.

    Raises: TrainingError if FSDP manages the parameters.
    Source: arXiv 1710.03740, section 3.1.

    >>> model = nn.Linear(2, 1)
    >>> with computing_in(torch.bfloat16, model):
    ...     out = model(torch.ones(1, 2, dtype=torch.bfloat16))
    ...     out.sum().backward()
    >>> out.dtype, model.weight.dtype, model.weight.grad.dtype
    (torch.bfloat16, torch.float32, torch.float32)
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, FSDPModule):
        raise TrainingError(
            "a model whose parameters this rank holds whole",
            "one that FSDP shards",
            f"fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32))",
        )
    casts: dict[Tensor, Tensor] = {p: p.to(dtype) for p in model.parameters() if p.is_floating_point()}
    masters = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in casts
    ]
    try:
        for module, name, parameter in masters:
            module._parameters[name] = casts[parameter]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in masters:
            module._parameters[name] = parameter
