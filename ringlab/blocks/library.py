"""The common code of the blocks that compute tiles by a library's CUDA kernels: `native`, `cudnn` and `flash`.

A block of a library names its limits as data and calls two functions of the library. This module checks the
limits, brings tensors into a form that the functions accept, and gives all tiles that they do not support to
`Blockwise`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn import functional as F

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.protocol import BackwardRows, Block
from ringlab.errors import BackendError
from ringlab.handles import Handled
from ringlab.merge import Partial
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.types import KeyValue, Query, Value

Capability = tuple[int, int]


@dataclass(frozen=True)
class BackwardTile:
    """The arguments of a library's backward: loadable tensors (B, H, L, D), and the dense lse (B, H, L).

    out and lse are those over all keys. A causal tile is square.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    causal: bool
    scale: float


class LibraryBlock(Block, Handled):
    """Attention by two functions of a library, for float16 and bfloat16 on NVIDIA GPUs.

    The functions have no soft cap, their dropout does not depend on positions, and they take no gradient of
    lse. `Blockwise` therefore computes tiles with these rules, and the backward of rows that have a gradient
    of lse or no out.
    """

    largest_causal: int | None = None
    thread_safe = True
    supported_rules = Blockwise.supported_rules

    multiple = 8
    """Head dims must be multiples of this number."""
    own_value_dims = False
    """Whether the head dim of v may differ from that of q and k. If not, narrower tensors are padded with zeros,
    which change neither scores nor out nor gradients. The padding is cut off the results."""
    shortest = 1
    """The fewest rows and keys of tiles that the library computes. `Blockwise` computes shorter tiles."""

    @abstractmethod
    def largest_head_dim(self, capability: Capability) -> int:
        """Return the largest head dim on GPUs of this compute capability; 0 if the GPUs are not supported."""

    def missing(self) -> str | None:
        """Return the reason why the library cannot be used on this machine, or None if it can."""
        return None

    @abstractmethod
    def _library_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse (B, H, L) of loadable tensors (B, H, L, D); a causal tile is square."""

    @abstractmethod
    def _library_backward(self, tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv."""

    def supports(self, q: Query) -> str | None:
        if not on_cuda(q):
            return f"runs on cuda, not on {q.device.type}"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"on cuda needs float16 or bfloat16, got {q.dtype}"
        if (reason := too_old(q.device)) or (reason := self.missing()):
            return reason
        capability = torch.cuda.get_device_capability(q.device)
        largest = self.largest_head_dim(capability)
        if not largest:
            major, minor = capability
            return f"does not run on GPUs of compute capability {major}.{minor}"
        if q.shape[-1] % self.multiple or q.shape[-1] > largest:
            return f"on cuda needs a head dim that is a multiple of {self.multiple} up to {largest}, got {q.shape[-1]}"
        return None

    def forward(
        self,
        q: Query,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> Partial:
        if rules.requirements:
            return Blockwise().forward(q, k, v, causal=causal, scale=scale, rules=rules)
        if q.numel() == 0 or k.numel() == 0:
            return Partial.identity(q, v.shape[-1])
        if self.too_short(q.shape[-2], k.shape[-2]):
            return Blockwise().forward(q, k, v, causal=causal, scale=scale)
        if q.shape[-1] == v.shape[-1] or self.own_value_dims:
            return self._tile_forward(q, k, v, causal, scale)
        wide_q, wide_k, wide_v = of_one_width(q, k, v)
        part = self._tile_forward(wide_q, wide_k, wide_v, causal, scale)
        return Partial(cut_to(part.out, v), part.lse)

    def backward(
        self,
        rows: BackwardRows,
        k: KeyValue,
        v: Value,
        *,
        causal: bool,
        scale: float,
        rules: TileRules = PLAIN_RULES,
    ) -> tuple[Query, KeyValue, Value]:
        if self.leaves_backward(rows, rules):
            return Blockwise().backward(rows, k, v, causal=causal, scale=scale, rules=rules)
        assert rows.out is not None
        if rows.q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(rows.q), torch.zeros_like(k), torch.zeros_like(v)
        if self.too_short(rows.q.shape[-2], k.shape[-2]):
            return Blockwise().backward(rows, k, v, causal=causal, scale=scale)
        if rows.q.shape[-1] == v.shape[-1] or self.own_value_dims:
            return self._tile_backward(rows, k, v, causal, scale)
        q, wide_k, wide_v, dout, out = of_one_width(rows.q, k, v, rows.dout, rows.out)
        found = self._tile_backward(replace(rows, q=q, dout=dout, out=out), wide_k, wide_v, causal, scale)
        dq, dk, dv = (cut_to(x, like) for x, like in zip(found, (rows.q, k, v), strict=True))
        return dq, dk, dv

    def _tile_forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Partial:
        """Return the partial of a tile that is within the limits of the library."""
        self._check_square(q, k, causal)
        q, k, v = map(loadable, (q, k, v))
        return Partial(*self._library_forward(q, k, v, causal, scale))

    def _tile_backward(
        self, rows: BackwardRows, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of a tile that is within the limits of the library."""
        assert rows.out is not None
        self._check_square(rows.q, k, causal)
        dout, q, k, v, out = map(loadable, (rows.dout, rows.q, k, v, rows.out))
        lse = rows.lse.contiguous()  # the kernels ignore the strides of lse, and the libraries make no copy
        return self._library_backward(BackwardTile(dout, q, k, v, out, lse, causal, scale))

    def leaves_backward(self, rows: BackwardRows, rules: TileRules) -> bool:
        """Return whether the backward of these rows is left to `Blockwise`."""
        # The functions compute delta themselves, from dout and out.
        return bool(rules.requirements) or rows.through_lse or rows.out is None

    def too_short(self, rows: int, keys: int) -> bool:
        """Return whether a tile of so many rows and keys is left to `Blockwise`."""
        return 0 < min(rows, keys) < self.shortest

    def _check_square(self, q: Tensor, k: Tensor, causal: bool) -> None:
        """Check that a causal tile is square. Raises: BackendError."""
        # Libraries and their versions differ in how they align a rectangular causal mask.
        if causal and q.shape[-2] != k.shape[-2]:
            raise BackendError(
                f"a square causal tile for the {self.name} block on CUDA",
                f"{q.shape[-2]} rows and {k.shape[-2]} keys",
                "cut the tile into a square one and a full one, as ringlab.plan does",
            )


def too_old(device: torch.device) -> str | None:
    """Return the reason why a GPU is too old for kernels that need Ampere's instructions, or None."""
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"needs a GPU of compute capability 8.0 or more, got {major}.{minor}"


def on_cuda(x: Shaped[Tensor, "..."]) -> bool:
    """Return whether `x` is on an NVIDIA GPU."""
    return x.device.type == "cuda"


_LOAD = 16  # bytes that the CUDA kernels load at once; addresses must be multiples of this number


def loadable(x: Shaped[Tensor, "*axes"]) -> Shaped[Tensor, "*axes"]:
    """Return `x`, or a dense copy if the CUDA kernels cannot load the rows of `x`."""
    rows = [x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1])]
    broadcast = any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
    fits = x.stride(-1) == 1 and not any(place % _LOAD for place in rows) and not broadcast
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def of_one_width(*tensors: Shaped[Tensor, "... _"]) -> tuple[Shaped[Tensor, "... most"], ...]:
    """Return the tensors padded with zeros to the largest of their head dims."""
    most = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in tensors)


def cut_to(x: Shaped[Tensor, "*axes _"], like: Shaped[Tensor, "... D"]) -> Shaped[Tensor, "*axes D"]:
    """Return `x` cut to the head dim of `like`, as a copy."""
    return x if x.shape[-1] == like.shape[-1] else x[..., : like.shape[-1]].contiguous()
