"""Checks of values: every result against the float64 oracle, within bounds derived from the inputs.

`precision` looks at digits instead. A float16 result that was rounded to bfloat16 in between is within the
bounds, because the plainest implementation in float16 has errors of the same size. The last bits of the
result show the rounding. A number with 11 significant bits needs only 8 of them by chance in one case of
eight, so if all numbers of a result need only 8, they were rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from jaxtyping import Float

from ringlab.conformance.checks.check import (
    LENGTH,
    Check,
    Measure,
    Plan,
    Runs,
    Verdict,
    by_errors,
    needs_backward,
    needs_causal,
    needs_own_tensors,
    needs_ranks,
)
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.run.run import RAISED, SLOW, SOME_ROWS, Ran, Run
from ringlab.conformance.target.claims import RING
from ringlab.conformance.tolerance import NAMES
from ringlab.errors import apart

GROWTH = 1.7
"""How much larger the rounding error in a half dtype may be on many ranks than on one rank.

A float32 state causes one rounding at the end. Gradients that are rounded once more, when a block returns its
part, have at most √2 times this error. A state in the half dtype adds one rounding for each block, which is at
least twice the error on eight ranks."""


def _plain(plan: Plan) -> list[Run]:
    dtypes = plan.dtypes("float32", "float64")
    return [
        plan.run(P, B=_SEQUENCES.get(P, 2), dtype=dtype)
        for P in plan.ranks(1, 2, 3, 4, 8)
        for dtype in dtypes
    ]


_SEQUENCES = {2: 5, 4: 17}
"""The numbers of sequences of plain runs, by the number of ranks: just above 4 and 16, the sizes that a fixed
table may have."""


def typed(plan: Plan) -> list[Run]:
    """Return plain runs on each number of ranks, and one in each dtype."""
    return [
        *_plain(plan),
        *(plan.run(P, 24, dtype=dtype) for P in plan.ranks(2)[:1] for dtype in plan.claims.dtypes),
    ]


def _some_lse(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    if not any("lse" in ran.arrays for ran in rans):
        return Verdict(True, "does not apply: the target returns no lse")
    return by_errors(("lse",))(plan, rans)


def _types(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    notes = [text for ran in rans for text in ran.noted("types")]
    return Verdict(
        not notes,
        notes[0] if notes else f"{len(rans)} runs: shapes, dtypes and devices as those of q, k and v",
    )


def _masks(plan: Plan) -> list[Run]:
    """Return causal runs with two sequences, and with two heads that share K/V if grouped heads are claimed.

    A mask must be the same for all sequences and heads. There are runs on 4 ranks, where zig-zag has ranks
    between the first and the last; runs in a half dtype, with a scale if the target takes one; and short runs
    on 8 and 16 ranks.
    """
    ranks = plan.ranks(2, 3, 4) if plan.quick else plan.ranks(2, 3, 4, 8)
    heads = partial(plan.run, causal=True, B=2, H=4, K=2)
    scale = 0.5 if plan.claims.scale else None
    many = [P for P in (8, 16) if P in plan.claims.ranks and (P == 8 or plan.claims.over == RING)]
    more = {"B": 5, "H": 6}
    return [
        run
        for layout in plan.claims.layouts
        for run in (
            *(heads(P, layout=layout, **(more if P == 3 else {})) for P in ranks),
            *(heads(ranks[0], LENGTH // 2, layout=layout, dtype=dtype, scale=scale) for dtype in plan.half),
            *(plan.run(P, 4 * P, layout=layout, causal=True) for P in many),
        )
    ]


def _unmasked(plan: Plan) -> list[Run]:
    return [
        plan.run(P, layout=layout, causal=False)
        for layout in plan.claims.layouts
        for P in plan.ranks(4, 3)[:1]
    ]


def _groups(plan: Plan) -> list[Run]:
    heads = (
        ((4, 4), (4, 2), (6, 1), (6, 3), (12, 4))
        if plan.quick
        else ((4, 4), (4, 2), (6, 2), (6, 3), (8, 1), (12, 4), (7, 1), (9, 1), (24, 2))
    )
    odd = [
        plan.run(plan.ranks(2)[0], 24, H=H, K=K, causal=plan.claims.causal[-1]) for H, K in ((10, 2), (17, 1))
    ]
    return odd + [
        plan.run(P, 30, H=H, K=K, causal=causal)
        for P in plan.ranks(2, 3)[: 1 if plan.quick else 2]
        for H, K in heads
        for causal in plan.claims.causal
    ]


def _many(plan: Plan) -> list[Run]:
    """Return short runs with many sequences and heads: more than a byte counts, or than a warp or a block has threads."""
    P, half = plan.ranks(2)[0], plan.half or plan.dtypes("float32")
    masks = plan.claims.causal
    return [
        plan.run(P, 8, B=260, D=8, causal=masks[-1]),
        plan.run(P, 8, B=33, H=36, K=12, D=8, causal=masks[0]),
        plan.run(P, 8, B=3, H=72, K=72, D=8, dtype=half[0], causal=masks[-1]),
        plan.run(P, 8, H=264, K=132, D=8, causal=masks[-1]),
    ]


def _dims(plan: Plan) -> list[Run]:
    """Return runs with head dims that are not powers of two, and with small ones in a half dtype.

    Some targets pad head dims that are not powers of two. In a half dtype, kernels expect multiples of 8.
    """
    P = plan.ranks(2)[0]
    return [
        *(plan.run(P, 24, D=D, causal=causal) for D in (40, 128) for causal in plan.claims.causal),
        *(plan.run(P, 24, D=D, causal=plan.claims.causal[-1]) for D in (80, 192, 256)),
        *(plan.run(P, 24, D=D, dtype=dtype) for dtype in plan.half for D in (4, 12)),
    ]


def _long(plan: Plan) -> list[Run]:
    """Return runs with more than 512 tokens per rank, more than one or two tiles have, and no multiple of 512.

    Runs in half dtypes have more tokens than the dtype can count: up to 256 in bfloat16, and 2,048 in float16.
    Their scores rise, so that each row depends on the last keys that it sees.
    """
    P = plan.ranks(2)[0]
    run = partial(plan.run, P, H=1, K=1)
    one = [1] if P > 1 and 1 in plan.claims.ranks else []  # all tokens on one rank, more than 2,048
    rising = partial(run, causal=plan.claims.causal[-1], values="rising", layout=plan.claims.layouts[-1])
    lengths = {"bfloat16": 600, "float16": 1_100}
    return [
        *(run(600 * P, causal=causal, H=2, K=1) for causal in plan.claims.causal),
        *(replace(run(1_100 * P, causal=plan.claims.causal[-1]), P=ranks) for ranks in (P, *one)),
        *([] if plan.quick else [run(2_100 * P, causal=plan.claims.causal[-1])]),
        *(rising(lengths[dtype] * P, dtype=dtype) for dtype in lengths if dtype in plan.claims.dtypes),
    ]


def _longer(plan: Plan) -> list[Run]:
    """Return runs with more tokens on a rank than any chunk has: a forward, and in the full tier a backward and two ranks.

    No number of chunks below 73 divides 10,001 = 73 · 137. If shards must be even, two chunks divide them. So
    they are longer, and their halves are prime.
    """
    run = partial(plan.run, H=1, K=1, D=8, dout=SOME_ROWS, layout=plan.claims.layouts[0])
    even, P = not plan.claims.ragged, plan.ranks(1, 2)[0]
    one = run(P, (12_302 if even else 10_001) * P, backward=False)
    if plan.quick:
        return [one]
    two = run(
        plan.ranks(2)[0],
        (10_006 if even else 10_001) * plan.ranks(2)[0],
        causal=plan.claims.causal[-1],
        backward=False,
    )
    return [one, replace(one, backward=plan.claims.backward), two]


def _long_results(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict; if results are right, it asks for the longest runs, which may be refused or reach the limit."""
    longest = [ran for ran in rans if ran.run.dout == SOME_ROWS]
    others = [ran for ran in rans if ran.run.dout != SOME_ROWS]
    verdict = by_errors(NAMES)(plan, others) if others else Verdict(True, "")
    if not verdict.ok or not longest:
        return replace(verdict, more=tuple(_longer(plan))) if verdict.ok else verdict
    for ran in longest:
        if (it := ran.trouble) is None:
            continue
        if it.kind != SLOW and not it.refuses:
            return Verdict(False, f"{it} ({ran.run})")
    right = [ran for ran in longest if ran.trouble is None]
    left = [f"not asked: {ran.trouble} ({ran.run})" for ran in longest if ran.trouble is not None]
    found = by_errors(NAMES)(plan, right) if right else Verdict(True, "")
    said = [f"shards of {right[0].run.S // right[0].run.P:,} tokens: {found.evidence}"] if right else []
    evidence = "; ".join([*([verdict.evidence] if found.ok else []), *said, *left])
    return Verdict(found.ok, evidence[:900])


