"""The block backend `flex`: FlexAttention of torch, which takes a mask and a soft cap as functions.

One call computes all tiles of a K/V block. Each row has a list of the intervals of keys that it sees, and
the mask function reads that list, so one function serves every mask and layout. A second table lists the
squares of 128 × 128 scores that contain a visible pair, and FlexAttention computes no other square.

On a GPU torch compiles FlexAttention to a Triton kernel. A ring of equal shards needs one kernel for the
forward and one pair for the backward, and twice as many if some rows see two intervals of keys, as with a
prefix and a window. The first call of each kernel takes seconds. At the first shard of a second length, torch
compiles the kernels once more, now for all lengths. Lengths up to 128 and longer ones have separate kernels.

FlexAttention's own backward uses the lse of one block, not the ring's lse. With the weight w = e^(lse of the
block − lse), the probabilities in the ring are P = w·P_block. FlexAttention therefore returns the gradients
of the ring if it is given

    w·dout as the gradient of the block's out, and
    rowsum(w·dout·out of the block) − w·delta as the gradient of the block's lse.

The backward thus needs neither out nor a private operator of torch, but it computes the forward of the block
again.
Source: arXiv 2412.05496 (FlexAttention).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, no_type_check

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ringlab.blocks.blockwise import Blockwise
from ringlab.blocks.library import too_old
from ringlab.blocks.protocol import BackwardRows, BackwardSteps, Gradient, StepBlock
from ringlab.blocks.tilewise import RunningPartial, RunningSum, TilewiseBackward
from ringlab.handles import Handled
from ringlab.merge import Partial
from ringlab.scores import PLAIN_RULES, TileRules
from ringlab.tile import Tile
from ringlab.torch_modes import outside_modes
from ringlab.types import KeyValue, Query, Value
from ringlab.upload import kept_for_each_stream, upload

Tiles = tuple[Tile, ...]

DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
"""The dtypes that FlexAttention supports, by device.

On a GPU, `torch.set_float32_matmul_precision` applies to float32.
"""
NARROWEST, WIDEST = 16, 256
"""The smallest and the largest head dim on a GPU. Triton multiplies no matrices that are narrower than 16."""
COMPILERS: dict[str, Any] = {"cpu": "eager", "cuda": "inductor"}
"""The backend of torch.compile by device. "eager" runs FlexAttention's own definition, with all scores in memory."""


class Flex(StepBlock, Handled):
    """FlexAttention on GPUs from sm_80 on, and on the CPU. It supports any mask and a soft cap, but no dropout.

    The head dim of v may differ from that of q and k. FlexAttention has no backward on the CPU, so `Blockwise`
    computes it there.
    """

    name = "flex"
    largest_causal: int | None = None
    thread_safe = False  # torch compiles in one thread at a time
    supported_rules = frozenset({"softcap"})

    def supports(self, q: Query) -> str | None:
        kind = q.device.type
        if kind not in DTYPES:
            return f"runs on {' and '.join(DTYPES)}, not on {kind}"
        if q.dtype not in DTYPES[kind]:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[kind])
            return f"on {kind} needs one of {names}, got {q.dtype}"
        if kind == "cpu":
            return None
        if not NARROWEST <= q.shape[-1] <= WIDEST:
            return f"on cuda needs a head dim from {NARROWEST} to {WIDEST}, got {q.shape[-1]}"
        if find_spec("triton") is None:
            return "on cuda needs Triton, which is not installed here (pip install triton, on Linux)"
        return too_old(q.device)

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
        if not has_backward(rows.q):
            return Blockwise().backward(rows, k, v, causal=causal, scale=scale, rules=rules)
        return super().backward(rows, k, v, causal=causal, scale=scale, rules=rules)

    def begin_forward(self, q: Query, count: int, *, scale: float) -> FlexForward:
        return FlexForward(q, scale)

    def begin_backward(self, rows: BackwardRows, count: int, *, scale: float) -> BackwardSteps:
        if not has_backward(rows.q):
            return TilewiseBackward(Blockwise(), rows, scale)
        return FlexBackward(rows, scale)


def has_backward(q: Query) -> bool:
    """Return whether FlexAttention differentiates tensors on the device of `q`."""
    return q.device.type != "cpu"


