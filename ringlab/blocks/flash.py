"""The block backend `flash`: functions of the flash-attn packages, versions 2, 3 and 4.

block="flash" means the newest installed version that supports the tensors, and the trace records which. A package
is imported when a tensor on a GPU first needs it. Its functions take and return (B, L, H, D), and lse is (B, H, L).

The functions for sequences of varying length take one axis for all tokens, (tokens, H, D), with the bounds
of the sequences in it, and lse is (H, tokens). They compute several tiles of a step in one call, with each
tile as a sequence. A step of packed documents therefore takes one call for all causal tiles, and one for all
others, whatever the number of documents.
Source: github.com/Dao-AILab/flash-attention: flash_attn/flash_attn_interface.py (version 2; 2.7.0 to 2.8.3 have the same
arguments as far as they are used here), hopper/flash_attn_interface.py (version 3, from commit 1e3539e4 of November 2025
on) and flash_attn/cute/interface.py (version 4), read at commit 0251105a.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import accumulate
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ringlab.blocks.library import (
    BackwardTile,
    Capability,
    LibraryBlock,
    cut_to,
    loadable,
    of_one_width,
)
from ringlab.blocks.protocol import BackwardRows, BackwardSteps, ForwardSteps, Gradient, StepBlock
from ringlab.blocks.tilewise import TilewiseBackward, TilewiseForward
from ringlab.merge import Partial
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.tile import Tile
from ringlab.types import KeyValue, Query, RowState, Value
from ringlab.upload import kept_for_each_stream, upload

Tiles = tuple[Tile, ...]
Heads: TypeAlias = Float[Tensor, "B heads L D"]
"""Query, key or value tensors: rows or keys of any heads."""


class FlashAttention(LibraryBlock, StepBlock):
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
        self, functions: Any, given: dict[str, Any], causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        """Return out, lse and, in some versions, further values that nothing here uses.

        given: q, k and v, each (B, L, H, D); or each (tokens, H, D), with cu_seqlens_q, cu_seqlens_k, max_seqlen_q and
        max_seqlen_k.
        """

    @abstractmethod
    def _call_backward(
        self, functions: Any, given: dict[str, Any], lse: Tensor, causal: bool, scale: float
    ) -> None:
        """Write the gradients into dq, dk and dv.

        given: the tensors that the forward takes, and also dout, out, dq, dk and dv.
        """

    def begin_forward(self, q: Query, count: int, *, scale: float) -> ForwardSteps:
        return FlashForward(self, q, scale)

    def begin_backward(self, rows: BackwardRows, count: int, *, scale: float) -> BackwardSteps:
        return FlashBackward(self, rows, scale)

    def forward_of(self, tiles: Tiles, q: Query, k: KeyValue, v: Value, scale: float) -> Partial:
        """Compute the tiles of one call of `calls_of`. Return their partials, in the order of their rows."""
        packed = Packed(tiles)
        given = dict(zip("qkv", of_one_width(packed.rows(q), packed.keys(k), packed.keys(v)), strict=True))
        given = {name: loadable(x) for name, x in given.items()}
        out, lse = self._forward(given | packed.bounds(q), packed.causal, scale)
        return Partial(cut_to(packed.unpacked(out, len(q)), v), packed.unpacked_lse(lse, len(q)))

    def backward_of(
        self, tiles: Tiles, rows: BackwardRows, k: KeyValue, v: Value, scale: float
    ) -> tuple[Float[Tensor, "B H rows D"], Float[Tensor, "B K keys D"], Float[Tensor, "B K keys Dv"]]:
        """Compute the backward of the tiles of one call of `calls_of`. Return (dq, dk, dv).

        dq is in the order of the tiles' rows, and dk and dv are in the order of the tiles' keys.
        """
        assert rows.out is not None
        packed, B = Packed(tiles), len(rows.q)
        tensors = (
            packed.rows(rows.dout),
            packed.rows(rows.q),
            packed.keys(k),
            packed.keys(v),
            packed.rows(rows.out),
        )
        names = "dout", "q", "k", "v", "out"
        given = {name: loadable(x) for name, x in zip(names, of_one_width(*tensors), strict=True)}
        lse = packed.rows_of_lse(rows.lse)
        found = self._backward(given, packed.bounds(rows.q), lse, packed.causal, scale)
        dq, dk, dv = (
            cut_to(packed.unpacked(x, B), like) for x, like in zip(found, (rows.q, k, v), strict=True)
        )
        return dq, dk, dv

    def _library_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        given = {"q": q.transpose(1, 2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
        out, lse = self._forward(given, causal, scale)
        return out.transpose(1, 2), lse

    def _library_backward(self, tile: BackwardTile) -> tuple[Tensor, Tensor, Tensor]:
        named = {"dout": tile.dout, "q": tile.q, "k": tile.k, "v": tile.v, "out": tile.out}
        given = {name: x.transpose(1, 2) for name, x in named.items()}
        dq, dk, dv = self._backward(given, {}, tile.lse, tile.causal, tile.scale)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _forward(self, given: dict[str, Any], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        with torch.cuda.device_of(given["q"]):  # version 4 launches its kernels on the current device
            out, lse, *_ = self._call_forward(_loaded(self.module), given, causal, scale)
        return out, lse

    def _backward(
        self, given: dict[str, Tensor], bounds: dict[str, Any], lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (
            torch.empty_like(given[name], memory_format=torch.contiguous_format) for name in ("q", "k", "v")
        )
        everything = given | bounds | {"dq": dq, "dk": dk, "dv": dv}
        with torch.cuda.device_of(dq):
            self._call_backward(_loaded(self.module), everything, lse, causal, scale)
        return dq, dk, dv


class FlashAttention2(FlashAttention):
    """flash-attn 2.7 or later, for GPUs from sm_80 on. Earlier versions have other arguments and results."""

    name = "flash-2"
    module = "flash_attn.flash_attn_interface"
    package = "flash-attn 2.7 or later (pip install --no-build-isolation 'ringlab[flash]')"

    def missing(self) -> str | None:
        if reason := super().missing():
            return reason
        version = str(getattr(_loaded("flash_attn"), "__version__", "an unknown version"))
        numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
        return None if numbers >= [2, 7] else f"needs {self.package}, got {version}"

    def largest_head_dim(self, capability: Capability) -> int:
        return 256

    def _call_forward(
        self, functions: Any, given: dict[str, Any], causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        varlen = "cu_seqlens_q" in given
        function = functions._flash_attn_varlen_forward if varlen else functions._flash_attn_forward
        return function(**given, softmax_scale=scale, causal=causal, return_softmax=False, **_PLAIN)

    def _call_backward(
        self, functions: Any, given: dict[str, Any], lse: Tensor, causal: bool, scale: float
    ) -> None:
        varlen = "cu_seqlens_q" in given
        function = functions._flash_attn_varlen_backward if varlen else functions._flash_attn_backward
        function(**given, softmax_lse=lse, softmax_scale=scale, causal=causal, deterministic=False, **_PLAIN)


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
        self, functions: Any, given: dict[str, Any], causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        return functions._flash_attn_forward(**given, softmax_scale=scale, causal=causal)

    def _call_backward(
        self, functions: Any, given: dict[str, Any], lse: Tensor, causal: bool, scale: float
    ) -> None:
        functions._flash_attn_backward(**given, softmax_lse=lse, softmax_scale=scale, is_causal=causal)


class FlashAttention4(FlashAttention):
    """flash-attn 4, for Hopper and Blackwell GPUs (sm_90 to sm_110). It compiles each kernel at its first call."""

    name = "flash-4"
    module = "flash_attn.cute.interface"
    package = "flash-attn 4 (pip install 'ringlab[flash4]')"
    thread_safe = False

    def largest_head_dim(self, capability: Capability) -> int:
        return 128 if (9, 0) <= capability < (12, 0) else 0

    def _call_forward(
        self, functions: Any, given: dict[str, Any], causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        return functions._flash_attn_fwd(**given, softmax_scale=scale, causal=causal, return_lse=True)

    def _call_backward(
        self, functions: Any, given: dict[str, Any], lse: Tensor, causal: bool, scale: float
    ) -> None:
        functions._flash_attn_bwd(**given, lse=lse, softmax_scale=scale, causal=causal)


VERSIONS: tuple[FlashAttention, ...] = (FlashAttention4(), FlashAttention3(), FlashAttention2())
"""All versions, the newest first."""


class FlashForward(TilewiseForward):
    """`ForwardSteps` that compute similar tiles of a step together, as sequences of varying length."""

    block: FlashAttention

    def attend(self, tiles: Tiles, k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES) -> None:
        """Attend to the next block."""
        state = self.running(v)
        for call in calls_of(tiles):
            if len(call) == 1 or rules.requirements or not self.q.numel():
                super().attend(call, k, v, rules)
                continue
            state.copy_first()
            part = self.block.forward_of(call, self.q, k, v, self.scale)
            for rows, place in stretches(tile.rows for tile in call):
                state.add(rows, Partial(part.out[..., place, :], part.lse[..., place]))


class FlashBackward(TilewiseBackward):
    """`BackwardSteps` that compute similar tiles of a step together, as sequences of varying length."""

    block: FlashAttention

    def differentiate(
        self, tiles: Tiles, k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES
    ) -> list[Gradient]:
        """Return these rows' contribution to the gradients of the next block."""
        alone = self.block.leaves_backward(self.rows, rules) or not self.rows.q.numel()
        gradients = []
        for call in calls_of(tiles):
            if len(call) == 1 or alone:
                gradients += super().differentiate(call, k, v, rules)
                continue
            self.dq.copy_first()
            dq, dk, dv = self.block.backward_of(call, self.rows, k, v, self.scale)
            for rows, place in stretches(tile.rows for tile in call):
                self.dq.add(rows, dq[..., place, :])
            for keys, place in stretches(tile.keys for tile in call):
                gradients.append(Gradient(keys, dk[..., place, :], dv[..., place, :]))
        return gradients


