"""Exercise 08: common mistakes in dealing tokens and in cutting positions into runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("08")

Shares = list[np.ndarray]


def by_owner(S: int, P: int, chunk: int, owner: Callable[[np.ndarray], np.ndarray]) -> Shares:
    """Return the tokens of every rank, where `owner` tells who owns a piece."""
    of_token = owner(np.arange(S) // chunk)
    return [np.flatnonzero(of_token == rank) for rank in range(P)]


def folded_owner(P: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return who owns a piece when every other turn runs backwards."""
    return lambda piece: np.minimum(piece % (2 * P), 2 * P - 1 - piece % (2 * P))


def dealt(S: int, P: int, chunk: int, folded: bool) -> Shares:
    """Return the right answer, each rank's positions in ascending order."""
    return by_owner(S, P, chunk, folded_owner(P) if folded else lambda piece: piece % P)


def _ping_pong(S: int, P: int, chunk: int, folded: bool) -> Shares:
    period = max(1, 2 * P - 2)
    if not folded:
        return dealt(S, P, chunk, False)
    return by_owner(S, P, chunk, lambda piece: np.minimum(piece % period, (period - piece % period) % period))


def _folds_once(S: int, P: int, chunk: int, folded: bool) -> Shares:
    if not folded:
        return dealt(S, P, chunk, False)
    return by_owner(S, P, chunk, lambda piece: np.where(piece < P, piece, P - 1 - piece % P))


