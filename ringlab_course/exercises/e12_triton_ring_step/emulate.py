"""The ring step of exercise 12 in float64, program by program, right or with mistakes by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ringlab import oracle
from ringlab.plan import Tile

BLOCK = 16
LOG2E = math.log2(math.e)
ALL_SEEN = 1 << 30
"""A shift that hides no key."""


class State(NamedTuple):
    """What travels between steps: acc (B, H, L, D) not normalised, m in base 2, total (B, H, L)."""

    acc: np.ndarray
    m: np.ndarray
    total: np.ndarray


class Step(NamedTuple):
    """One step's block and its launch tables."""

    k: np.ndarray
    v: np.ndarray
    programs: np.ndarray
    segments: np.ndarray


def nothing_seen(shape: Sequence[int]) -> State:
    """Return the state before the first step, for queries of `shape` (…, L, D)."""
    return State(np.zeros(shape), np.full(shape[:-1], -np.inf), np.zeros(shape[:-1]))


def tile(state: State, q, k, v, visible, scale2: float, wrong: Iterable[str] = ()) -> State:
    """Return the state of some rows after one more tile of keys."""
    scores = (q @ k.swapaxes(-1, -2)) * (1.0 if "no_scale" in wrong else scale2)
    visible = ~visible if "mask_inverted" in wrong else visible | ("mask_ignored" in wrong)
    scores = np.where(visible, scores, 0.0 if "zero_for_hidden" in wrong else -np.inf)
    top = scores.max(-1, initial=-np.inf)
    top = top if "maximum_of_the_tile" in wrong else np.maximum(state.m, top)
    safe = np.where(np.isneginf(top), 0.0, top)
    power = np.exp if "natural_exponential" in wrong else np.exp2
    weights, old = power(scores - safe[..., None]), power(state.m - safe)
    one = np.ones_like(old)
    acc = state.acc * (one if {"acc_not_rescaled", "never_rescaled"} & {*wrong} else old)[..., None]
    total = state.total * (one if {"total_not_rescaled", "never_rescaled"} & {*wrong} else old)
    return State(acc + weights @ v, safe if "clamps_the_maximum" in wrong else top, total + weights.sum(-1))


def step(
    state: State, q, block: Step, scale2: float, wrong: Iterable[str] = (), *, carried: bool = True
) -> State:
    """Return the state after one step of the ring: its programs, one after the other.

    `carried` says that the step reads and writes the state in memory, so that a program that
    writes another's rows spoils what that one reads; on the first and the last step it does not.
    """
    q, k, v = (oracle.float64(x) for x in (q, block.k, block.v))
    group = q.shape[1] // k.shape[1]
    if "wrong_group" in wrong:
        k, v = (np.tile(x, (1, group, 1, 1)) for x in (k, v))
    else:
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    before = nothing_seen(q.shape) if "drops_the_state" in wrong else state
    after = State(*(x.copy() for x in before))
    for row_start, row_stop, first, last in block.programs:
        if "writes_foreign_rows" in wrong:
            row_stop = min(row_start + BLOCK, q.shape[-2])
        rows = slice(row_start, row_stop)
        source = after if carried else before
        mine = State(source.acc[..., rows, :], source.m[..., rows], source.total[..., rows])
        last = min(last, first + 1) if "first_segment_only" in wrong else last
        for segment in block.segments[first:last]:
            mine = _segment(
                mine, q[..., rows, :], k, v, segment, np.arange(row_start, row_stop), scale2, wrong
            )
        if "normalises_every_step" in wrong:
            mine = mine._replace(acc=mine.acc / np.where(mine.total == 0, 1.0, mine.total)[..., None])
        after.acc[..., rows, :], after.m[..., rows], after.total[..., rows] = mine
    return after


def _segment(mine: State, q, k, v, segment, rows, scale2: float, wrong: Iterable[str]) -> State:
    begin, full, end, shift = segment
    begin = full if "full_part_forgotten" in wrong else begin
    rows = rows - rows[0] if "row_of_the_program" in wrong else rows
    shift = 0 if "shift_ignored" in wrong and shift < ALL_SEEN // 2 else shift
    shift = shift - 1 if "strictly_before" in wrong else shift
    shift = ALL_SEEN if "no_mask" in wrong else shift
    for start in range(begin, end, BLOCK):
        keys = np.arange(start, min(start + BLOCK, end))
        visible = (keys[None, :] < full) | (keys[None, :] <= rows[:, None] + shift)
        if "drops_the_short_tile" in wrong and len(keys) < BLOCK:
            continue
        places = keys - segment[0] if "keys_not_offset" in wrong and start < full else keys
        k_tile, v_tile = k[..., places, :], v[..., places, :]
        if "tail_counts" in wrong and len(keys) < BLOCK:
            pad = ((0, 0), (0, 0), (0, BLOCK - len(keys)), (0, 0))
            k_tile, v_tile = np.pad(k_tile, pad), np.pad(v_tile, pad)
            visible = np.pad(visible, ((0, 0), (0, BLOCK - len(keys))), constant_values=True)
        mine = tile(mine, q, k_tile, v_tile, visible, scale2, wrong)
    return mine


def finished(state: State, wrong: Iterable[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of a state, lse in the natural logarithm; (0, −inf) where no key was seen."""
    total = np.where(state.total == 0, 1.0, state.total)
    out = state.acc if "last_not_normalised" in wrong else state.acc / total[..., None]
    if "lse_is_the_maximum" in wrong:
        return out, state.m * math.log(2)
    if "lse_mixes_bases" in wrong:
        return out, state.m + np.log(total)
    return out, (state.m + np.log2(total)) * (1.0 if "lse_in_base_two" in wrong else math.log(2))


def comparable(state: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (acc / total, m + log2 total): what a state says, whatever maximum it was scaled with."""
    acc, m, total = (oracle.float64(x) for x in state)
    empty = total == 0
    with np.errstate(all="ignore"):
        return acc / np.where(empty, 1.0, total)[..., None], np.where(empty, m, m + np.log2(total))


def whole_block(rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the launch tables of a block that every row sees whole."""
    return tables((Tile(0, rows, 0, keys, False),) if rows and keys else (), rows, every_row=True)


def tables(tiles: Sequence[Tile], rows: int, *, every_row: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the launch tables (programs, segments) of ringlab's own kernels, int32."""
    import torch

    from ringlab.blocks.triton.visits import row_visits

    visits = row_visits(tuple(tiles), rows, BLOCK, BLOCK, every_row, torch.device("cpu"))
    return visits.programs.numpy(), visits.segments.numpy()
