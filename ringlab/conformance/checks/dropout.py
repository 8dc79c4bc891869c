"""The check of dropout. The target may choose which pairs it drops, and one-hot values show the choice.

If v_j is 1 in dim j and 0 elsewhere, out is the matrix of weights. With dropout, out is the product of the
weights and factors of 0 or 1/(1 − p). The weights are known from the oracle, so the factors are known, and so
is every result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Float

from ringlab.conformance.checks.arguments import Argument
from ringlab.conformance.checks.check import Check, Measure, Plan, Verdict
from ringlab.conformance.checks.measuring import Measured, compare, expected, kept_in, truth_of
from ringlab.conformance.run.run import RAISED, Ran, Run
from ringlab.conformance.target.argument_names import DROPOUTS, SEEDS
from ringlab.conformance.tolerance import NAMES
from ringlab.errors import apart

RATE = 0.25
"""The share of dropped pairs. With 0.5, a ring that takes it for the share of kept pairs would be right."""
_LENGTH = 24
_DEVIATIONS = 6.0
"""The largest allowed deviation of the share of dropped pairs, in standard deviations: chance 1 in 10⁹."""
_COMMON = 48
"""The number of pairs that two patterns must share to be compared.

Two patterns agree at a pair with chance RATE² + (1 − RATE)², and at 48 pairs once in 2³²."""


def _runs(plan: Plan) -> list[Run]:
    """Return a plain run, followed by a run with one-hot values.

    If the target takes a seed, there are two more runs: the same seed with other values, and another seed.
    """
    P = plan.ranks(3, 2)[0]
    layout = plan.claims.layouts[-1]
    S = max(_LENGTH, 8 * P)  # 64 pairs in a tile
    plain = plan.run(P, S, layout=layout, causal=plan.claims.causal[0], B=2, D=2 * S)
    seen = replace(plain, one_hot="v", dropout=RATE, dropout_seed=7)
    if not _seeded(plan):
        return [plain, seen]
    return [plain, seen, replace(plain, dropout=RATE, dropout_seed=7), replace(seen, dropout_seed=8)]


def _seeded(plan: Plan) -> bool:
    return bool({*SEEDS} & {*plan.claims.takes})


def _judge(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    plain, *dropping = rans
    if plain.trouble is not None:
        return Verdict(False, f"{plain.trouble} ({plain.run})")
    troubles = [ran for ran in dropping if ran.trouble is not None]
    if troubles and len(troubles) == len(dropping) and troubles[0].trouble.kind == RAISED:  # type: ignore[union-attr]
        return Verdict(True, f"refused: {troubles[0].trouble}"[:400])
    if troubles:
        return Verdict(False, f"{troubles[0].trouble} ({troubles[0].run})")
    seen = dropping[0]
    weights = expected(seen.run.plain)[0].out[..., : seen.run.S]
    kept = kept_in(seen.arrays["out"], weights)
    for text in (_share(kept, weights), _repeated(kept, weights, seen)):
        if text:
            return Verdict(False, f"{text} ({seen.run})")
    found = _measured(seen, kept)
    if _seeded(plan):
        _, same, other = dropping
        found += _measured(same, kept)
        if np.array_equal(kept_in(other.arrays["out"], weights), kept):
            return Verdict(False, f"two seeds drop the same pairs ({other.run})")
    wrong = [each for each in found if not each.ok]
    if wrong:
        cause = "with the factors that one-hot values show"
        return Verdict(False, f"{max(wrong, key=lambda each: each.ratio)}, {cause}")
    worst = max(found, key=lambda each: each.ratio)
    return Verdict(True, f"{len(dropping)} runs; closest to its bound: {worst}")


def _share(kept: Bool[np.ndarray, "B H S S"], weights: Float[np.ndarray, "B H S S"]) -> str:
    visible = weights > 0
    if kept[visible].all():
        return "the dropout is accepted and ignored: no weight is dropped"
    share = float(1 - kept[visible].mean())
    allowed = _DEVIATIONS * float(np.sqrt(RATE * (1 - RATE) / visible.sum()))
    if abs(share - RATE) <= allowed:
        return ""
    dropped, asked = apart(100 * share, 100 * RATE, digits=0, kind="f")
    return f"{dropped}% of the weights are dropped, asked for were {asked}%"


def _repeated(kept: Bool[np.ndarray, "B H S S"], weights: Float[np.ndarray, "B H S S"], ran: Ran) -> str:
    """Return a sentence if two tiles, or all rows or keys of a tile, drop the same pairs; else ""."""
    run, owned = ran.run, ran.positions
    tiles = {
        (batch, head, row, key): (
            kept[batch, head][np.ix_(rows, keys)],
            weights[batch, head][np.ix_(rows, keys)] > 0,
        )
        for batch in range(run.B)
        for head in range(run.H)
        for row, rows in enumerate(owned)
        for key, keys in enumerate(owned)
    }
    for place, (one, seen) in tiles.items():
        if seen.sum() >= _COMMON and any((one == line)[seen].all() for line in (one[:1], one[:, :1])):
            return f"all rows, or all keys, of a tile are dropped in the same way: {_named(place)}"
    for (a, (one, seen)), (b, (other, too)) in combinations(tiles.items(), 2):
        if one.shape == other.shape and (seen & too).sum() >= _COMMON and (one == other)[seen & too].all():
            return f"the same pairs are dropped in two places: {_named(a)} and {_named(b)}"
    return ""


def _named(place: tuple[int, int, int, int]) -> str:
    batch, head, row, key = place
    return f"batch {batch}, head {head}, rank {row} with keys of rank {key}"


def _measured(ran: Ran, kept: Bool[np.ndarray, "B H S S"]) -> list[Measured]:
    true, limits = truth_of(ran.run.plain, np.where(kept, 1 / (1 - RATE), 0.0))
    return compare(ran, true, limits, NAMES)


def _needs(plan: Plan) -> str | None:
    return None if {*DROPOUTS} & {*plan.claims.takes} else "the target takes no dropout"


IN_PAIRS = Argument(
    "dropout", "", "dropout", DROPOUTS,
    (lambda run: {"dropout": RATE, "dropout_seed": 7, "one_hot": "v", "D": 1 << (run.S - 1).bit_length()},), by_mask=False,
)  # fmt: skip
"""Dropout as an argument in the table of pairs, where one-hot values show which pairs are dropped."""
DROPOUT_CHECKS = (
    Check("dropout", "dropout that it takes: fresh pairs in every block, the same in backward and for the same seed", "quick", Measure.ARGUMENTS, _runs, _judge, _needs, tolerant=True, by_values=False),
)  # fmt: skip