_long_results.each_run_alone = True  # type: ignore[attr-defined]


def _ragged(plan: Plan) -> list[Run]:
    """Return runs of each length under a causal mask, and of every other length without a mask."""
    cases = ((3, 17), (4, 3)) if plan.quick else ((2, 17), (3, 17), (4, 3), (4, 29), (8, 5), (8, 67))
    both = len(plan.claims.causal) > 1
    return [
        plan.run(P, S, layout=layout, causal=causal)
        for number, (P, S) in enumerate(cases)
        if P in plan.claims.ranks
        for turn, layout in enumerate(plan.claims.layouts)
        for causal in plan.claims.causal
        if causal or not both or (number + turn) % 2 == 0
    ]


def _values(*kinds: str, causal: bool | None = None) -> Runs:
    def runs(plan: Plan) -> list[Run]:
        ranks = plan.ranks(3) if plan.quick else plan.ranks(1, 3, 4)
        mask = plan.mask if causal is None else causal
        dtypes = plan.dtypes("float32", "bfloat16", "float64")
        return [
            plan.run(P, values=kind, causal=mask, dtype=d) for P in ranks for kind in kinds for d in dtypes
        ]

    return runs


def _blind(plan: Plan) -> list[Run]:
    """Return causal runs with scores of about −16,000, in which rows see no key of some blocks.

    In these rows, hidden keys would get weight if the mask value were −1e4.
    """
    ranks = plan.ranks(3) if plan.quick else plan.ranks(2, 3, 4)
    layouts = plan.claims.layouts
    return [
        plan.run(P, values=kind, causal=True, layout=layout)
        for P in ranks
        for layout in layouts
        for kind in ("negative", "falling")
    ]