class FlexForward:
    """`ForwardSteps` by FlexAttention: the partial of each block is merged into a running partial."""

    def __init__(self, q: Query, scale: float) -> None:
        self.q, self.scale = _dense(q), scale
        self.state: RunningPartial | None = None

    def attend(self, tiles: Tiles, k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES) -> None:
        """Attend to the next block in one call, or in none if no row sees a key of it."""
        if self.state is None:  # the first v determines the width of out
            self.state = RunningPartial(self.q, v.shape[-1])
        if tiles and self.q.numel():
            self.state.copy_first()
            # Leave dispatch modes, because torch's compiler would try to compile a mode, such as the meter of
            # memory. The meter therefore sees only the sums that are kept, and not the memory that FlexAttention
            # allocates. Always use the same grad mode, because torch compiles a separate graph for each mode.
            with outside_modes(), torch.no_grad():
                out, lse = _attend(tiles, self.q, _dense(k), _dense(v), self.scale, rules)
            self.state.add(slice(0, self.q.shape[-2]), Partial(out, lse))

    def partial(self) -> Partial:
        """Return the partial over all blocks so far. There must be at least one."""
        assert self.state is not None
        return self.state.value()


class FlexBackward:
    """`BackwardSteps` by FlexAttention: dq is summed over blocks, and dk and dv of each block are returned."""

    def __init__(self, rows: BackwardRows, scale: float) -> None:
        self.rows, self.q, self.scale = rows, _dense(rows.q), scale
        self.dq = RunningSum(rows.q)

    def differentiate(
        self, tiles: Tiles, k: KeyValue, v: Value, rules: TileRules = PLAIN_RULES
    ) -> list[Gradient]:
        """Return these rows' contribution to the gradients of the next block: at most one entry."""
        if not tiles or not self.q.numel():
            return []
        self.dq.copy_first()
        with outside_modes():
            q, k, v = (_dense(x).requires_grad_() for x in (self.q, k, v))
            with torch.enable_grad():
                out, lse = _attend(tiles, q, k, v, self.scale, rules)
            dq, dk, dv = torch.autograd.grad(
                (out, lse), (q, k, v), self._of_block(out.detach(), lse.detach())
            )
        self.dq.add(slice(0, self.q.shape[-2]), dq)
        return [Gradient(slice(0, k.shape[-2]), dk, dv)]

    def query_gradient(self) -> Query:
        """Return dq over all blocks so far."""
        return self.dq.value()

    def _of_block(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the block's own out and lse that give the ring's dq, dk and dv."""
        final = self.rows.lse.masked_fill(self.rows.lse == -math.inf, 0.0)  # −inf − −inf would be NaN
        weight = torch.exp(lse - final)  # 0 where a row sees no key of the block, whose lse is −inf there
        dout = (weight.unsqueeze(-1) * self.rows.dout).to(out.dtype)
        # The kernel multiplies the rounded dout. This product uses it too, so that the two products cancel.
        own = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
        return dout, own - weight * self.rows.delta


class BlockTables(NamedTuple):
    """The mask of a K/V block on one device.

    mask: FlexAttention's `BlockMask`. intervals: the largest number of intervals of keys that a row sees.
    """

    mask: Any
    intervals: int


def visible_intervals(tiles: Tiles, n_rows: int) -> Int[np.ndarray, "intervals 2 rows"]:
    """Return the first key and the end of each interval of keys that a row sees.

    A row that sees fewer intervals than another row has empty intervals, from 0 to 0.

    >>> visible_intervals((Tile(0, 2, 0, 2, causal=True), Tile(1, 2, 4, 6, causal=False)), 2).tolist()
    [[[0, 0], [1, 2]], [[0, 4], [0, 6]]]
    """
    found = np.zeros((1, 2, n_rows), np.int32)
    used = np.zeros(n_rows, int)
    for tile in sorted(tiles, key=lambda tile: tile.k_start):
        rows, step = np.arange(tile.q_start, tile.q_stop), np.arange(tile.q_stop - tile.q_start)
        begin, end = np.full_like(rows, tile.k_start), np.full_like(rows, tile.k_stop)
        if tile.causal and tile.mirrored:
            begin += step
        elif tile.causal:
            end = begin + step + 1
        last = np.maximum(used[rows] - 1, 0)
        longer = (used[rows] > 0) & (found[last, 1, rows] == begin)
        found[last[longer], 1, rows[longer]] = end[longer]
        rows, begin, end = rows[~longer], begin[~longer], end[~longer]
        if len(rows) and used[rows].max() == len(found):
            found = np.concatenate([found, np.zeros((1, 2, n_rows), np.int32)])
        found[used[rows], 0, rows], found[used[rows], 1, rows] = begin, end
        used[rows] += 1
    return found


def visible_squares(
    intervals: Int[np.ndarray, "intervals 2 rows"], n_keys: int, size: int
) -> Int[np.ndarray, "rows_of_squares keys_of_squares"]:
    """Return the number of visible pairs in each square of `size` × `size` scores.

    >>> visible_squares(visible_intervals((Tile(0, 4, 0, 4, causal=True),), 4), 4, 2).tolist()
    [[3, 0], [4, 3]]
    """
    first = np.arange(0, n_keys, size)
    counts = []
    for row in range(0, intervals.shape[2], size):
        begin, end = intervals[:, :, row : row + size].swapaxes(0, 1)
        within = np.minimum(end[..., None], first + size) - np.maximum(begin[..., None], first)
        counts.append(within.clip(0).sum((0, 1)))
    return np.array(counts)


@kept_for_each_stream(256)
@torch.inference_mode(False)  # the first call may be in inference mode, whose tensors autograd cannot save
def block_tables(tiles: Tiles, n_rows: int, n_keys: int, device: torch.device) -> BlockTables:
    """Return the mask of a block, under which each row sees the keys that these tiles show it."""
    from torch.nn.attention.flex_attention import BlockMask

    size = 128  # FlexAttention's own default
    intervals = visible_intervals(tiles, n_rows)
    counts = visible_squares(intervals, n_keys, size)
    pairs = [tuple(upload(edge, device) for edge in interval) for interval in intervals]

    @no_type_check  # jaxtyping's import hook would add a check of shapes, which torch cannot compile
    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        seen = (pairs[0][0][row] <= key) & (key < pairs[0][1][row])
        for begin, end in pairs[1:]:
            seen = seen | ((begin[row] <= key) & (key < end[row]))
        return seen

    def listed(chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return, for each row of squares, how many are chosen, and the indices of all, the chosen first."""
        order = np.argsort(~chosen, axis=1, kind="stable")
        both = chosen.sum(1).astype(np.int32), order.astype(np.int32)
        number, indices = (upload(table, device)[None, None] for table in both)
        return number, indices

    whole = counts == size * size
    some = (counts > 0) & ~whole
    # BlockMask.from_kv_blocks would compute the lists of rows from the lists of keys, with many launches.
    tables = (*listed(some), *listed(whole), *listed(some.T), *listed(whole.T))
    mask = BlockMask((n_rows, n_keys), *tables, BLOCK_SIZE=(size, size), mask_mod=sees)
    return BlockTables(mask, len(intervals))


def _attend(
    tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, scale: float, rules: TileRules
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the rows over the keys that the tiles show them.

    For a row without keys, out is 0 and lse is −inf.
    """
    found = block_tables(tiles, q.shape[-2], k.shape[-2], q.device)
    # torch compiles a separate graph for a length of 1.
    alone = tuple(x.shape[axis] == 1 for x in (q, k) for axis in (0, -2))
    signature = (
        found.intervals, q.requires_grad, q.dtype, q.device, q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], alone
    )  # fmt: skip
    return _compiled(signature, q.device.type, scale, rules.rules.softcap)(q, k, v, found.mask)


@cache
def _compiled(
    signature: Hashable, kind: str, scale: float, softcap: float | None
) -> Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]:
    """Return FlexAttention compiled for one signature of tensors, one scale and one soft cap."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    @no_type_check
    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    @no_type_check
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        out, found = flex_attention(
            q, k, v, None if softcap is None else capped, mask, scale, True,
            return_aux=AuxRequest(lse=True), kernel_options={"BACKEND": "TRITON"},
        )  # fmt: skip
        return out, found.lse

    # Each function has a code object of its own, because torch refuses to compile a ninth graph of one code object.
    # Each function also has a name of its own. If calls of functions of one name differed in the scale or the cap,
    # torch would make that number an input of the graph, which FlexAttention does not accept.
    name = re.sub(r"\W+", "_", f"attend_{signature}_{scale}_{softcap}")
    attend.__code__ = attend.__code__.replace(co_name=name)
    return torch.compile(attend, backend=COMPILERS[kind], fullgraph=True)


def _dense(x: Tensor) -> Tensor:
    """Return `x` as a contiguous leaf of autograd, because other strides would need another graph."""
    return x.detach().contiguous()
