"""Runs a whole ring step in one launch, and carries the state of the kernels from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ringlab.blocks.protocol import BackwardRows, Gradient
from ringlab.blocks.triton.configs import Config, padded
from ringlab.blocks.triton.visits import check_tiles, key_visits, row_visits
from ringlab.errors import BackendError, DeviceError, DtypeError, RinglabError, ShapeError
from ringlab.merge import Partial
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.tile import Tile
from ringlab.types import KeyValue, Query, Value
from ringlab.upload import upload

LOG2_E = math.log2(math.e)
Tiles = tuple[Tile, ...]


@dataclass(frozen=True)
class Launcher:
    """Launches kernels for tensors of one dtype, device and head dim.

    config: returns the launch configuration for a kernel's name, the head dim of v and the score rules.
    """

    config: Callable[[str, int, TileRules], Config]
    scale: float

    def launch(
        self,
        kernel: str,
        config: Config,
        programs: int,
        heads: int,
        arguments: tuple[Any, ...],
        **constants: Any,
    ) -> None:
        """Launch `kernel` with `programs` · `heads` programs, on the device of the first argument.

        Raises: BackendError if the GPU has too little shared memory or too few registers.
        """
        from triton.runtime.errors import OutOfResources

        from ringlab.blocks.triton import kernels

        constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PRECISION": config.precision}
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        try:
            with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device and stream
                getattr(kernels, kernel)[(programs * heads,)](*arguments, **constants, **options)
        except OutOfResources as error:
            raise BackendError(
                f"a GPU that can run {kernel} with tiles of {config}", str(error), "use block='auto'"
            ) from error


@dataclass(frozen=True)
class RuleArguments:
    """`TileRules` as arguments of a launch.

    positions: the positions of rows and of keys. draw: the first head, the halves of the seed, and the
    largest random word that is dropped. cap: the soft cap. keep: 1/(1 − dropout). softcap, dropout: whether
    the kernel is compiled for these rules.
    """

    positions: tuple[Tensor, Tensor]
    draw: tuple[int, int, int, int] = (0, 0, 0, 0)
    cap: float = 1.0
    keep: float = 1.0
    softcap: bool = False
    dropout: bool = False

    @classmethod
    def of(cls, tile: TileRules, unused: Int[Tensor, "..."], unit: float = 1.0) -> RuleArguments:
        """Return the arguments on the device of `unused`, an int32 tensor to pass for unread parameters.

        unit: a factor by which the cap is multiplied.
        """
        rules = tile.rules
        arguments = cls(
            (unused, unused), cap=unit * (rules.softcap or 1.0), softcap=rules.softcap is not None
        )
        # The largest word that is dropped, or −1 if dropout is so small that no word is dropped.
        dropped = round(rules.dropout * 2**32) - 1
        if dropped < 0:
            return arguments
        rows, keys = (upload(x.to(torch.int32), unused.device) for x in (tile.rows, tile.keys))
        words = rules.seed & 0xFFFFFFFF, rules.seed >> 32, dropped
        low, high, most = ((word + 2**31) % 2**32 - 2**31 for word in words)
        draw = rules.first_head, low, high, most
        return replace(
            arguments, positions=(rows, keys), draw=draw, keep=1 / (1 - rules.dropout), dropout=True
        )

    @property
    def flags(self) -> dict[str, bool]:
        """Return the constants for which a kernel is compiled."""
        return {"SOFTCAP": self.softcap, "DROPOUT": self.dropout}


class TritonForward:
    """The forward of one rank's queries by Triton: `ForwardSteps` with a float32 state between blocks."""

    def __init__(self, launcher: Launcher, q: Query, count: int) -> None:
        self.launcher, self.q, self.count, self.step = launcher, dense(q), count, 0
        self.state: tuple[Tensor, ...] = ()
        self.out, self.lse = torch.empty(0), torch.empty(0)

    def attend(self, tiles: Tiles, k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES) -> None:
        """Attend to the next block in one launch, or without a launch if there is nothing to compute.

        rules: the rules of all rows and all keys of the block.
        Raises: ShapeError, DtypeError or DeviceError for q, k, v and tiles that do not fit together; BackendError
        after the last block.
        """
        _check_step(self.step, self.count, tiles, self.q, k, v)
        first, last = self.step == 0, self.step == self.count - 1
        self.step += 1
        q, shape = self.q, (*self.q.shape[:-1], v.shape[-1])
        if first and not last:
            acc = torch.empty(shape, dtype=torch.float32, device=q.device)
            self.state = acc, acc.new_empty(q.shape[:-1]), acc.new_empty(q.shape[:-1])
        if last:
            self.out = torch.empty(shape, dtype=q.dtype, device=q.device)
            self.lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        if q.numel() and (tiles or first or last):
            self._launch(tiles, dense(k), dense(v), first, last, rules)
        if last:
            self.state = ()

    def partial(self) -> Partial:
        """Return the partial over all blocks. Its out has the dtype of q."""
        return Partial(self.out, self.lse)

    def _launch(self, tiles: Tiles, k: Tensor, v: Tensor, first: bool, last: bool, rules: TileRules) -> None:
        q, scale = self.q, self.launcher.scale * LOG2_E
        B, H, L, _ = q.shape
        config = self.launcher.config("forward_step", v.shape[-1], rules)
        visits = row_visits(tiles, L, config.block_m, config.block_n, first or last, q.device)
        # A parameter that the kernel never reads may be any tensor.
        state = self.state or (self.lse,) * 3
        ends = (self.out, self.lse) if last else (state[0], state[1])
        ruled = RuleArguments.of(rules, visits.programs, LOG2_E)
        tensors = (q, k, v, *state, *ends, *visits.arguments, *ruled.positions)
        arguments = (*tensors, *strides(q), *strides(k), *strides(v))
        self.launcher.launch(
            "forward_step",
            config,
            len(visits.programs),
            B * H,
            (*arguments, len(visits.programs), L, H, *ruled.draw, abs(scale), ruled.cap, ruled.keep),
            **sizes(q, k, v),
            **ruled.flags,
            WINDOW=visits.lows is not None,
            FIRST=first,
            LAST=last,
            NEGATIVE=scale < 0,
            # Reading this from a GPU would make the CPU wait. torch's own GPU operators do not check it
            # either.
            NON_FINITE=v.device.type == "cpu" and not bool(torch.isfinite(v).all()),
        )


