"""Checks of 21.owned, 21.block and 21.merge: each rank's tokens, one block, and a merge of two results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ringlab_course.checking.answers import expect_array, expect_arrays, expect_tuple, to_numpy
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered, blame_groups, compare_all, raise_first
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.numbers import EPS, attend, largest, merged, random, rounding_bound
from ringlab_course.checking.positions import (
    expect_owned_once,
    first_difference,
    same_sets,
    same_shares,
)
from ringlab_course.checking.wrong_answers import misconceptions_of

NAMES = ("out", "lse")
OWNERS: dict[str, Callable[[int, int], np.ndarray]] = {
    "contiguous": lambda S, P: _piece(S, P),
    "striped": lambda S, P: np.arange(S) % P,
    "zigzag": lambda S, P: np.minimum(_piece(S, 2 * P), 2 * P - 1 - _piece(S, 2 * P)),
}
"""The rank of every token in each of the layouts that 21.owned asks for."""


def _piece(S: int, pieces: int) -> np.ndarray:
    return np.arange(S) // max(1, -(-S // pieces))


def owned(layout: str, S: int, P: int) -> list[np.ndarray]:
    """Return the right positions of each rank."""
    owner = OWNERS[layout](S, P)
    return [np.flatnonzero(owner == rank) for rank in range(P)]


def visible(rows: Any, keys: Any, causal: bool) -> np.ndarray:
    """Return the mask that is True where a query at `rows` sees a key at `keys`."""
    q, k = np.asarray(rows), np.asarray(keys)
    return q[:, None] >= k[None, :] if causal else np.ones((len(q), len(k)), dtype=bool)


def _shares(answer: Any, P: int) -> list[np.ndarray]:
    if not isinstance(answer, (list, tuple)) or len(answer) != P:
        got = f"{len(answer)} parts" if isinstance(answer, (list, tuple)) else f"a {type(answer).__name__}"
        raise Failure(
            "The result should be a list with one int64 tensor of positions per rank.", f"P={P}: {got}"
        )
    for rank, part in enumerate(answer):
        kind = str(getattr(part, "dtype", type(part).__name__)).removeprefix("torch.")
        if kind != "int64" or len(part.shape) != 1:
            raise Failure(
                "Every rank's part should be a one-dimensional int64 tensor, even if it is empty.",
                f"rank {rank}: {kind}",
            )
    return [to_numpy(part) for part in answer]


def _dealt(subject: Any, layout: str, S: int, P: int) -> Failure | None:
    """Return the Failure of a wrong answer for one layout, None if the answer is right."""
    shares, truth, case = (
        _shares(subject.call(layout, S, P), P),
        owned(layout, S, P),
        f"{layout}, S={S}, P={P}",
    )
    if same_shares(shares, truth):
        return None
    try:
        expect_owned_once(shares, S, case)
    except Failure as failure:
        return failure
    example = first_difference(shares, truth, case)
    if same_sets(shares, truth):
        return Failure("Every rank owns the right tokens, but not in ascending order.", example)
    return Failure(
        "Every token has one owner, but for some it is not the owner that the layout says.", example
    )


def _deal(subject: Any, cases: Iterable[tuple[str, int, int]]) -> None:
    raise_first(_dealt(subject, *case) for case in cases)


def _rising(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return numbers of tokens per piece in ascending order. Two gradings hardly ever get the same numbers."""
    return np.sort(rng.integers(1, 500, count)) + np.arange(count)


