"""Exercise 08: common mistakes in dealing tokens and in cutting positions into runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringlab.course.contract import Misconception

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


TAIL = (
    "The end of the sequence is dropped: only what fills whole pieces or whole turns is dealt. Lengths need not divide; "
    "the last piece is shorter, and the last turn may end before it reaches every rank."
)
PADS = (
    "You deal positions that do not exist, because the length is rounded up to something that divides. A padded token is "
    "a token that every rank computes with: let the last piece be shorter instead."
)

DEAL = (
    Misconception(
        "ignores_chunk",
        "You deal single tokens whatever `chunk` says. Piece i holds the tokens from i · chunk on, and it is pieces that "
        "are dealt.",
        lambda S, P, chunk, folded: dealt(S, P, 1, folded),
    ),
    Misconception(
        "ignores_folded",
        "You deal every turn from rank 0 to rank P − 1. Folded, every other turn runs the other way, so that whoever got "
        "the earliest piece of one turn gets the latest of the next.",
        lambda S, P, chunk, folded: dealt(S, P, chunk, False),
    ),
    Misconception(
        "stretch_for_each",
        "You give every rank one stretch of S/P tokens: that is the contiguous layout, the member of the family with "
        "chunk = S/P. Deal pieces of `chunk` tokens, turn after turn.",
        _stretches,
    ),
    Misconception(
        "turns_on_the_last_rank",
        "At the fold the rank at the end gets one piece, where it should get two in a row: you deal 0 1 2 1 0 1 2 …, with "
        "a period of 2P − 2. Folded is 0 1 2 2 1 0 0 1 2 …, with a period of 2P; else the ranks at the ends get half.",
        _ping_pong,
    ),
    Misconception(
        "folds_once",
        "You turn round once and never again. The direction changes with every turn: forward, backward, forward, backward.",
        _folds_once,
    ),
    Misconception(
        "turning_piece_twice",
        "An off-by-one in the fold: the partner of piece r among 2P is 2P − 1 − r, not 2P − 2 − r. With yours rank P − 1 "
        "gets its piece twice, and the last piece of every fold belongs to nobody.",
        _turning_piece_twice,
    ),
    Misconception(
        "backward_too_far",
        "An off-by-one in the backward turns: at place 0 of such a turn comes rank P − 1, so the rank is P − 1 − place, not "
        "P − place. Rank P does not exist, and rank 0 gets nothing there.",
        _backward_too_far,
    ),
    Misconception("drops_the_tail", TAIL, _only_whole_pieces),
    Misconception("drops_the_last_turn", TAIL, _only_whole_turns),
    Misconception("drops_the_last_fold", TAIL, _only_whole_folds),
    Misconception("pads_to_divide", PADS, _pads),
    Misconception("pads_the_last_piece", PADS, _pads_the_last_piece),
    Misconception(
        "evens_out_the_pieces",
        "You shorten several pieces a little where the length does not divide. Then a token's piece is no longer its "
        "position // chunk, and no two programs agree on who owns it. Only the last piece is shorter.",
        _evened_out,
    ),
    Misconception(
        "backwards_first",
        "Your first turn runs from rank P − 1 down to 0. The first turn is a forward one: rank 0 gets piece 0.",
        _backwards_first,
    ),
    Misconception(
        "not_ascending",
        "Every rank owns the right tokens, but not in ascending order. The order decides which row of the shard is which "
        "token: deal's is ascending, and `runs` may change it afterwards.",
    ),
    Misconception(
        "counts_to_four",
        "Something in your function is made for a few ranks or a few turns only.",
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
    Misconception(
        "looks_at_neighbours_only",
        "You only join a token to the one right before it in the list. Tokens of one run need not be neighbours there: in "
        "{0, 7, 8, 15} with step 8, 0 goes on at 8, and 7 at 15. Look for position − step among all positions.",
        _neighbours_only,
    ),
    Misconception(
        "one_run_per_token",
        "Every token is a run of its own. That is no wrong description, but a useless one: each pair of runs becomes a "
        "tile, so n runs a rank mean n² tiny tiles. A token goes on the run of the token `step` before it.",
        lambda positions, step: [(int(p), step, 1) for p in positions],
    ),
    Misconception(
        "own_step",
        "You give every run whatever step fits it. All runs of a layout share one step, the one that is passed in: only "
        "then does the mask of any two of them have its diagonal at one place.",
        _own_step,
    ),
    Misconception(
        "fills_the_holes",
        "A run holds positions that the rank does not own: from the first to the last of a remainder, holes and all. A run "
        "ends where position + step is not owned.",
        _fills_holes,
    ),
    Misconception(
        "forgets_the_last_run",
        "The last run is missing. A loop that emits a run when the next one begins has one left when it ends.",
        lambda positions, step: chains(positions, step)[:-1],
    ),
    Misconception(
        "length_one_short",
        "Your lengths are one too small: from start to the last position are (last − start) / step steps, and one token more.",
        lambda positions, step: [(start, step, n - 1) for start, step, n in chains(positions, step)],
    ),
    Misconception(
        "stop_for_length",
        "The third number is how many tokens the run has, not where it stops.",
        lambda positions, step: [
            (start, step, start + step * n) for start, step, n in chains(positions, step)
        ],
    ),
    Misconception(
        "last_for_length",
        "The third number is how many tokens the run has, not its last position.",
        lambda positions, step: [
            (start, step, start + step * (n - 1)) for start, step, n in chains(positions, step)
        ],
    ),
    Misconception(
        "runs_out_of_order",
        "These are the right runs, but not in order of their starts: yours come remainder by remainder.",
        lambda positions, step: sorted(chains(positions, step), key=lambda run: (run[0] % step, run[0])),
    ),
    Misconception(
        "compares_all_pairs",
        "You compare every position with every other: memory grows with the square of the shard, and a shard of 131,072 "
        "tokens would need 17 GB for one comparison. Sort, or look positions up (np.isin, a set).",
    ),
)
