"""The places of wrong values: in the smallest run that shows them, and as pairs (query, key) on several ranks.

If v is one-hot, out is the matrix of weights itself, with one entry for each query and key. In the same way,
dv shows the weights if dout is one-hot. dq shows the gradients of the scores if k is one-hot, and dk if q is.
So one run gives a whole picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypedDict

import numpy as np

from ringlab.conformance.checks.check import size
from ringlab.conformance.checks.measuring import Measured, expected, expected_of, measure
from ringlab.conformance.run.run import COMPILED, HALVED, TWO_AT_ONCE, Ran, Run
from ringlab.conformance.target.claims import Claims
from ringlab.conformance.tolerance import NAMES, Results

ONE_HOT = {"out": "v", "dv": "dout", "dq": "k", "dk": "q"}
"""The input that must be one-hot so that a result shows each pair of a query and a key."""
MOST_TOKENS = 64
"""The most tokens that a picture over (query, key) shows."""
_SMALLER = 18  # the most runs in the search for a smaller counterexample of one check
_WIDE = 4  # the number of ranks in a picture, if the target supports it
_DIGITS = 3
_DIGITS_OF_FLOAT32 = 1e-6
_ROUNDING = (
    1e-3  # fewer digits may cause errors up to this: float32 values in float64, bfloat16 sums in float32
)
# values within this many bounds count as those of another rank, or as a multiple of the true values
_NEAR = 4


class ResultPlace(TypedDict):
    """The errors of one result as shares of its largest true value; None is NaN or infinite.

    by_rank, by_token: the largest errors by rank, and by token in the order of the sequence. heads: the heads
    with errors beyond the bound. Three fields describe wrong values that are right in another way. factor:
    the number by which all true values are multiplied, or None. of_rank: if each rank holds the true values
    of a later rank, the distance of that rank, else None. of_name: the name of another result whose true
    values these are, or "".
    """

    name: str
    ok: bool
    error: float | None
    bound: float
    by_rank: list[float | None]
    by_token: list[float | None]
    heads: list[int]
    factor: float | None
    of_rank: int | None
    of_name: str


class PairMap(TypedDict):
    """The error of each key's contribution to each query in one head, by position; None is not finite.

    An error is positive if the contribution is too large. It is negative if the contribution is too small or
    has the wrong sign.

    name: the result that shows the contributions. largest: the largest true contribution. bound: the bound
    for that result.
    blocks: pairs (rank of the queries, rank of the keys) by their fault: "missing", "twice" or "hidden" (keys
    are seen that the mask hides). offsets: the distances, key minus query, of all pairs that are missing,
    or seen though hidden, if there are at most two distances.
    """

    name: str
    head: int
    bound: float
    largest: float
    difference: list[list[float | None]]
    blocks: dict[str, list[tuple[int, int]]]
    offsets: dict[str, list[int]]


class Located(TypedDict):
    """A run with wrong values: its fields, each rank's tokens, the places of errors, and a map or None."""

    run: dict[str, Any]
    text: str
    positions: list[list[int]]
    results: list[ResultPlace]
    pairs: PairMap | None


class Search:
    """The search for the places of wrong values, within the claims, from the run that showed them."""

    def __init__(self, ran: Ran, names: tuple[str, ...], claims: Claims) -> None:
        self.ran, self.names = ran, names
        wrong = _wrong(ran, names)
        self.wrong = tuple(each.name for each in [each for each in wrong if _gross(each)] or wrong)
        self.smaller = smaller_runs(ran.run, claims)
        # If ranks divide the heads, a smaller run with fewer heads may not allow other numbers of ranks, so
        # the run's own number of ranks is kept.
        ranks = () if claims.split_heads else claims.ranks
        self.wide = wide_runs(ran.run, self.wrong, ranks, whole_heads=claims.split_heads)
        self.runs = {*self.smaller, *self.wide}

    def found(self, made: Mapping[Run, Ran]) -> tuple[str, dict[str, Any] | None]:
        """Return the smallest counterexample in words ("" if there is none), and the places of wrong values.

        made: the outcomes of the runs that were made.
        """
        smallest = self._first(made, self.smaller, self.names)
        shown = self._first(made, self.wide, self.wrong) or (smallest if self.ran.trouble else self.ran)
        text = str(max(_wrong(smallest, self.names), key=lambda each: each.ratio)) if smallest else ""
        if smallest is None and not self.wrong:
            return "", None
        return text, {"smallest": located(smallest or self.ran), "shown": located(shown or self.ran)}

    def _first(self, made: Mapping[Run, Ran], runs: Sequence[Run], names: tuple[str, ...]) -> Ran | None:
        return next((made[run] for run in runs if run in made and _wrong(made[run], names)), None)


