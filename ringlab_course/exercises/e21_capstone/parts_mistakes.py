"""Common mistakes in the parts of the capstone's ring, each with a function that makes the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlab import oracle
from ringlab_course.checking.numbers import State, attend
from ringlab_course.checking.wrong_answers import mistakes_of

mistake = mistakes_of("21")

Shares = list[np.ndarray]


OWNERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "contiguous": lambda S, P: _piece(S, P),
    "striped": lambda S, P: np.arange(S) % P,
    "zigzag": lambda S, P: np.minimum(_piece(S, 2 * P), 2 * P - 1 - _piece(S, 2 * P)),
}
"""The layouts that 21.owned asks for: the rank of every token."""


def _piece(S: int, pieces: int) -> np.ndarray:
    return np.arange(S) // max(1, -(-S // pieces))


def owned(layout: str, S: int, P: int) -> Shares:
    """Return the right positions of every rank."""
    return _by(OWNERS[layout](S, P), P)


def _by(owner: np.ndarray, P: int) -> Shares:
    return [np.flatnonzero(owner == rank) for rank in range(P)]


def _of_zigzag(other: Callable[[int, int], Shares]) -> Callable[..., Shares]:
    return lambda layout, S, P: other(S, P) if layout == "zigzag" else owned(layout, S, P)


def _too_few(S: int, P: int) -> Shares:
    piece = _piece(S, 2 * P)
    last = 2 * P - 2
    return [np.flatnonzero((piece == rank) | (piece == last - rank)) for rank in range(P)]


def _two_halves(S: int, P: int) -> Shares:
    piece = _piece(S, 2 * P)
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
    mistake("folds_over_too_few", _of_zigzag(_too_few)),
    mistake("two_halves", _of_zigzag(_two_halves)),
    mistake(
        "stripes_for_stretches",
        lambda layout, S, P: owned(
            {"contiguous": "striped", "striped": "contiguous"}.get(layout, layout), S, P
        ),
    ),
    mistake("all_contiguous", lambda layout, S, P: owned("contiguous", S, P)),
    mistake("drops_the_tail", _drops),
    mistake("pads_to_divide", _pads),
    mistake("evens_out", _evens),
    mistake(
        "made_for_four_ranks",
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
    mistake("no_scale", _scaled(lambda scale, D: 1.0 if scale is None else scale)),
    mistake("scale_is_ignored", _scaled(lambda scale, D: None)),
    mistake("scale_multiplies", _scaled(lambda scale, D: None if scale is None else scale * D**-0.5)),
    mistake("mask_by_index", _masked(lambda q, k: np.tri(len(q), len(k), dtype=bool))),
    mistake("no_mask", _masked(lambda q, k: np.ones((len(q), len(k)), bool))),
    mistake("strictly_before", _masked(lambda q, k: q[:, None] > k[None, :])),
    mistake("sees_the_future", _masked(lambda q, k: q[:, None] <= k[None, :])),
    mistake("always_causal", lambda q, k, v, rows, keys, causal, scale: attend(q, k, v, visible(rows, keys, True), scale)),
    mistake("heads_in_turn", _spread(lambda x, group: np.tile(x, (1, group, 1, 1)))),
    mistake("first_head_for_all", _spread(lambda x, group: np.repeat(x[:, :1], group * x.shape[1], axis=1))),
    mistake("mean_of_what_is_hidden"),
    mistake("nan_in_blind_rows"),
    mistake("finite_mask"),
    mistake("overflows"),
    mistake("state_in_bf16"),
    mistake("state_forced_to_float32"),
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
    mistake("averages", _weighted(lambda a, b, joint: (np.full_like(a, 0.5), np.full_like(a, 0.5)))),
    mistake("adds", _weighted(lambda a, b, joint: (np.ones_like(a), np.ones_like(a)))),
    mistake("weights_swapped", _weighted(lambda a, b, joint: (np.exp(b - joint), np.exp(a - joint)))),
    mistake("keeps_the_larger_lse", _weighted(lambda a, b, joint: (np.exp(a - joint), np.exp(b - joint)), np.maximum)),
    mistake("nan_where_nothing_was_seen"),
    mistake("exp_of_lse"),
)  # fmt: skip