class TritonBackward:
    """The backward of one rank's queries by Triton. dQ is summed over blocks in float32; dK and dV are per block."""

    def __init__(self, launcher: Launcher, rows: BackwardRows, count: int) -> None:
        _check_rows(rows)
        self.launcher, self.count, self.step = launcher, count, 0
        self.dout, self.q = dense(rows.dout), dense(rows.q)
        self.lse, self.delta = dense_rows(rows.lse), dense_rows(rows.delta)
        self.total, self.dq = torch.empty(0), torch.empty(0)

    def differentiate(
        self, tiles: Tiles, k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES
    ) -> list[Gradient]:
        """Return the contribution of these rows to the gradients of the next block's K and V, in float32.

        The list has one entry for all keys of the block. It is empty if the rows see none of them.
        rules: the rules of the forward.
        Raises: ShapeError, DtypeError or DeviceError for q, k, v and tiles that do not fit together; BackendError
        after the last block.
        """
        _check_step(self.step, self.count, tiles, self.q, k, v)
        first, last = self.step == 0, self.step == self.count - 1
        self.step += 1
        k, v = dense(k), dense(v)
        if first and not last:
            self.total = torch.empty(self.q.shape, dtype=torch.float32, device=self.q.device)
        if last:
            self.dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        if self.q.numel() and (tiles or first or last):
            self._launch_dq(tiles, k, v, first, last, rules)
        if last:
            self.total = torch.empty(0)
        return [self._launch_dkv(tiles, k, v, rules)] if tiles else []

    def query_gradient(self) -> Query:
        """Return dq over all blocks, in the dtype of q."""
        return self.dq

    def _launch_dq(
        self, tiles: Tiles, k: Tensor, v: Tensor, first: bool, last: bool, rules: TileRules
    ) -> None:
        B, H, L, _ = self.q.shape
        config = self.launcher.config("backward_dq", v.shape[-1], rules)
        visits = row_visits(tiles, L, config.block_m, config.block_n, first or last, self.q.device)
        total = self.total if not (first and last) else self.lse
        ends = (total, self.dq if last else total)
        ruled = RuleArguments.of(rules, visits.programs)
        arguments = (*self._inputs(k, v), *ends, *visits.arguments, *ruled.positions, *self._strides(k, v))
        factors = self.launcher.scale, ruled.cap, ruled.keep
        self.launcher.launch(
            "backward_dq",
            config,
            len(visits.programs),
            B * H,
            (*arguments, len(visits.programs), L, H, *ruled.draw, *factors),
            **sizes(self.q, k, v),
            **ruled.flags,
            WINDOW=visits.lows is not None,
            FIRST=first,
            LAST=last,
        )

    def _launch_dkv(self, tiles: Tiles, k: Tensor, v: Tensor, rules: TileRules) -> Gradient:
        (B, H, L, _), (_, K, Lk, _) = self.q.shape, k.shape
        dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        config = self.launcher.config("backward_dkv", v.shape[-1], rules)
        visits = key_visits(tiles, L, Lk, config.block_m, config.block_n, self.q.device)
        ruled = RuleArguments.of(rules, visits.programs)
        arguments = (*self._inputs(k, v), dk, dv, *visits.arguments, *ruled.positions, *self._strides(k, v))
        factors = self.launcher.scale, ruled.cap, ruled.keep
        self.launcher.launch(
            "backward_dkv",
            config,
            len(visits.programs),
            B * K,
            (*arguments, len(visits.programs), L, Lk, H, *ruled.draw, *factors),
            **sizes(self.q, k, v),
            **ruled.flags,
            WINDOW=visits.lows is not None,
        )
        return Gradient(slice(0, Lk), dk, dv)

    def _inputs(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.q, k, v, self.dout, self.lse, self.delta

    def _strides(self, k: Tensor, v: Tensor) -> tuple[int, ...]:
        return *strides(self.q), *strides(k), *strides(v), *strides(self.dout)


def _check_step(step: int, count: int, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise an error if the kernels, which check nothing, would read or write beyond a tensor."""
    if step >= count:
        raise BackendError(f"at most {count} steps, the number that was given at the start", "one more")
    _check_kinds(q, k=k, v=v)
    if k.shape[:3] != v.shape[:3] or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise _misfit("q (B, H, L, D), k (B, K, L, D) and v (B, K, L, Dv)", q=q, k=k, v=v)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError("query heads divisible by key/value heads", f"{q.shape[1]} and {k.shape[1]}")
    check_tiles(tiles, q.shape[2], k.shape[2])


def _check_rows(rows: BackwardRows) -> None:
    """Raise an error for rows whose dout, lse or delta do not fit q."""
    q, dout, lse, delta = rows.q, rows.dout, rows.lse, rows.delta
    _check_kinds(q, dout=dout)
    if dout.shape[:3] != q.shape[:3] or lse.shape != q.shape[:3] or delta.shape != q.shape[:3]:
        raise _misfit(
            "dout (B, H, L, Dv) like q (B, H, L, D), and lse and delta (B, H, L)",
            q=q,
            dout=dout,
            lse=lse,
            delta=delta,
        )
    if {lse.device, delta.device} != {q.device}:
        devices = f"q on {q.device}, lse on {lse.device}, delta on {delta.device}"
        raise DeviceError("lse and delta on q's device", devices, "move them with .to(q.device)")


def _check_kinds(q: Tensor, **others: Tensor) -> None:
    """Raise an error unless all are tensors of four axes with the dtype and device of q."""
    names = " and ".join(others)
    for name, x in others.items():
        if x.ndim != 4 or q.ndim != 4:
            raise _misfit(f"q, {names} as tensors (batch, heads, tokens, head dim)", q=q, **others)
        if x.dtype != q.dtype:
            got = f"q {q.dtype}, {name} {x.dtype}"
            raise DtypeError(f"{names} in the dtype of q", got, f"pass {name}.to(q.dtype)")
        if x.device != q.device:
            got = f"q on {q.device}, {name} on {x.device}"
            raise DeviceError(f"{names} on the device of q", got, f"pass {name}.to(q.device)")


def _misfit(needed: str, **tensors: Tensor) -> RinglabError:
    return ShapeError(needed, ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items()))


def dense(x: Shaped[Tensor, "B H L D"]) -> Shaped[Tensor, "B H L D"]:
    """Return `x`, or a contiguous copy if the kernels cannot address it.

    They cannot if its head dim is not dense, if a stride is not a whole number of units, or if rows are far apart.
    """
    unit = _unit(x.shape[-1])
    whole = all(step % unit == 0 for step, size in zip(x.stride()[:3], x.shape, strict=False) if size > 1)
    # The kernels compute offsets within a tile as 32-bit numbers.
    near = x.stride(-1) == 1 and x.stride(-2) < 2**22
    return x if near and whole and _starts_evenly(x) else _copy(x)


def dense_rows(x: Shaped[Tensor, "B H L"]) -> Float[Tensor, "B H L"]:
    """Return `x`, which has one number per row, as the kernels read it: in float32 and contiguous."""
    x = x.to(torch.float32)
    return x if x.is_contiguous() and _starts_evenly(x) else _copy(x)


def _starts_evenly(x: Tensor) -> bool:
    """Return whether `x` begins at a multiple of 16 bytes. For other tensors Triton would compile a slower kernel."""
    return x.storage_offset() * x.element_size() % 16 == 0


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _unit(dim: int) -> int:
    """Return the unit of strides for this head dim, in elements."""
    return math.gcd(dim, 8)


def strides(x: Float[Tensor, "B H L D"]) -> tuple[int, int, int]:
    """Return the strides over batch, heads and tokens, in units of gcd(D, 8) elements."""
    unit = _unit(x.shape[-1])
    return x.stride(0) // unit, x.stride(1) // unit, x.stride(2) // unit


def sizes(q: Query, k: KeyValue, v: Value) -> dict[str, int]:
    """Return the kernel constants that follow from the shapes."""
    D, Dv = q.shape[-1], v.shape[-1]
    dims = {"HEAD_DIM": D, "VALUE_DIM": Dv, "BLOCK_D": padded(D), "BLOCK_V": padded(Dv)}
    return {"GROUP": q.shape[1] // k.shape[1], **dims}
