"""Exercise 12's ring step in float64, correct or with named mistakes. Programs run one after another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ringlab import oracle
from ringlab.layout import Layout, Run

ROWS, KEYS = 32, 16
"""BLOCK_M and BLOCK_N of the exercise."""
LOG2E = math.log2(math.e)
ALWAYS = 1 << 30
"""A bound of a band that hides no key."""
NOTHING, STATE, RESULT = 0, 1, 2
"""The start of a step: with no key seen, from the state, or from the OUT and LSE of a finished run."""


class State(NamedTuple):
    """The state that steps pass on: acc (B, H, L, D) is not normalised, m (B, H, L) is in base 2."""

    acc: np.ndarray
    m: np.ndarray
    total: np.ndarray


class Step(NamedTuple):
    """The block of one step, with integers k and v and a scale for each key, and its launch tables."""

    k: np.ndarray
    ks: np.ndarray
    v: np.ndarray
    vs: np.ndarray
    programs: np.ndarray
    segments: np.ndarray


def nothing_seen(shape: Sequence[int]) -> State:
    """Return the state before the first step, for queries of `shape` (…, L, D)."""
    return State(np.zeros(shape), np.full(shape[:-1], -np.inf), np.zeros(shape[:-1]))


def resumed(out: np.ndarray, lse: np.ndarray, wrong: Iterable[str] = ()) -> State:
    """Return a state that is equivalent to the result (out, lse)."""
    m = lse * (1.0 if "lse_taken_for_base_two" in wrong else LOG2E)
    m = lse * math.log(2) if "lse_turned_twice" in wrong else m
    total = np.where(np.isneginf(m), 0.0, 1.0)
    if "result_weighs_nothing" in wrong:
        total = np.zeros_like(total)
    if "result_not_turned_into_a_sum" in wrong:
        m, total = np.where(np.isneginf(lse), lse, 0.0), np.exp(lse)
    return State(np.zeros_like(out) if "acc_of_result_forgotten" in wrong else np.array(out), m, total)


def tile(state: State, q, k, ks, v, vs, visible, scale2: float, wrong: Iterable[str] = ()) -> State:
    """Return the state of some rows after one more tile of keys."""
    ks = np.ones_like(ks) if "key_scales_forgotten" in wrong else ks
    vs = np.ones_like(vs) if "value_scales_forgotten" in wrong else vs
    ks, vs = (vs, ks) if "scales_swapped" in wrong else (ks, vs)
    if "scaled_query_rounded" in wrong:
        q, scale2 = (torch.from_numpy(q).float() * scale2).bfloat16().double().numpy(), 1.0
    scores = (q @ k.swapaxes(-1, -2)) * ks[..., None, :] * (1.0 if "no_scale" in wrong else scale2)
    visible = ~visible if "mask_inverted" in wrong else visible | ("mask_ignored" in wrong)
    scores = np.where(visible, scores, 0.0 if "zero_for_hidden" in wrong else -np.inf)
    top = np.maximum(state.m, scores.max(-1, initial=-np.inf))
    safe = np.where(np.isneginf(top), 0.0, top)
    power = np.exp if "natural_exponential" in wrong else np.exp2
    weights, old = power(scores - safe[..., None]), power(state.m - safe)
    one, scaled = np.ones_like(old), weights * vs[..., None, :]
    acc = state.acc * (one if {"acc_not_rescaled", "never_rescaled"} & {*wrong} else old)[..., None]
    total = state.total * (one if {"total_not_rescaled", "never_rescaled"} & {*wrong} else old)
    mass = scaled if "value_scales_in_total" in wrong else weights
    added = scaled @ v
    if "value_scales_by_column" in wrong:
        columns = np.zeros((*vs.shape[:-1], v.shape[-1]))
        columns[..., : vs.shape[-1]] = vs  # a short tile has the scale 0 for keys that do not exist
        added = (weights @ v) * columns[..., None, :]
    if "new_values_rescaled" in wrong:
        added = added * old[..., None]
    acc = acc + added
    total = total + mass.sum(-1)
    if "normalises_every_tile" in wrong:
        acc = acc / np.where(total == 0, 1.0, total)[..., None]
    return State(acc, safe if "clamps_the_maximum" in wrong else top, total)


def step(
    state: State, q, block: Step, scale2: float, wrong: Iterable[str] = (), *, carried: bool = True
) -> State:
    """Return the state after one step of the ring, which runs its programs one after the other.

    carried: whether the step reads the state from memory and writes it there too. The first and the last
    step do not. In all other steps, a program that writes rows of another program changes what that program
    reads.
    """
    group = q.shape[1] // block.k.shape[1]
    arrays = [_spread(oracle.float64(x), group, q.shape[-2], wrong) for x in block[:4]]
    q = oracle.float64(q)
    before = nothing_seen(q.shape) if "drops_the_state" in wrong else state
    after = State(*(x.copy() for x in before))
    for row_start, row_stop, first, last in block.programs:
        if "writes_foreign_rows" in wrong:
            row_stop = min(row_start + ROWS, q.shape[-2])
        rows = slice(row_start, row_stop)
        source = after if carried else before
        mine = State(source.acc[..., rows, :], source.m[..., rows], source.total[..., rows])
        last = min(last, first + 1) if "first_segment_only" in wrong else last
        for segment in block.segments[first:last]:
            numbers = np.arange(row_start, row_stop)
            mine = _segment(mine, q[..., rows, :], arrays, segment, numbers, scale2, wrong)
        after.acc[..., rows, :], after.m[..., rows], after.total[..., rows] = mine
    return after


def _spread(x: np.ndarray, group: int, rows: int, wrong: Iterable[str]) -> np.ndarray:
    """Return the keys or values that each query head reads.

    Query head h reads K/V head h // group, unless a mistake in `base` makes it read elsewhere.
    """
    B, K, keys, *rest = x.shape
    head = np.arange(B * K * group)
    base = (head % (B * K) if "wrong_group" in wrong else head // group) * keys
    if "base_without_length" in wrong:
        base = head // group
    if "base_by_query_length" in wrong:
        base = head // group * rows
    if "scales_without_base" in wrong and not rest:
        base = 0 * head
    flat = x.reshape(B * K * keys, *rest)
    return flat[base[:, None] + np.arange(keys)].reshape(B, K * group, keys, *rest)


def _segment(mine: State, q, arrays, segment, rows, scale2: float, wrong: Iterable[str]) -> State:
    begin, full, full_end, end, low, high = (int(number) for number in segment)
    if "row_of_the_program" in wrong:
        rows = rows - rows[0]
    high = high - 1 if "strictly_before" in wrong else high
    low = -ALWAYS if "no_lower_bound" in wrong else low
    low = low + 1 if "window_too_short" in wrong else low
    low, high = (-ALWAYS, ALWAYS) if "no_mask" in wrong else (low, high)
    parts = {"head": (begin, full), "full": (full, full_end), "tail": (full_end, end)}
    for name in [name for name in parts if f"{name}_forgotten" not in wrong]:
        for start in range(*parts[name], KEYS):
            keys = np.arange(start, min(start + KEYS, parts[name][1]))
            visible = (rows[:, None] + low <= keys[None, :]) & (keys[None, :] <= rows[:, None] + high)
            visible = visible | (name == "full")
            if "drops_the_short_tile" in wrong and len(keys) < KEYS:
                continue
            places = keys - parts["full"][0] if "keys_not_offset" in wrong and name == "full" else keys
            k, ks, v, vs = (x[..., places, :] if x.ndim == 4 else x[..., places] for x in arrays)
            if "tail_counts" in wrong and len(keys) < KEYS:
                missing = (0, KEYS - len(keys))
                k, v = (np.pad(x, ((0, 0), (0, 0), missing, (0, 0))) for x in (k, v))
                ks, vs = (np.pad(x, ((0, 0), (0, 0), missing)) for x in (ks, vs))
                visible = np.pad(visible, ((0, 0), missing), constant_values=True)
            mine = tile(mine, q, k, ks, v, vs, visible, scale2, wrong)
    return mine


def finished(state: State, wrong: Iterable[str] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return (out, lse) of a state, with lse in the natural logarithm.

    A row that saw no key has (0, −inf).
    """
    total = np.where(state.total == 0, 1.0, state.total)
    out = state.acc if "last_not_normalised" in wrong else state.acc / total[..., None]
    if "lse_is_the_maximum" in wrong:
        return out, state.m * math.log(2)
    if "lse_mixes_bases" in wrong:
        return out, state.m + np.log(total)
    return out, (state.m + np.log2(total)) * (1.0 if "lse_in_base_two" in wrong else math.log(2))


