"""The seconds that a rank takes to compute one block, from the peak of its hardware or from measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from ringlab.cost.flops import attention_flops
from ringlab.cost.hardware import Hardware, MeasuredBlock
from ringlab.cost.sizes import Attention
from ringlab.errors import CostError
from ringlab.plan import Tile, cut


class BlockTime(Protocol):
    """Seconds of attention between one rank's queries and one block of keys."""

    def seconds(self, tiles: tuple[Tile, ...], sizes: Attention, rows: int, backward: bool) -> float:
        """Return the seconds for these tiles of a rank that has `rows` query rows."""
        ...


def tile_scores(tile: Tile, kernel: tuple[int, int] | None) -> int:
    """Return the score elements of `tile` that are computed by a kernel with tiles of (rows, keys) `kernel`.

    A kernel tile that is not entirely masked counts as a whole; tiles at the edges are smaller.
    If `kernel` is None, only the visible pairs count.
    """
    if kernel is None or not tile.causal:
        return tile.scores
    tile_m, tile_n = kernel
    side = tile.q_stop - tile.q_start  # causal tiles are square
    total = 0
    for first in range(0, side, tile_m):
        last = min(first + tile_m, side)  # the last row of these, row last - 1, sees keys 0 … last - 1
        total += (last - first) * min(-(-last // tile_n) * tile_n, side)
    return total


@dataclass(frozen=True)
class PeakTime:
    """Block times computed as the FLOPs of the kernel tiles, divided by the FLOP/s that kernels reach.

    FLOPs are the `attention_flops` of the score elements. Launches, merging, and summing gradients take no
    time.
    """

    forward_flops_per_s: float
    backward_flops_per_s: float
    tile: tuple[int, int] | None = (128, 128)

    def seconds(self, tiles: tuple[Tile, ...], sizes: Attention, rows: int, backward: bool) -> float:
        """Return the seconds for these tiles."""
        scores = sum(tile_scores(tile, self.tile) for tile in tiles)
        flops = attention_flops(sizes, scores, backward)
        return flops / (self.backward_flops_per_s if backward else self.forward_flops_per_s)


@dataclass(frozen=True)
class MeasuredTime:
    """Block times from measured seconds per launch (one for each tile of the plan), score element, row and step."""

    forward: MeasuredBlock
    backward: MeasuredBlock | None

    @property
    def of_tiles(self) -> MeasuredTime:
        """Return these times without the seconds per step, for tiles that are not steps of a ring."""
        backward = self.backward and replace(self.backward, per_step_s=0.0)
        return MeasuredTime(replace(self.forward, per_step_s=0.0), backward)

    def seconds(self, tiles: tuple[Tile, ...], sizes: Attention, rows: int, backward: bool) -> float:
        """Return the seconds for these tiles of one step. Raises: CostError if this pass was not measured."""
        block = self.backward if backward else self.forward
        if block is None:
            raise CostError("a measured backward", "measurements of the forward only", "ringlab calibrate")
        heads = sizes.B * sizes.H
        return block.per_step_s * bool(tiles) + sum(
            block.per_launch_s + heads * rows * (block.per_row_s + block.per_score_s * keys)
            for tile in tiles
            for rows, keys in _launches(tile, block)
        )


def _launches(tile: Tile, block: MeasuredBlock) -> Iterator[tuple[int, float]]:
    """Yield (rows, keys charged to each row) for each launch of a tile."""
    kernel = None if block.kernel_tile is None else (block.kernel_tile, block.kernel_tile)
    for part in cut(tile, block.largest_causal):
        rows, keys = part.q_stop - part.q_start, part.k_stop - part.k_start
        yield rows, tile_scores(part, kernel) / rows if block.largest_causal is None else keys


def block_time(
    hardware: Hardware,
    dtype: str,
    tile: tuple[int, int] | None = (128, 128),
    D: int | None = None,
    Dv: int | None = None,
) -> BlockTime:
    """Return the block time of `hardware`: measured if its file has measurements, otherwise from its peak.

    Measurements apply only to the head dim that was measured. For another `D`, or if `Dv`, the head dim of v,
    differs from `D`, the peak is used.
    Raises: CostError for a dtype that the hardware does not compute in, or a tile size below one.
    """
    check_tile(tile)
    measured = {
        block.pass_: block
        for block in hardware.block_times
        if block.dtype == dtype and D in (None, block.D) and Dv in (None, block.D)
    }
    if "forward" in measured:
        return MeasuredTime(measured["forward"], measured.get("backward"))
    peak, reached = hardware.peak(dtype), hardware.reached
    return PeakTime(peak * reached.attention_forward, peak * reached.attention_backward, tile)


def check_tile(tile: tuple[int, int] | None) -> None:
    """Check a kernel tile. Raises: CostError unless it is None or two positive integers."""
    if tile is None:
        return
    if len(tile) != 2 or not all(isinstance(edge, int) and edge >= 1 for edge in tile):
        raise CostError("a kernel tile of two sizes >= 1, or None for exact counts", f"{tile!r}", "128x128")