def _wrong(ran: Ran, names: tuple[str, ...]) -> list[Measured]:
    return [] if ran.trouble else [each for each in measure(ran, names) if not each.ok]


def is_gross(ran: Ran, names: tuple[str, ...]) -> bool:
    """Return whether a result has an error that is larger than rounding can explain.

    Rounding includes that of a ring which computes in fewer digits than it returns.
    """
    return any(map(_gross, _wrong(ran, names)))


def small(bound: float) -> float:
    """Return the largest error that rounding may explain in a result with this bound."""
    return max(_ROUNDING, _NEAR * bound)


def _gross(measured: Measured) -> bool:
    return not measured.error <= small(measured.bound)


def smaller_runs(counter: Run, claims: Claims) -> list[Run]:
    """Return smaller runs within the claims that may show the same error as `counter`, the smallest first.

    There are none for a run whose arguments fix its sizes, for two rings, for two calls at once, or for compiled calls.
    """
    if _fixed(counter):
        return []
    lean = replace(_lean(counter, claims.split_heads), D=4)
    grouped = 1 < counter.K < counter.H  # the fault may need several key/value heads
    heads = [(lean.H, lean.K), *([(counter.H, counter.K)] if grouped else [])]
    ranks = [P for P in (1, 2, 3) if P <= counter.P and P in claims.ranks]
    ranks = [P for P in ranks if not claims.split_heads or lean.H % P == lean.K % P == 0]
    of_a_rank = (1, 2, 4) if claims.ragged else (2, 4)
    sizes = [(P, P * tokens) for P in ranks for tokens in of_a_rank if P * tokens <= counter.S]
    candidates = [replace(lean, P=P, S=S, H=H, K=K) for P, S in sizes for H, K in dict.fromkeys(heads)]
    return sorted((run for run in candidates if size(run) < size(counter)), key=size)[:_SMALLER]


def wide_runs(
    counter: Run, wrong: Sequence[str], ranks: Sequence[int], *, whole_heads: bool = False
) -> list[Run]:
    """Return runs that may show errors of the results in `wrong` over (query, key).

    They are on several ranks, or as large as `counter`.
    """
    name = next((each for each in ("out", "dv", "dq", "dk") if each in wrong), "")
    hot = ONE_HOT.get(name, "")
    # The run requires its particular dout, which a one-hot dout would replace.
    if hot == "dout" and counter.dout != "normal":
        hot = ""
    P = next((P for P in (_WIDE, 3) if P in ranks and P >= counter.P), counter.P)
    if counter.any_padding or counter.joint or counter.keys or counter.dv or counter.dropout or counter.bias:
        return []  # the (query, key) matrix is not square, or the weights are not a softmax
    free = not _fixed(counter) and counter.S % (2 * counter.P) == 0
    sizes = [(P, 8 * P)] if free else []
    sizes += [(counter.P, counter.S)]
    lean = [_lean(counter, whole_heads)]
    lean += [_lean(counter, True)] if 1 < counter.K < counter.H else []
    return [
        replace(each, P=P, S=S, D=1 << max(2, (S - 1).bit_length()), one_hot=hot)
        for each in dict.fromkeys(lean)
        for P, S in dict.fromkeys(sizes)
        if S <= MOST_TOKENS
    ]


def _fixed(run: Run) -> bool:
    """Return whether the arguments of a run fix its sizes."""
    given = run.documents or run.documents_of or run.any_padding or run.keys or run.dv or run.dropout
    return bool(given) or run.use in (*HALVED, TWO_AT_ONCE, COMPILED)