@lru_cache(maxsize=4096)
def calls_of(tiles: Tiles) -> tuple[Tiles, ...]:
    """Return the tiles in groups, one for each call: full, causal, and mirrored causal tiles.

    The tiles of a group are sorted by rows.

    >>> one, other, before = Tile(0, 2, 0, 2, True), Tile(2, 5, 2, 5, True), Tile(2, 5, 0, 2, False)
    >>> calls_of((one, before, other)) == ((one, other), (before,))
    True
    """
    alike: dict[tuple[bool, bool], list[Tile]] = {}
    for tile in sorted(tiles, key=lambda tile: (tile.q_start, tile.k_start)):
        alike.setdefault((tile.causal, tile.mirrored), []).append(tile)
    return tuple(map(tuple, alike.values()))


def stretches(parts: Iterable[slice]) -> list[tuple[slice, slice]]:
    """Join adjacent parts. Return each stretch with its place in a tensor of all parts, laid end to end.

    >>> stretches([slice(2, 4), slice(4, 5), slice(7, 8)])
    [(slice(2, 5, None), slice(0, 3, None)), (slice(7, 8, None), slice(3, 4, None))]
    """
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    lengths = [part.stop - part.start for part in joined]
    return [
        (part, slice(end - n, end)) for part, n, end in zip(joined, lengths, accumulate(lengths), strict=True)
    ]


