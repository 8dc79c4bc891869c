"""The problem that GPU benchmarks compute: sizes, numbers of operations and bytes, and random inputs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CONVENTION = (
    "forward 4·S²·D·H operations (two matrix products), backward 10·S²·D·H (five), each half if causal; "
    "softmax, masks and delta are not counted"
)
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Problem:
    """The sizes of a problem: H query heads and H K/V heads, S tokens, D head dim, batch 1."""

    H: int = 16
    S: int = 16384
    D: int = 128
    causal: bool = True
    dtype: str = "bfloat16"

    def as_dict(self) -> dict[str, object]:
        """Return the sizes, ready for JSON."""
        return {"B": 1, **asdict(self)}

    @property
    def tensor_bytes(self) -> int:
        """Return the bytes of one tensor (1, H, S, D)."""
        return self.H * self.S * self.D * torch.finfo(self.torch_dtype).bits // 8

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype as a torch.dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def flops(self, of: str) -> float:
        """Return the floating-point operations of "forward", "backward" or "forward_backward"."""
        products = {"forward": 2, "backward": 5, "forward_backward": 7}[of]
        return products * 2.0 * self.S**2 * self.D * self.H / (2 if self.causal else 1)

    def least_bytes(self, of: str) -> int:
        """Return the fewest bytes that must be moved: each input is read once, each result is written once.

        The tensors of S tokens are q, k, v → out in forward, and q, k, v, out, dout → dq, dk, dv in
        backward.
        """
        tensors = {"forward": 4, "backward": 8, "forward_backward": 12}[of]
        return tensors * self.tensor_bytes


class Inputs(NamedTuple):
    """q, k, v and the gradient of out, (1, H, S, D) each."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def draw(problem: Problem, device: str, generator: torch.Generator) -> Inputs:
    """Return normally distributed inputs, which differ at every call."""
    shape = (1, problem.H, problem.S, problem.D)
    dtype = problem.torch_dtype
    return Inputs(*(torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)))


def redraw(inputs: Inputs, generator: torch.Generator) -> None:
    """Write new random numbers into `inputs`, in place."""
    for tensor in inputs:
        tensor.normal_(generator=generator)