def _lean(counter: Run, whole_heads: bool) -> Run:
    """Return the run without fields of other checks, and with one sequence unless arguments differ between sequences.

    It has one key/value head, or all heads with `whole_heads`.
    """
    H, K = (counter.H, counter.K) if whole_heads else (counter.H // counter.K, 1)
    B = counter.B if counter.pads_of or counter.holes or counter.documents_of else 1
    return replace(counter, B=B, H=H, K=K, meter=False, moved=None, twice=False)


def located(ran: Ran) -> Located:
    """Return the places of the wrong values in a run."""
    true, _ = expected_of(ran)
    found = measure(ran, NAMES if not ran.run.keys else ("out", "lse", "dq"))
    places = [_place(each, ran.arrays[each.name], true, ran.positions) for each in found]
    positions = [each.tolist() for each in ran.positions]
    return Located(
        run=asdict(ran.run), text=str(ran.run), positions=positions, results=places, pairs=_pairs(ran, places)
    )


def _place(measured: Measured, array: np.ndarray, true: Results, positions: list[np.ndarray]) -> ResultPlace:
    right = getattr(true, measured.name)
    errors, near = _errors(array, right), max(_NEAR * measured.bound, _DIGITS_OF_FLOAT32)
    gross = not measured.ok and _gross(measured)
    others = [name for name in NAMES if name != measured.name] if gross else []
    by_token, by_head = _largest(errors, 2), _largest(errors, 1)
    return ResultPlace(
        name=measured.name,
        ok=measured.ok,
        error=_number(measured.error),
        bound=measured.bound,
        by_rank=[_number(by_token[own].max(initial=0.0)) for own in positions],
        by_token=[_number(each) for each in by_token],
        heads=[int(head) for head in np.flatnonzero(~(by_head <= measured.bound))],
        factor=_factor(array, right, near) if gross else None,
        of_rank=_of_rank(array, right, positions, near) if gross else None,
        of_name=next((name for name in others if _is(array, getattr(true, name), near)), ""),
    )


def _is(array: np.ndarray, true: np.ndarray, near: float) -> bool:
    return array.shape == true.shape and bool(true.any()) and bool(_errors(array, true).max() <= near)


def _factor(array: np.ndarray, right: np.ndarray, near: float) -> float | None:
    """Return the number by which all true values are multiplied, or None."""
    there = np.isfinite(right)
    values, true = array[there].astype(np.float64), right[there]
    if not np.isfinite(values).all() or not true.any():
        return None
    factor = float(values @ true) / float(true @ true)
    largest = float(np.abs(true).max())
    fits = np.abs(values - factor * true).max() <= near * largest * max(1.0, abs(factor))
    return _number(factor) if fits and abs(factor - 1.0) > near else None


def _of_rank(
    array: np.ndarray, right: np.ndarray, positions: Sequence[np.ndarray], near: float
) -> int | None:
    """Return the number of ranks by which the values of all ranks are displaced, or None."""
    P = len(positions)
    if len({len(own) for own in positions}) > 1 or not len(positions[0]):
        return None
    for further in range(1, P):
        true = np.empty_like(right)
        for rank, own in enumerate(positions):
            true[:, :, own] = right[:, :, positions[(rank + further) % P]]
        if _is(array, true, near):
            return further
    return None


def _errors(array: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return each entry's error as a share of the largest true value.

    The error is inf for NaN, and for an infinity that is only in one of the two arrays.
    """
    scale = np.abs(right[np.isfinite(right)]).max(initial=0.0) or 1.0
    with np.errstate(invalid="ignore"):
        errors = np.abs(np.where(array == right, 0.0, array - right)) / scale
    return np.where(np.isnan(errors), np.inf, errors)


def _largest(errors: np.ndarray, axis: int) -> np.ndarray:
    others = tuple(each for each in range(errors.ndim) if each != axis)
    return errors.max(axis=others, initial=0.0)


def _number(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None


def _pairs(ran: Ran, places: Sequence[ResultPlace]) -> PairMap | None:
    """Return the map of a run with a one-hot input, in its head with the largest error, or None."""
    name = next((name for name, hot in ONE_HOT.items() if hot == ran.run.one_hot), "")
    place = next((each for each in places if each["name"] == name and not each["ok"]), None)
    if place is None:
        return None
    S, right = ran.run.S, getattr(expected(ran.run.plain)[0], name)
    head = int(_largest(_errors(ran.arrays[name], right), 1).argmax())
    # The rows of dv and dk are keys, and their columns are queries.
    actual, true = (
        x[0, head, :, :S].T if name in ("dv", "dk") else x[0, head, :, :S] for x in (ran.arrays[name], right)
    )
    largest = float(np.abs(true).max(initial=0.0)) or 1.0
    with np.errstate(invalid="ignore"):
        difference = np.where(true < 0, -1.0, 1.0) * (actual - true)
        difference = np.where(true == 0, np.abs(difference), difference)
    return PairMap(
        name=name,
        head=head,
        bound=place["bound"] * largest,
        largest=largest,
        difference=[[_number(value) for value in row] for row in difference],
        blocks=_blocks(actual, true, ran, name, place["bound"] * largest),
        offsets=_offsets(actual, true, ran.run, place["bound"] * largest),
    )


def _blocks(
    actual: np.ndarray, true: np.ndarray, ran: Ran, name: str, bound: float
) -> dict[str, list[tuple[int, int]]]:
    """Return the blocks that are missing, count twice, or are seen though hidden, by fault.

    A block is (rank of the queries, rank of the keys).
    """
    visible = ran.run.visible()[0, 0]
    counted = visible & (np.abs(true) > 8 * bound)
    ratios = np.divide(actual, true, out=np.full(true.shape, np.nan), where=counted)
    usual = _usual(ratios, actual, name)
    missing, twice = counted & (np.abs(actual) <= bound), np.abs(ratios / usual - 2.0) < _ALIKE
    blocks: dict[str, list[tuple[int, int]]] = {"missing": [], "twice": [], "hidden": []}
    for q, rows in enumerate(ran.positions):
        for k, keys in enumerate(ran.positions):
            block = np.ix_(rows, keys)
            if (~visible[block] & (np.abs(actual[block]) > bound)).any():
                blocks["hidden"].append((q, k))
            for fault, pairs in (("missing", missing), ("twice", twice)):
                if counted[block].any() and pairs[block][counted[block]].all():
                    blocks[fault].append((q, k))
    if not _explained(ratios / usual, counted & ~missing & ~twice, name):
        blocks["missing"], blocks["twice"] = [], []
    return blocks if ran.run.P > 1 else {}


_ALIKE = 0.02
"""The largest difference at which two ratios of entries to their true values count as equal."""


def _usual(ratios: np.ndarray, weights: np.ndarray, name: str) -> np.ndarray:
    """Return, for each row, the ratio of actual to true values of the pairs that count once: (rows, 1)."""
    # Softmax divides by the sum over all keys. So if a block counts twice, all other weights of its row
    # shrink.
    if name != "out":
        return np.ones((len(ratios), 1))
    smallest = np.where(ratios > 0.01, ratios, np.inf).min(axis=1, initial=np.inf)
    whole = np.isclose(weights.sum(-1), 1.0, atol=1e-2) & np.isfinite(smallest)
    return np.where(whole, smallest, 1.0)[:, None]


def _explained(ratios: np.ndarray, others: np.ndarray, name: str) -> bool:
    """Return whether blocks that are missing or count twice are the whole fault.

    These blocks are the whole fault if there are other pairs, and their ratios are equal in each row. In dq
    and dk, a missing block changes all other blocks by differences that ratios do not show.
    """
    if not others.any():
        return False
    if name in ("dq", "dk"):
        return True
    rows = [ratios[row][others[row]] for row in np.flatnonzero(others.any(axis=1))]
    return all(np.ptp(row) <= _ALIKE * max(1.0, float(np.abs(row).max())) for row in rows)


def _offsets(actual: np.ndarray, true: np.ndarray, run: Run, bound: float) -> dict[str, list[int]]:
    """Return the offsets (key minus query) of all pairs that are missing, or seen though hidden, by fault.

    A fault is left out if it has more than two offsets.
    """
    visible = run.visible()[0, 0]
    faults = {
        "missing": visible & (np.abs(true) > 8 * bound) & (np.abs(actual) <= bound),
        "hidden": ~visible & (np.abs(actual) > bound),
    }
    found = {name: sorted({int(k - q) for q, k in np.argwhere(pairs)}) for name, pairs in faults.items()}
    return {name: offsets for name, offsets in found.items() if 0 < len(offsets) <= 2}


def as_run(fields: Mapping[str, Any]) -> Run:
    """Return the run with these fields, whose tuples may have become lists in JSON."""
    tuples: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
    return Run(**tuples)


def troubled(ran: Ran) -> dict[str, Any]:
    """Return the trouble of a failed run as data; rank: the rank that failed first, or None."""
    assert ran.trouble is not None
    return {
        "run": asdict(ran.run),
        "text": str(ran.run),
        "trouble": asdict(ran.trouble),
        "rank": ran.failed if ran.failed >= 0 else None,
    }