def _growth(plan: Plan) -> list[Run]:
    ranks = plan.ranks(1, 2, 4, 8)
    ranks = [ranks[0], ranks[-1]] if plan.quick else ranks
    return [
        plan.run(P, 128, D=32, H=4, K=4, B=2, dtype=dtype, causal=causal)
        for causal in plan.claims.causal
        for dtype in plan.claims.dtypes
        for P in ranks
    ]


def _grows(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: errors must be within their bounds, and grow little with the number of ranks.

    In half dtypes, the root mean square error may be at most GROWTH times that of one rank.
    """
    within = by_errors(NAMES)(plan, rans)
    curves, worst, fault = [], 0.0, ""
    for dtype, causal in product(("bfloat16", "float16"), (False, True)):
        some = [ran for ran in rans if (ran.run.dtype, ran.run.causal) == (dtype, causal)]
        one = next((ran for ran in some if ran.run.P == min(r.run.P for r in some)), None)
        for name in ("out", "dq", "dk", "dv"):
            errors = [(ran.run.P, rms(ran, name)) for ran in some if name in ran.arrays]
            if one is None or not errors:
                continue
            curve = " → ".join(f"{error:.2g}" for _, error in errors)
            growth = max(error for _, error in errors) / (rms(one, name) or 1.0)
            curves.append(f"{name} {dtype}{' causal' if causal else ''} {curve}")
            if growth > worst:
                grows = f"{apart(growth, GROWTH, digits=2)[0]}-fold from {errors[0][0]} to {errors[-1][0]} ranks ({curve})"
                allowed = f"up to {GROWTH:g}-fold is allowed: a state in {dtype} rounds at each block"
                worst, fault = growth, f"the rounding error of {name} in {dtype} grows {grows}; {allowed}"
    if not within.ok or not curves:
        return within
    if worst > GROWTH:
        return Verdict(False, fault)
    numbers = ", ".join(map(str, sorted({ran.run.P for ran in rans})))
    return Verdict(True, f"root mean square errors over {numbers} ranks: {'; '.join(curves)}")


def rms(ran: Ran, name: str) -> float:
    """Return the root mean square error of a result, relative to the root mean square of the true result."""
    right = getattr(expected(ran.run.plain)[0], name)
    return float(np.sqrt(((ran.arrays[name] - right) ** 2).mean()) / (np.sqrt((right**2).mean()) or 1.0))


def _scaled(plan: Plan) -> list[Run]:
    return [
        plan.run(P, 24, scale=scale, causal=causal)
        for P in plan.ranks(2)[:1]
        for scale in (0.5, 0.01)
        for causal in plan.claims.causal
    ]


def _strided(plan: Plan) -> list[Run]:
    """Return runs of each form of inputs in memory; those in one buffer are dense for one sequence."""
    heads = partial(plan.run, H=4, K=2)
    P, Q = (plan.ranks(2, 3) * 2)[:2]
    mask = plan.claims.causal[-1]
    return [
        *(
            heads(ranks, 24, B=2, strided=form, causal=causal)
            for ranks, form in ((P, "heads"), (Q, "dims"))
            for causal in plan.claims.causal
        ),
        heads(P, 24, B=2, strided="offset", causal=mask),
        heads(Q, 24, B=1, strided="one buffer", causal=mask),
        heads(P, 24, B=2, strided="one buffer", causal=mask),
        heads(Q, 24, B=2, strided="expanded", causal=mask, values="equal heads"),
    ]


def _seeds(plan: Plan) -> list[Run]:
    """Return runs with other inputs, on every claimed layout and number of ranks."""
    return [
        replace(plan.run(P, layout=layout, causal=causal), seed=plan.seed + number)
        for number, P in enumerate(plan.ranks(2, 3, 4, 8), start=1)
        for layout in plan.claims.layouts
        for causal in plan.claims.causal
    ]


def _overflown(plan: Plan) -> list[Run]:
    P = plan.ranks(3, 2)[0]
    runs = [plan.run(P, values="NaN in a key", backward=False)]
    if plan.claims.backward:
        runs.append(plan.run(P, dout="infinite"))
    if plan.claims.backward and "float16" in plan.claims.dtypes:
        runs.append(plan.run(P, dout="overflowing", dtype="float16"))
    return runs


def _shows(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    """Return the verdict: a value that is not finite must reach every row that depends on it, or raise an error."""
    for ran in rans:
        run, row = ran.run, ran.run.S // 2
        if ran.trouble is not None:
            if ran.trouble.kind != RAISED:
                return Verdict(False, f"{ran.trouble} ({run})", run)
            continue
        if run.dout == "infinite":
            hidden = [name for name in ("dk", "dv") if np.isfinite(ran.arrays[name]).all()]
            hidden += ["dq"] if np.isfinite(ran.arrays["dq"][:, :, row]).all(-1).any() else []
            if hidden:
                text = f"an infinite gradient of out gives finite {', '.join(hidden)}: a loss scaler would not see it"
                return Verdict(False, f"{text} ({run})", run)
            continue
        if run.dout == "overflowing":
            true, most = expected(run.plain)[0], 2 * float(np.finfo(np.float16).max)
            hidden = [
                name
                for name in ("dq", "dk", "dv")
                if np.isfinite(ran.arrays[name][np.abs(getattr(true, name)) > most]).any()
            ]
            if hidden:
                text = f"{', '.join(hidden)} are finite where they exceed float16: a loss scaler would not see it"
                return Verdict(False, f"{text} ({run})", run)
            continue
        rows = np.flatnonzero(run.visible()[0, 0, :, row])
        finite = np.isfinite(ran.arrays["out"][:, :, rows]).all(-1).any((0, 1))
        if finite.any():
            seen = f"out of row {rows[finite][0]} is finite, although it sees key {row}, which is NaN"
            return Verdict(False, f"{seen}: nobody would notice ({run})", run)
    shown = [_SHOWN.get(ran.run.dout, _SHOWN[""]) for ran in rans if ran.trouble is None]
    refused = [f"refused: {ran.trouble}" for ran in rans if ran.trouble is not None]
    return Verdict(True, "; ".join([*shown, *refused])[:500])


_SHOWN = {
    "": "a NaN key shows in each row that sees it",
    "infinite": "an infinite gradient shows in dq, dk and dv",
    "overflowing": "gradients beyond float16 are not finite",
}
"""The property that a passing run has shown, by its `dout`."""


def _grouped(plan: Plan) -> str | None:
    return None if plan.claims.grouped else "the target claims no grouped heads"


def _needs_unmasked(plan: Plan) -> str | None:
    return None if False in plan.claims.causal else "the target computes nothing without a mask"


def _uneven(plan: Plan) -> str | None:
    if not plan.claims.ragged:
        return "the target claims only lengths that are divisible by its ranks"
    return None if _ragged(plan) else needs_ranks(plan) or "the target claims none of these numbers of ranks"


def _has_scale(plan: Plan) -> str | None:
    return None if plan.claims.scale else "the target has no parameter scale"


VALUE_CHECKS = (
    Check("types", "shapes, dtypes and devices of all results", "quick", Measure.CALLER, typed, _types, by_values=False),
    Check("forward", "out, without a mask where the target computes that", "quick", Measure.ROUNDING, _plain, by_errors(("out",)), names=("out",)),
    Check("lse", "the natural logarithm of the sum of exponentials", "quick", Measure.ROUNDING, _plain, _some_lse, names=("lse",)),
    Check("dq", "the gradient of q", "quick", Measure.GRADIENTS, _plain, by_errors(("dq",)), needs_backward, names=("dq",)),
    Check("dk", "the gradient of k", "quick", Measure.GRADIENTS, _plain, by_errors(("dk",)), needs_backward, names=("dk",)),
    Check("dv", "the gradient of v", "quick", Measure.GRADIENTS, _plain, by_errors(("dv",)), needs_backward, names=("dv",)),
    Check("masks", "causal masks by global position, in every layout that it claims", "quick", Measure.MASKS, _masks, by_errors(NAMES), needs_causal),
    Check("layouts", "no mask, in every layout that it claims", "quick", Measure.MASKS, _unmasked, by_errors(NAMES), _needs_unmasked),
    Check("blind rows", "rows that see no key of a block; scores about −16,000", "quick", Measure.MASKS, _blind, by_errors(NAMES), needs_causal),
    Check("grouped heads", "fewer key/value heads than query heads", "quick", Measure.GRADIENTS, _groups, by_errors(NAMES), _grouped),
    Check("head dims", "head dims of 4 to 256, powers of two and others", "quick", Measure.GRADIENTS, _dims, by_errors(NAMES)),
    Check("sizes", "33 and 260 sequences, 36 to 264 heads", "quick", Measure.LENGTHS, _many, by_errors(NAMES)),
    Check("ragged", "lengths that do not divide, and ranks without tokens, with each mask", "quick", Measure.LENGTHS, _ragged, by_errors(NAMES), _uneven),
    Check("long shards", "600 to 10,001 tokens on a rank: more than tiles and chunks hold, than half dtypes count, and no multiple of their number", "quick", Measure.LENGTHS, _long, _long_results, spares_more=True),
    Check("large logits", "scores of some hundreds, which overflow without a maximum", "quick", Measure.LOGITS, _values("large"), by_errors(NAMES)),
    Check("sloped logits", "scores that grow or shrink from block to block, steeply or not", "quick", Measure.LOGITS, _values("rising", "falling", "gently rising"), by_errors(NAMES)),
    Check("error growth", "rounding errors on many ranks, compared with those on one, by dtype", "quick", Measure.ROUNDING, _growth, _grows),
    Check("NaN", "values that are not finite show in the results that depend on them", "quick", Measure.LOGITS, _overflown, _shows, tolerant=True, by_values=False),
    Check("scale", "a scale of its own", "quick", Measure.CALLER, _scaled, by_errors(NAMES), _has_scale),
    Check("strided", "inputs that do not lie densely in memory, or in the middle of a buffer, or with others in one", "quick", Measure.CALLER, _strided, by_errors(NAMES), needs_own_tensors),
    Check("more seeds", "other inputs on every layout, number of ranks and mask", "full", Measure.MASKS, _seeds, by_errors(NAMES)),
)  # fmt: skip


NARROWER = {
    "float64": ("bfloat16", "float16", "float32"),
    "float32": ("bfloat16", "float16"),
    "float16": ("bfloat16",),
}
"""For each dtype, the dtypes with fewer digits, the one with the fewest digits first."""
FEWEST = 32
"""The fewest values from which a narrower dtype is inferred.

A single value has fewer digits by chance in at most 1 of 8 cases, and 32 values do in 1 of 10²⁸ cases."""
SMALL = 2.0**-10
"""Values below this share of the largest one are left out, because values that underflow have few digits."""


def rounded_to(array: Float[np.ndarray, "..."], dtype: str) -> str | None:
    """Return the narrowest dtype that can hold all values of a result in `dtype`, or None for `dtype`.

    The result is also None if there are too few values that are not small.
    """
    finite = array[np.isfinite(array)]
    large = np.abs(finite) >= SMALL * np.abs(finite).max(initial=0.0)
    numbers = torch.from_numpy(finite[large & (finite != 0.0)])
    if len(numbers.unique()) < FEWEST:
        return None
    for narrow in NARROWER.get(dtype, ()):
        if torch.equal(numbers.to(getattr(torch, narrow)).double(), numbers):
            return narrow
    return None


def _each_dtype(plan: Plan) -> list[Run]:
    return [plan.run(P, 24, dtype=dtype) for P in plan.ranks(2)[:1] for dtype in plan.claims.dtypes]


def _digits(plan: Plan, rans: Sequence[Ran]) -> Verdict:
    looked = 0
    for ran in rans:
        for name in NAMES:
            if name == "lse" or name not in ran.arrays:
                continue
            looked += 1
            narrow = rounded_to(ran.arrays[name], ran.run.dtype)
            if narrow is not None:
                evidence = f"{name} is {ran.run.dtype}, and every number of it is one of {narrow}: it was rounded to that ({ran.run})"
                return Verdict(False, evidence, ran.run)
    return Verdict(
        True, f"{looked} results in {', '.join(plan.claims.dtypes)} have the digits of their dtype"
    )


PRECISION_CHECKS = (
    Check("precision", "results with all digits of their dtype, not those of a narrower one", "quick", Measure.ROUNDING, _each_dtype, _digits, by_values=False),
)  # fmt: skip
