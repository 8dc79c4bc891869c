"""The block backend `flash`: functions of the flash-attn packages, versions 2, 3 and 4.

block="flash" means the newest installed version that supports the tensors, and the trace records which. A package
is imported when tensors on a GPU ask for it. Its functions take and return (B, L, H, D), and lse is (B, H, L).
Source: github.com/Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py (version 2),
hopper/flash_attn_interface.py (version 3) and flash_attn/cute/interface.py (version 4).
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ringlab.blocks.library import BackwardTile, Capability, LibraryBlock


class FlashAttention(LibraryBlock):
    """One version of flash-attn, for float16 and bfloat16. Its backward does not give the same bits every time."""

    module: str
    """The Python module that has the two functions."""
    package: str
    """The name of the package, and how to install it."""

    def missing(self) -> str | None:
        loaded = _loaded(self.module)
        return f"needs {self.package}: {loaded}" if isinstance(loaded, str) else None

    @abstractmethod
    def _call_forward(
        self, functions: Any, tensors: dict[str, Tensor], causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        """Return out, lse and possibly more. tensors: q, k and v, each (B, L, H, D)."""

    @abstractmethod
    def _call_backward(
        self, functions: Any, tensors: dict[str, Tensor], lse: Tensor, causal: bool, scale: float
    ) -> None:
        """Write the gradients. tensors: dout, q, k, v and out, and dq, dk and dv to write to, each (B, L, H, D)."""

    def _library_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        tensors = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        with torch.cuda.device_of(q):  # version 4 launches its kernels on the current device
            out, lse, *_ = self._call_forward(_loaded(self.module), tensors, causal, scale)
        return out.transpose(1, 2), lse

    def _library_backward(self, tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        given = {"dout": tile.dout, "q": tile.q, "k": tile.k, "v": tile.v, "out": tile.out}
        tensors = {name: x.transpose(1, 2) for name, x in given.items()}
        dq, dk, dv = (
            torch.empty_like(tensors[name], memory_format=torch.contiguous_format) for name in ("q", "k", "v")
        )
        tensors |= {"dq": dq, "dk": dk, "dv": dv}
        with torch.cuda.device_of(tile.q):
            self._call_backward(_loaded(self.module), tensors, tile.lse, tile.causal, tile.scale)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class FlashAttention2(FlashAttention):
    """flash-attn 2.7 or later, for GPUs from sm_80 on. Earlier versions have other arguments and results."""

    name = "flash-2"
    module = "flash_attn.flash_attn_interface"
    package = "flash-attn 2.7 or later (pip install flash-attn --no-build-isolation)"

    def missing(self) -> str | None:
        if reason := super().missing():
            return reason
        version = str(getattr(_loaded("flash_attn"), "__version__", "an unknown version"))
        numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
        return None if numbers >= [2, 7] else f"needs {self.package}, got {version}"

    def largest_head_dim(self, capability: Capability) -> int:
        return 256

    def _call_forward(
        self, functions: Any, tensors: dict[str, Tensor], causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        return functions._flash_attn_forward(
            **tensors, softmax_scale=scale, causal=causal, return_softmax=False, **_PLAIN
        )

    def _call_backward(
        self, functions: Any, tensors: dict[str, Tensor], lse: Tensor, causal: bool, scale: float
    ) -> None:
        functions._flash_attn_backward(
            **tensors, softmax_lse=lse, softmax_scale=scale, causal=causal, deterministic=False, **_PLAIN
        )


_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
"""The options of version 2 that are not used. They have no defaults there."""


class FlashAttention3(FlashAttention):
    """flash-attn 3, for Hopper GPUs (sm_90)."""

    name = "flash-3"
    module = "flash_attn_interface"
    package = "flash-attn 3 (pip install . in the folder hopper of github.com/Dao-AILab/flash-attention)"

    def largest_head_dim(self, capability: Capability) -> int:
        return 256 if capability == (9, 0) else 0

    def _call_forward(
        self, functions: Any, tensors: dict[str, Tensor], causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        return functions._flash_attn_forward(**tensors, softmax_scale=scale, causal=causal)

    def _call_backward(
        self, functions: Any, tensors: dict[str, Tensor], lse: Tensor, causal: bool, scale: float
    ) -> None:
        functions._flash_attn_backward(**tensors, softmax_lse=lse, softmax_scale=scale, is_causal=causal)


class FlashAttention4(FlashAttention):
    """flash-attn 4, for Hopper and Blackwell GPUs (sm_90 to sm_110). It compiles each kernel at its first call."""

    name = "flash-4"
    module = "flash_attn.cute.interface"
    package = "flash-attn 4 (pip install flash-attn-4)"
    thread_safe = False

    def largest_head_dim(self, capability: Capability) -> int:
        return 128 if (9, 0) <= capability < (12, 0) else 0

    def _call_forward(
        self, functions: Any, tensors: dict[str, Tensor], causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        return functions._flash_attn_fwd(**tensors, softmax_scale=scale, causal=causal, return_lse=True)

    def _call_backward(
        self, functions: Any, tensors: dict[str, Tensor], lse: Tensor, causal: bool, scale: float
    ) -> None:
        functions._flash_attn_bwd(**tensors, lse=lse, softmax_scale=scale, causal=causal)


VERSIONS: tuple[FlashAttention, ...] = (FlashAttention4(), FlashAttention3(), FlashAttention2())
"""All versions, the newest first."""


@cache
def _loaded(module: str) -> ModuleType | str:
    """Return the module, or the error that its import raises."""
    try:
        return importlib.import_module(module)
    except (
        ImportError,
        OSError,
        RuntimeError,
        AttributeError,
    ) as error:  # a package built for another torch, too
        return str(error)
