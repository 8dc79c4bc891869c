"""Common mistakes in the parts of the capstone's ring, each with a function that makes the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab.course.contract import Misconception
from ringlab.course.contracts.e05_mistakes import State, attend

Shares = list[np.ndarray]


def owned(layout: str, S: int, P: int) -> Shares:
    """Return the right positions of every rank."""
    place = np.arange(S)
    if layout == "striped":
        return _by(place % P, P)
    pieces = P if layout == "contiguous" else 2 * P
    piece = place // max(1, -(-S // pieces))
    return _by(piece if layout == "contiguous" else np.minimum(piece, 2 * P - 1 - piece), P)


def _by(owner: np.ndarray, P: int) -> Shares:
    return [np.flatnonzero(owner == rank) for rank in range(P)]


def _of_zigzag(other: Callable[[int, int], Shares]) -> Callable[..., Shares]:
    return lambda layout, S, P: other(S, P) if layout == "zigzag" else owned(layout, S, P)


def _too_few(S: int, P: int) -> Shares:
    piece = np.arange(S) // max(1, -(-S // (2 * P)))
    last = 2 * P - 2
    return [np.flatnonzero((piece == rank) | (piece == last - rank)) for rank in range(P)]


def _two_halves(S: int, P: int) -> Shares:
    piece = np.arange(S) // max(1, -(-S // (2 * P)))
    return _by(piece % P, P)


def _drops(layout: str, S: int, P: int) -> Shares:
    whole = 2 * P if layout == "zigzag" else P
    return owned(layout, S // whole * whole, P)


def _pads(layout: str, S: int, P: int) -> Shares:
    whole = 2 * P if layout == "zigzag" else P
    return owned(layout, -(-S // whole) * whole, P)


def _evens(layout: str, S: int, P: int) -> Shares:
    if layout == "striped":
        return owned(layout, S, P)
    pieces = np.array_split(np.arange(S), P if layout == "contiguous" else 2 * P)
    if layout == "contiguous":
        return list(pieces)
    return [np.concatenate([pieces[rank], pieces[2 * P - 1 - rank]]) for rank in range(P)]


OWNED = (
    Misconception(
        "folds_over_too_few",
        "The partner of piece r among 2P is piece 2P − 1 − r, not 2P − 2 − r: one rank gets a piece twice, and the last piece nobody.",
        _of_zigzag(_too_few),
    ),
    Misconception(
        "two_halves",
        "In zig-zag rank r has pieces r and P + r. Then early ranks have early pieces twice, and nothing is balanced: the second half "
        "runs backwards, r and 2P − 1 − r.",
        _of_zigzag(_two_halves),
    ),
    Misconception(
        "stripes_for_stretches",
        "Contiguous and striped have changed places: striped deals token by token, i to rank i % P; contiguous gives each rank a stretch.",
        lambda layout, S, P: owned(
            {"contiguous": "striped", "striped": "contiguous"}.get(layout, layout), S, P
        ),
    ),
    Misconception(
        "all_contiguous",
        "All three layouts give each rank a stretch: `layout` is not looked at.",
        lambda layout, S, P: owned("contiguous", S, P),
    ),
    Misconception(
        "drops_the_tail",
        "The end of the sequence has no owner where the length does not divide. The last piece is shorter; it is not left out.",
        _drops,
    ),
    Misconception(
        "pads_to_divide",
        "Positions are dealt that do not exist: the length is rounded up to something that divides. Let the last piece be shorter.",
        _pads,
    ),
    Misconception(
        "evens_out",
        "Where the length does not divide, several pieces are a little shorter. Then a token's piece is not its position over the length "
        "of a piece, and two programs disagree on who owns it. Only the last piece is shorter.",
        _evens,
    ),
    Misconception(
        "made_for_four_ranks",
        "It is right for up to four ranks and wrong for more.",
        lambda layout, S, P: owned(layout, S, P) if P <= 4 else owned("contiguous", S, P),
    ),
)


def visible(rows: Any, keys: Any, causal: bool) -> np.ndarray:
    """Return what queries at `rows` see of keys at `keys`."""
    q, k = np.asarray(rows), np.asarray(keys)
    return q[:, None] >= k[None, :] if causal else np.ones((len(q), len(k)), dtype=bool)


def _masked(see: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., State]:
    """An imitation that masks by see(query positions, key positions) where there is a mask."""

    def imitate(q, k, v, rows, keys, causal, scale) -> State:
        mask = see(np.asarray(rows), np.asarray(keys)) if causal else None
        return attend(q, k, v, mask, scale)

    return imitate


def _scaled(of: Callable[[float | None, int], float | None]) -> Callable[..., State]:
    return lambda q, k, v, rows, keys, causal, scale: attend(
        q, k, v, visible(rows, keys, causal), of(scale, q.shape[-1])
    )


def _spread(of: Callable[[np.ndarray, int], np.ndarray]) -> Callable[..., State]:
    def imitate(q, k, v, rows, keys, causal, scale) -> State:
        k, v = (of(oracle.float64(x), q.shape[1] // k.shape[1]) for x in (k, v))
        return attend(q, k, v, visible(rows, keys, causal), scale)

    return imitate


BLOCK = (
    Misconception(
        "no_scale",
        "Where no scale is given the scores are not divided by √D: scale=None stands for 1/√D.",
        _scaled(lambda scale, D: 1.0 if scale is None else scale),
    ),
    Misconception(
        "scale_is_ignored",
        "A scale that is given is ignored, and 1/√D is taken.",
        _scaled(lambda scale, D: None),
    ),
    Misconception(
        "mask_by_index",
        "The mask compares places in the block. A query may see a key if its *global* position is the larger one, or the same: compare "
        "q_positions with k_positions.",
        _masked(lambda q, k: np.tri(len(q), len(k), dtype=bool)),
    ),
    Misconception("no_mask", "causal=True hides nothing.", _masked(lambda q, k: np.ones((len(q), len(k)), bool))),
    Misconception(
        "strictly_before",
        "A query does not see the key of its own position: at or before, ≥.",
        _masked(lambda q, k: q[:, None] > k[None, :]),
    ),
    Misconception(
        "sees_the_future",
        "The mask is upside down: queries see the keys after them.",
        _masked(lambda q, k: q[:, None] <= k[None, :]),
    ),
    Misconception(
        "always_causal",
        "causal=False is masked all the same. Then every query sees every key, wherever they are.",
        lambda q, k, v, rows, keys, causal, scale: attend(q, k, v, visible(rows, keys, True), scale),
    ),
    Misconception(
        "heads_in_turn",
        "Query heads take K/V heads in turn, h % K. Neighbours share one: h // (H // K).",
        _spread(lambda x, group: np.tile(x, (1, group, 1, 1))),
    ),
    Misconception(
        "first_head_for_all",
        "All query heads read the first K/V head: query head h reads K/V head h // (H // K).",
        _spread(lambda x, group: np.repeat(x[:, :1], group * x.shape[1], axis=1)),
    ),
    Misconception(
        "mean_of_what_is_hidden",
        "A row that sees no key of the block came out as a mean of the very keys that it must not see. Its part is (0, −inf).",
    ),
    Misconception(
        "nan_in_blind_rows",
        "There is a NaN in a row that sees no key: its lse is −inf, and −inf − (−inf) is NaN. Its part is (0, −inf).",
    ),
    Misconception(
        "finite_mask",
        "A large negative number stands for −inf. Real scores can be lower, and then hidden keys have all the weight; and a row that sees "
        "no key has an lse that pretends it saw some.",
    ),
    Misconception(
        "overflows",
        "Large scores overflow, or very low ones vanish: take logsumexp, or subtract the row's maximum before exp.",
    ),
    Misconception(
        "state_in_bf16",
        "bfloat16 inputs were computed with in bfloat16, or out and lse are rounded to it. Convert first, and return float32: it is the "
        "state that many blocks are merged into.",
    ),
    Misconception(
        "state_forced_to_float32",
        "float64 inputs come back as float32. The state is float32 *at least*: torch.promote_types(q.dtype, torch.float32).",
    ),
)  # fmt: skip


def _weighted(
    weights: Callable[..., tuple[Any, Any]], total: Callable[..., Any] = np.logaddexp
) -> Callable[..., State]:
    """An imitation whose outs are weighed by weights(lse, new lse, the joint one)."""

    def imitate(out, lse, new, new_lse) -> State:
        out, lse, new, new_lse = map(oracle.float64, (out, lse, new, new_lse))
        joint = np.logaddexp(lse, new_lse)
        a, b = (np.asarray(w)[..., None] for w in weights(lse, new_lse, joint))
        return out * a + new * b, total(lse, new_lse)

    return imitate


MERGE = (
    Misconception(
        "averages",
        "The two outs are averaged. The part with the larger lse has seen heavier keys and counts for more.",
        _weighted(lambda a, b, joint: (np.full_like(a, 0.5), np.full_like(a, 0.5))),
    ),
    Misconception(
        "adds",
        "The two outs are added. Both are normalised: weigh each by e^(its lse − the joint lse), and the weights add up to 1.",
        _weighted(lambda a, b, joint: (np.ones_like(a), np.ones_like(a))),
    ),
    Misconception(
        "weights_swapped",
        "Each out has the other one's weight.",
        _weighted(lambda a, b, joint: (np.exp(b - joint), np.exp(a - joint))),
    ),
    Misconception(
        "keeps_the_larger_lse",
        "out is right; lse is the larger of the two. Both parts' exponentials add up: logaddexp.",
        _weighted(lambda a, b, joint: (np.exp(a - joint), np.exp(b - joint)), np.maximum),
    ),
    Misconception(
        "nan_where_nothing_was_seen",
        "There is a NaN where a part has seen nothing, lse = −inf: −inf − (−inf). Such a part changes nothing, and two of them give "
        "(0, −inf).",
    ),
    Misconception(
        "exp_of_lse",
        "An lse of some hundreds becomes infinite, or 0, before it is compared: only differences of lse go into exp.",
    ),
)  # fmt: skip