def comparable(state: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (acc / total, m + log2 total), which does not depend on the maximum that scales the state."""
    acc, m, total = (oracle.float64(x) for x in state)
    empty = total == 0
    with np.errstate(all="ignore"):
        return acc / np.where(empty, 1.0, total)[..., None], np.where(empty, m, m + np.log2(total))


def whole_block(rows: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the launch tables of a block that is visible to every row as a whole."""
    segments = [(0, 0, keys, keys, -ALWAYS, ALWAYS)] if keys else []
    return _tables([(a, b, segments) for a, b in _pieces(0, rows)])


def tables(
    layout: Layout, rank: int, origin: int, causal: bool, window: int | None, *, every_row: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the launch tables (programs, segments) of one step in int32, the programs with most keys first.

    window: how many tokens a query sees, its own included, or None for all tokens before it. With
    `every_row`, rows that see nothing have a program too.
    """
    programs = []
    for first_row, run in _runs(layout, rank):
        for start, stop in _pieces(first_row, run.length):
            bands = [_band(run, first_row, keys, first, window) for first, keys in _runs(layout, origin)]
            bands = [band if causal else (*band[:2], -ALWAYS, ALWAYS) for band in bands]
            segments = [seen for band in bands if (seen := _seen(band, start, stop))]
            if segments or every_row:
                programs.append((start, stop, segments))
    return _tables(sorted(programs, key=lambda program: -sum(s[3] - s[0] for s in program[2])))


def _runs(layout: Layout, rank: int) -> Iterator[tuple[int, Run]]:
    """Yield each run of a rank with the index of its first token in the shard."""
    place = 0
    for run in layout.runs(rank):
        yield place, run
        place += run.length


def _pieces(start: int, length: int) -> Iterator[tuple[int, int]]:
    for row in range(start, start + length, ROWS):
        yield row, min(row + ROWS, start + length)


def _band(queries, first_row: int, keys, first_key: int, window: int | None) -> tuple[int, int, int, int]:
    """Return (first, last + 1, low, high) of a run of keys: row i sees key j if i + low ≤ j ≤ i + high."""
    ahead, local = queries.start - keys.start, first_key - first_row
    high = ahead // queries.step + local
    low = -((window - 1 - ahead) // queries.step) + local if window else -ALWAYS
    return first_key, first_key + keys.length, low, high


def _seen(band: tuple[int, int, int, int], start: int, stop: int) -> tuple[int, ...] | None:
    """Return (begin, full, full end, end, low, high), the segment of rows start … stop − 1; None if empty."""
    first, last, low, high = band
    begin, end = max(first, start + low), min(last, stop + high)
    if begin >= end:
        return None
    full, full_end = max(begin, stop - 1 + low), min(end, start + high + 1)
    whole = max(0, full_end - full) // KEYS * KEYS
    full, full_end = (full, full + whole) if whole else (begin, begin)
    return begin, full, full_end, end, low, high


def _tables(programs) -> tuple[np.ndarray, np.ndarray]:
    owners: list[tuple[int, ...]] = []
    segments: list[tuple[int, ...]] = []
    for start, stop, seen in programs:
        owners.append((start, stop, len(segments), len(segments) + len(seen)))
        segments += seen
    rows = np.array(owners, np.int32).reshape(-1, 4)
    return rows, np.array(segments or [(0,) * 6], np.int32).reshape(-1, 6)
