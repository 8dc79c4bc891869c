"""The block backend `triton`, which computes steps and tiles with the kernels of this package."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from ringlab.blocks.library import too_old
from ringlab.blocks.protocol import BackwardRows, StepBlock
from ringlab.blocks.triton.configs import KERNELS, LARGEST_HEAD_DIM, Config, architecture, choose
from ringlab.blocks.triton.interpreter import interpreting
from ringlab.blocks.triton.steps import Launcher, TritonBackward, TritonForward
from ringlab.errors import BackendError
from ringlab.handles import Handled
from ringlab.scores import TileRules
from ringlab.types import Query

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonBlock(StepBlock, Handled):
    """Computes ring steps by Triton, on NVIDIA GPUs from sm_80 on, or on the CPU with TRITON_INTERPRET=1.

    precision: how float32 is multiplied: "ieee", or "tf32x3" on tensor cores. configs: launch configurations
    that replace those of the tables, by kernel name. Raises: BackendError for an unknown precision or
    kernel.

    >>> TritonBlock(precision="tf32x3").supports(torch.empty(1, 2, 16, 8, dtype=torch.float64))
    'needs bfloat16, float16 or float32, got torch.float64'
    """

    name = "triton"
    largest_causal: int | None = None
    thread_safe = False
    supported_rules = frozenset({"softcap", "dropout"})

    def __init__(self, precision: str = "ieee", configs: Mapping[str, Config] | None = None) -> None:
        if precision not in ("ieee", "tf32x3"):
            raise BackendError("precision='ieee' or 'tf32x3'", repr(precision))
        if unknown := set(configs or ()) - set(KERNELS):
            names = ", ".join(map(repr, sorted(unknown)))
            raise BackendError(f"configs for kernels among {', '.join(KERNELS)}", names)
        self.precision, self.configs = precision, dict(configs or {})

    def supports(self, q: Query) -> str | None:
        if q.dtype not in DTYPES:
            return f"needs bfloat16, float16 or float32, got {q.dtype}"
        if not 1 <= q.shape[-1] <= LARGEST_HEAD_DIM:
            return f"needs a head dim from 1 to {LARGEST_HEAD_DIM}, got {q.shape[-1]}"
        if find_spec("triton") is None:
            return "needs Triton, which is not installed here (pip install triton, on Linux)"
        return _unfit_device(q.device)

    def begin_forward(self, q: Query, count: int, *, scale: float) -> TritonForward:
        return TritonForward(self._launcher(q, scale), q, count)

    def begin_backward(self, rows: BackwardRows, count: int, *, scale: float) -> TritonBackward:
        return TritonBackward(self._launcher(rows.q, scale), rows, count)

    def _launcher(self, q: Tensor, scale: float) -> Launcher:
        arch = _architecture(q.device)

        def config(kernel: str, value_dim: int, rules: TileRules) -> Config:
            given, head_dim = self.configs.get(kernel), max(q.shape[-1], value_dim)
            return given or choose(kernel, arch, head_dim, q.dtype, self.precision, rules.requirements)

        return Launcher(config, float(scale))


def _unfit_device(device: torch.device) -> str | None:
    """Return the reason why kernels cannot run on `device`, or None if they can."""
    if device.type == "cpu":
        return None if interpreting() else _NO_INTERPRETER
    if device.type != "cuda":
        return f"runs on NVIDIA GPUs, and with TRITON_INTERPRET=1 on the CPU, not on {device.type}"
    if torch.version.hip is not None:
        return "runs on NVIDIA GPUs, not on AMD's"
    return too_old(device)


_NO_INTERPRETER = (
    "runs on NVIDIA GPUs; for its interpreter on the CPU set TRITON_INTERPRET=1 before Python starts"
)


def _architecture(device: torch.device) -> str:
    """Return the name of the table of launch configurations for `device`."""
    return "interpreter" if interpreting() else architecture(torch.cuda.get_device_capability(device))