def _check_even(subject: Any, rng: np.random.Generator) -> None:
    sizes = [(2 * P * int(n), P) for P, n in zip((1, 2, 3, 4), _rising(rng, 4), strict=True)]
    _deal(subject, [(layout, S, P) for S, P in sizes for layout in OWNERS])


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on lengths with a remainder, fewer tokens than ranks, and no tokens."""
    sizes = [
        (2 * P * int(n) + rest, P)
        for P, rest, n in zip((2, 2, 3, 3, 4), (1, 3, 1, 5, 3), _rising(rng, 5), strict=True)
    ]
    many = int(rng.integers(8, 64))
    sizes += [(int(rng.integers(1, many)), many), (0, int(rng.integers(2, 64)))]
    _deal(subject, [(layout, S, P) for S, P in sizes for layout in OWNERS])


def _check_any(subject: Any, rng: np.random.Generator) -> None:
    sizes = [(int(rng.integers(1, 300)), P) for P in (1, 2, 3, 4, 8, 13)]
    _deal(subject, [(layout, S, P) for S, P in sizes for layout in OWNERS])


def _block(
    rng: np.random.Generator,
    rows: Sequence[int],
    keys: Sequence[int],
    causal: bool,
    *,
    H: int = 1,
    K: int = 1,
    D: int = 2,
    size: float = 1.0,
    scale: float | None = None,
    lower: float = 0.0,
) -> tuple[Any, ...]:
    """Return the arguments of `attend_block` for queries and keys at these positions.

    `lower` reduces all scores.
    """
    q = random(rng, 1, H, len(rows), D, size=size)
    k, v = (random(rng, 1, K, len(keys), D) for _ in range(2))
    if lower:
        q[..., 0], k[..., 0] = 128.0 * D**0.5, -lower / 128.0
    where = (torch.tensor(places, dtype=torch.int64) for places in (rows, keys))
    return (q, k, v, *where, causal, scale)


def _told(inputs: tuple[Any, ...]) -> str:
    q, k, _, rows, keys, causal, scale = inputs
    heads = "" if q.shape[1] == 1 else f", {q.shape[1]} query and {k.shape[1]} K/V heads"
    given = "" if scale is None else f", scale={scale:g}"
    mask = "causal" if causal else "full"
    return f"queries at {rows.tolist()}, keys at {keys.tolist()}, {mask}, D={q.shape[-1]}{heads}{given}"


def _attended(subject: Any, inputs: tuple[Any, ...]) -> Answered:
    q, k, v, rows, keys, causal, scale = inputs
    right = attend(q, k, v, visible(rows, keys, causal), scale)
    answer, text = subject.call(*inputs), _told(inputs)
    out, lse = expect_arrays(answer, right, NAMES)
    blind = np.isneginf(right[1])
    broken = np.isnan(out).any(-1) | np.isnan(lse)
    if (broken & blind).any():
        raise BLOCK_STAGE.misconception("nan_in_blind_rows").failure(text)
    if (np.isfinite(lse) & blind).any() and not np.isneginf(lse).any():
        raise BLOCK_STAGE.misconception("mean_of_what_is_hidden").failure(text)
    if broken.any() or np.isposinf(lse).any():
        raise BLOCK_STAGE.misconception("overflows").failure(text)
    return Answered(answer, right, _block_bound(inputs, right), names=NAMES, text=text)


def _block_bound(inputs: tuple[Any, ...], right: tuple[np.ndarray, np.ndarray]) -> float:
    q, k, v = inputs[:3]
    plain = rounding_bound(q, k, v, right)
    return plain if inputs[6] is None else plain * max(1.0, inputs[6] * q.shape[-1] ** 0.5)


def _attend(subject: Any, cases: Iterable[tuple[Any, ...]]) -> None:
    compare_all(_attended(subject, inputs) for inputs in cases)


def _check_block(subject: Any, rng: np.random.Generator) -> None:
    """Check answers with full and causal masks, interleaved or arbitrary positions, and given scales."""
    _attend(
        subject,
        [
            _block(rng, (0,), (0,), True),
            _block(rng, (0, 1), (0, 1), True, D=3),
            _block(rng, (4, 5, 6), (1, 2), True, D=3),
            _block(rng, (1, 3, 5), (0, 2, 4), True, D=4),
            _block(rng, (3, 4), (2, 3, 5), True, D=4, scale=0.25),
            _block(rng, (0, 1), (7, 8, 9), False, D=4),
            _block(rng, (0, 1, 2), (5, 6), False, D=9, scale=0.1),
        ],
    )


def _check_blind(subject: Any, rng: np.random.Generator) -> None:
    _attend(
        subject,
        [
            _block(rng, (0,), (1,), True),
            _block(rng, (0, 3), (1, 2), True, D=3),
            _block(rng, (0, 1, 2), (), True, D=3),
            _block(rng, (), (0, 1), True, D=3),
        ],
    )


def _check_grouped(subject: Any, rng: np.random.Generator) -> None:
    alone = _block(rng, (2, 3), (0, 3, 1), True, H=2, K=2, D=4)
    shared = [_block(rng, (2, 3), (0, 3, 1), True, H=H, K=K, D=4) for H, K in ((2, 1), (4, 2), (6, 2))]
    blame_groups(lambda: _attend(subject, shared), lambda: _attend(subject, [alone]))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    """Check answers for scores of hundreds and thousands.

    Further scores are below the numbers that some programs use for −∞.
    """
    for size in (100.0, 1000.0):
        answered = _attended(subject, _block(rng, (1, 2), (0, 2, 3), True, D=4, size=size))
        lse = expect_array(answered.answer[1], answered.truth[1].shape, name="lse")
        if np.isneginf(lse).any():  # every query here sees a key, so the sum of exponentials underflowed
            raise BLOCK_STAGE.misconception("overflows").failure(answered.text)
        compare_all([answered])
    for lower in (2e3, 1.6e4):
        inputs = _block(rng, (0, 2), (1, 2, 0), True, D=4, lower=lower)
        try:
            _attend(subject, [inputs])
        except Failure as failure:
            if failure.misconception is None:
                failure.otherwise = BLOCK_STAGE.misconception("finite_mask").failure(failure.counterexample)
            raise


def _check_dtypes(subject: Any, rng: np.random.Generator) -> None:
    """Check the dtypes of results and of the computation.

    bfloat16 inputs are exact in float32, so only computing in bfloat16 makes a difference. For float64
    inputs, results are float64.
    """
    inputs = _block(rng, range(8), range(12), False, H=2, K=1, D=16)
    narrow = (*(x.bfloat16() for x in inputs[:3]), *inputs[3:])
    for given, dtype in (
        (narrow, torch.float32),
        ([x.double() for x in inputs[:3]] + list(inputs[3:]), torch.float64),
    ):
        parts = expect_tuple(subject.call(*given), NAMES)
        found = [str(getattr(part, "dtype", None)).removeprefix("torch.") for part in parts]
        name = "state_in_bf16" if dtype is torch.float32 else "state_forced_to_float32"
        if found != [str(dtype).removeprefix("torch.")] * 2:
            told = f"q, k, v {given[0].dtype}: out is {found[0]}, lse {found[1]}".replace("torch.", "")
            raise BLOCK_STAGE.misconception(name).failure(told)
    _attend(subject, [inputs])  # raises if another mistake makes the answer wrong in float32, too
    try:
        _attend(subject, [narrow])
    except Failure as failure:
        raise BLOCK_STAGE.misconception("state_in_bf16").failure(failure.counterexample) from None


def _partials(rng: np.random.Generator, *lses: Sequence[float]) -> tuple[torch.Tensor, ...]:
    """Return random (out, lse, new_out, new_lse) with these lse. out is 0 where lse is −inf."""
    found: list[torch.Tensor] = []
    for values in lses:
        lse = torch.tensor([[values]], dtype=torch.float32)
        out = random(rng, 1, 1, len(values), 3).masked_fill(torch.isneginf(lse)[..., None], 0.0)
        found += [out, lse]
    return tuple(found)


def _joined(subject: Any, inputs: tuple[torch.Tensor, ...]) -> Answered:
    wide = [x.double().numpy() for x in inputs]
    right = merged((wide[0], wide[1]), (wide[2], wide[3]))
    answer = subject.call(*inputs)
    text = f"lse {inputs[1].flatten().tolist()} and {inputs[3].flatten().tolist()}"
    got = expect_arrays(answer, right, NAMES)
    broken = np.isnan(got[0]).any(-1) | np.isnan(got[1])
    unseen = np.isneginf(wide[1]) | np.isneginf(wide[3])
    if (broken & unseen).any():
        raise MERGE_STAGE.misconception("nan_where_nothing_was_seen").failure(text)
    if broken.any() or np.isinf(got[1][~np.isneginf(right[1])]).any():
        raise MERGE_STAGE.misconception("exp_of_lse").failure(text)
    bound = 8 * EPS * max(8.0, largest(wide[1]), largest(wide[3])) / min(1.0, largest(right[0]) or 1.0)
    return Answered(answer, right, bound, names=NAMES, text=text)


def _join(subject: Any, cases: Iterable[tuple[torch.Tensor, ...]]) -> None:
    compare_all(_joined(subject, inputs) for inputs in cases)


def _check_merge(subject: Any, rng: np.random.Generator) -> None:
    draws = ([float(x) for x in rng.uniform(-2, 2, n)] for n in (1, 1, 3, 3))
    first, second, third, fourth = draws
    _join(
        subject, [_partials(rng, first, second), _partials(rng, [0.0], [0.0]), _partials(rng, third, fourth)]
    )


def _check_empty(subject: Any, rng: np.random.Generator) -> None:
    none = -np.inf
    _join(
        subject,
        [_partials(rng, *pair) for pair in (([none], [1.0]), ([1.0], [none]), ([none, 1.0], [none, 0.5]))],
    )


def _check_far(subject: Any, rng: np.random.Generator) -> None:
    pairs = (
        ([200.0], [199.0]),
        ([-300.0], [-299.0]),
        ([0.0], [400.0]),
        ([400.0], [0.0]),
        ([1000.0, -1000.0], [999.0, -1001.0]),
    )
    _join(subject, [_partials(rng, *pair) for pair in pairs])


def _stage(id: str, function: str, title: str, hints: tuple[str, str, str], checks: Any) -> Stage:
    return Stage(
        id=id,
        function=function,
        title=title,
        hints=hints,
        checks=checks,
        misconceptions=misconceptions_of(id),
    )


OWNED_STAGE = _stage(
    "21.owned", "owned", "Who owns which token",
    (
        "Which piece of the sequence goes to which rank? What happens to the last piece if the length does not divide?",
        "Give every token the number of its piece, position // length of a piece, and every piece its rank. Pieces have ⌈S / P⌉, 1, or "
        "⌈S / (2P)⌉ tokens; later ones may be shorter or empty.",
        r"zig-zag: piece $i$ belongs to rank $\min(i,\; 2P - 1 - i)$",
    ),
    (
        Check("even", 1, "visible", "contiguous, striped and zig-zag, lengths that divide", _check_even),
        Check("ragged", 1, "visible", "any length, also fewer tokens than ranks", _check_ragged),
        Check("any", 1, "held-out", "lengths of hundreds, up to 13 ranks", _check_any),
    ),
)  # fmt: skip
BLOCK_STAGE = _stage(
    "21.block", "attend_block", "One block",
    (
        "Which out and lse must a row that sees no key have, so that merging it changes nothing? Which of your operations turns it into NaN?",
        "Scores in float32 at least, −inf where a key lies after its query, logsumexp over the keys, weights exp(score − lse) with an lse that "
        "is 0 where it was −inf. Spread K/V heads over the queries' heads, neighbours share one.",
        r"$L_i = \ln \sum_{j:\, p_j \leq p_i} e^{s\, q_i \cdot k_j}$, $\;O_i = \sum_j e^{s\, q_i \cdot k_j - L_i} v_j$, and $(0, -\infty)$ without keys",
    ),
    (
        Check("values", 1, "visible", "out and lse by global position, scale given or 1/√D", _check_block),
        Check("blind", 1, "visible", "rows that see no key, no keys, no queries", _check_blind),
        Check("grouped", 1, "visible", "H query heads on K K/V heads", _check_grouped),
        Check("large", 1, "stress", "scores of thousands, and below −10,000", _check_large),
        Check("dtypes", 1, "held-out", "computed in float32 at least, in float64 for float64", _check_dtypes),
    ),
)  # fmt: skip
MERGE_STAGE = _stage(
    "21.merge", "merge", "Two partial results",
    (
        "Both parts are normalised already. Which number of each part says how much it counts?",
        "The joint lse by logaddexp; each out times e^(its lse − the joint one). Where both lse are −inf the difference is NaN: think of those rows.",
        r"$\mathrm{lse} = \mathrm{logaddexp}(\mathrm{lse}_1, \mathrm{lse}_2)$, $\;O = O_1 e^{\mathrm{lse}_1 - \mathrm{lse}} + O_2 e^{\mathrm{lse}_2 - \mathrm{lse}}$",
    ),
    (
        Check("values", 1, "visible", "two parts by their lse", _check_merge),
        Check("empty", 1, "visible", "a part that has seen nothing changes nothing", _check_empty),
        Check("far", 1, "stress", "lse of hundreds, and far apart", _check_far),
    ),
)  # fmt: skip