class Packed:
    """The tiles of one call, with their tokens one after the other. Each tile of each batch is one sequence.

    Mirrored tiles become causal when all packed rows and all packed keys are put in reverse order.
    """

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.causal, self.mirrored = tiles, tiles[0].causal, tiles[0].mirrored

    def rows(self, x: Heads) -> Float[Tensor, "tokens heads D"]:
        """Return the rows of x as one axis of tokens, batch by batch."""
        return self._packed(x, [tile.rows for tile in self.tiles])

    def keys(self, x: Heads) -> Float[Tensor, "tokens heads D"]:
        """Return the keys of x as one axis of tokens, batch by batch."""
        return self._packed(x, [tile.keys for tile in self.tiles])

    def _packed(self, x: Tensor, parts: list[slice]) -> Tensor:
        # A single stretch of a single batch is not copied: the result is a view.
        found = _picked(x.transpose(1, 2), parts, axis=1)
        return (found.flip(1) if self.mirrored else found).flatten(0, 1)

    def unpacked(self, x: Float[Tensor, "tokens heads D"], B: int) -> Heads:
        """Return a result for packed tokens, unpacked: with an axis for the B batches."""
        found = x.unflatten(0, (B, -1)).transpose(1, 2)
        return found.flip(-2) if self.mirrored else found

    def rows_of_lse(self, lse: RowState) -> Float[Tensor, "H tokens"]:
        """Return the lse of the rows as a dense tensor."""
        found = _picked(lse, [tile.rows for tile in self.tiles], axis=2)
        found = found.flip(-1) if self.mirrored else found
        return found.transpose(0, 1).flatten(1, 2).contiguous()

    def unpacked_lse(self, lse: Float[Tensor, "H tokens"], B: int) -> RowState:
        """Return the lse of packed tokens, unpacked: with an axis for the B batches."""
        found = lse.unflatten(1, (B, -1)).transpose(0, 1)
        return found.flip(-1) if self.mirrored else found

    def bounds(self, q: Query) -> dict[str, Any]:
        """Return the bounds of the sequences in the packed rows and keys, and their largest lengths."""
        return _bounds(self.tiles, len(q), q.device)


def _picked(x: Tensor, parts: list[slice], axis: int) -> Tensor:
    """Return these parts of an axis, one after the other; a view if they are one stretch."""
    found = [x.narrow(axis, part.start, part.stop - part.start) for part, _ in stretches(parts)]
    return found[0] if len(found) == 1 else torch.cat(found, axis)


@kept_for_each_stream(4096)
@torch.inference_mode(False)  # the first call may be in inference mode, whose tensors autograd cannot save
def _bounds(tiles: Tiles, B: int, device: torch.device) -> dict[str, Any]:
    ordered = tiles[::-1] if tiles[0].mirrored else tiles
    found: dict[str, Any] = {}
    for name, parts in (("q", [tile.rows for tile in ordered]), ("k", [tile.keys for tile in ordered])):
        lengths = [part.stop - part.start for part in parts] * B
        found[f"cu_seqlens_{name}"] = upload(np.array([0, *accumulate(lengths)], np.int32), device)
        found[f"max_seqlen_{name}"] = max(lengths)
    return found


@cache
def _loaded(module: str) -> ModuleType | str:
    """Return the module, or the error that its import raises."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken package may raise any error, and an older version may still work
        return str(error)