def _turning_piece_twice(S: int, P: int, chunk: int, folded: bool) -> Shares:
    if not folded:
        return dealt(S, P, chunk, False)
    period = 2 * P
    shares = []
    for rank in range(P):
        starts = [
            turn * period * chunk + place * chunk
            for turn in range(-(-S // (period * chunk)))
            for place in (rank, period - 2 - rank)
        ]
        shares.append(
            np.concatenate([np.zeros(0, np.int64), *(np.arange(s, min(s + chunk, S)) for s in starts)])
        )
    return shares


def _backward_too_far(S: int, P: int, chunk: int, folded: bool) -> Shares:
    if not folded:
        return dealt(S, P, chunk, False)
    return by_owner(S, P, chunk, lambda piece: np.where(piece // P % 2, P - piece % P, piece % P))


def _pads(S: int, P: int, chunk: int, folded: bool) -> Shares:
    whole = P * chunk * (2 if folded else 1)
    return dealt(-(-S // whole) * whole, P, chunk, folded)


def _pads_the_last_piece(S: int, P: int, chunk: int, folded: bool) -> Shares:
    return dealt(-(-S // chunk) * chunk, P, chunk, folded)


def _only_whole_pieces(S: int, P: int, chunk: int, folded: bool) -> Shares:
    return dealt(S // chunk * chunk, P, chunk, folded)


def _only_whole_turns(S: int, P: int, chunk: int, folded: bool) -> Shares:
    return dealt(S // (chunk * P) * chunk * P, P, chunk, folded)


def _only_whole_folds(S: int, P: int, chunk: int, folded: bool) -> Shares:
    whole = chunk * P * (2 if folded else 1)
    return dealt(S // whole * whole, P, chunk, folded)


def _evened_out(S: int, P: int, chunk: int, folded: bool) -> Shares:
    pieces = np.array_split(np.arange(S), max(1, -(-S // chunk)))
    owner = folded_owner(P)(np.arange(len(pieces))) if folded else np.arange(len(pieces)) % P
    return [
        np.concatenate([np.zeros(0, np.int64), *(p for p, o in zip(pieces, owner, strict=True) if o == rank)])
        for rank in range(P)
    ]


def _stretches(S: int, P: int, chunk: int, folded: bool) -> Shares:
    return [np.asarray(part) for part in np.array_split(np.arange(S), P)]


def _backwards_first(S: int, P: int, chunk: int, folded: bool) -> Shares:
    if not folded:
        return dealt(S, P, chunk, False)
    return dealt(S, P, chunk, True)[::-1]


DEAL = (
    mistake("ignores_chunk", lambda S, P, chunk, folded: dealt(S, P, 1, folded)),
    mistake("ignores_folded", lambda S, P, chunk, folded: dealt(S, P, chunk, False)),
    mistake("stretch_for_each", _stretches),
    mistake("turns_on_the_last_rank", _ping_pong),
    mistake("folds_once", _folds_once),
    mistake("turning_piece_twice", _turning_piece_twice),
    mistake("backward_too_far", _backward_too_far),
    mistake("drops_the_tail", _only_whole_pieces),
    replace(mistake("drops_the_tail"), name="drops_the_last_turn", imitate=_only_whole_turns),
    replace(mistake("drops_the_tail"), name="drops_the_last_fold", imitate=_only_whole_folds),
    mistake("pads_to_divide", _pads),
    replace(mistake("pads_to_divide"), name="pads_the_last_piece", imitate=_pads_the_last_piece),
    mistake("evens_out_the_pieces", _evened_out),
    mistake("backwards_first", _backwards_first),
    mistake("not_ascending"),
    mistake(
        "counts_to_four",
        lambda S, P, chunk, folded: [
            np.flatnonzero(np.isin(np.arange(S), mine) & (np.arange(S) // chunk < 4 * P))
            for mine in dealt(S, P, chunk, folded)
        ],
    ),
)

Runs = list[tuple[int, int, int]]


def chains(positions: np.ndarray, step: int) -> Runs:
    """Return the fewest runs of this step that hold the positions, in order of their starts."""
    owned = np.sort(positions)
    starts = owned[~np.isin(owned - step, owned)]
    ends = owned[~np.isin(owned + step, owned)]
    order = np.lexsort((ends, ends % step))
    begin = np.lexsort((starts, starts % step))
    pairs = zip(starts[begin].tolist(), ends[order].tolist(), strict=True)
    return sorted((start, step, (end - start) // step + 1) for start, end in pairs)


def _neighbours_only(positions: np.ndarray, step: int) -> Runs:
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != step) + 1)
    return [(int(part[0]), step, len(part)) for part in parts if len(part)]


def _own_step(positions: np.ndarray, step: int) -> Runs:
    runs: Runs = []
    items, i = positions.tolist(), 0
    while i < len(items):
        own, j = (items[i + 1] - items[i] if i + 1 < len(items) else 1), i + 1
        while j < len(items) and items[j] - items[j - 1] == own:
            j += 1
        runs.append((items[i], own, j - i))
        i = j
    return runs


def _fills_holes(positions: np.ndarray, step: int) -> Runs:
    runs = []
    for offset in range(step):
        mine = positions[positions % step == offset]
        if len(mine):
            runs.append((int(mine[0]), step, int(mine[-1] - mine[0]) // step + 1))
    return sorted(runs)


RUNS = (
    mistake("looks_at_neighbours_only", _neighbours_only),
    mistake("one_run_per_token", lambda positions, step: [(int(p), step, 1) for p in positions]),
    mistake("own_step", _own_step),
    mistake("fills_the_holes", _fills_holes),
    mistake("forgets_the_last_run", lambda positions, step: chains(positions, step)[:-1]),
    mistake(
        "length_one_short",
        lambda positions, step: [(start, step, n - 1) for start, step, n in chains(positions, step)],
    ),
    mistake(
        "stop_for_length",
        lambda positions, step: [
            (start, step, start + step * n) for start, step, n in chains(positions, step)
        ],
    ),
    mistake(
        "last_for_length",
        lambda positions, step: [
            (start, step, start + step * (n - 1)) for start, step, n in chains(positions, step)
        ],
    ),
    mistake(
        "runs_out_of_order",
        lambda positions, step: sorted(chains(positions, step), key=lambda run: (run[0] % step, run[0])),
    ),
    mistake("compares_all_pairs"),
)
