"""Checks of decode: a few queries on every rank, against a K/V cache that is spread over the ranks.

The function is called by name, with each of these arguments for which it has a parameter:

    q                 (B, H, n, D): queries of the last n tokens of each sequence, the same on every rank
    k v               (B, K, C, D): this rank's slots of the cache, which contains the last n tokens too
    length            the number of slots in use on this rank; other slots hold values that were not cleared
    lengths           the list of these numbers for all ranks
    positions         the positions in the sequence of the tokens in the used slots, int64
    cache_seqlens     or another of `LOCAL_LENGTHS`, (B,) int32: the number of slots that each sequence uses on this rank
    seq_lens          or another of `TOTAL_LENGTHS`, (B,) int32: the length of each sequence
    block_table       or another of `TABLES`, (B, pages) int32: k and v are (pages, K, slots of a page, D), and slot s of a
                      sequence is in page s // (slots of a page) of its row
    k_new v_new       or other names, (B, K, n, D): keys and values of the new tokens, which the function has to write into
                      the last slots in use, as far as they are this rank's
    blocks_to_copy    or another of `COPIES`, (n, 2) int64: pages to copy, and their copies, before new tokens are written
    ref_counts        or another of `COUNTS`, (pages,) int32, with one of `FREE`: by how many sequences a page is used, and pages
                      of no sequence. The function copies a shared page before it writes to it, and changes the table
    scale window …    or other names, see `NAMES`: arguments of attention, as for a ring
    ring comm group rank world_size   as for a ring (see `ringlab.conformance.target.claims`); the group may be a part of the
                      world, and rank and world_size are those in it

If sequences differ in length, `length`, `lengths` and `positions` are those of the longest one, so only a function with
parameters of `LOCAL_LENGTHS` or `TOTAL_LENGTHS` is called with such sequences. Slots are in no particular order, but the
tokens of a call are in the last ones in use. A table, new keys, the arguments for copies of pages, and
arguments of attention are given only in the checks that test them, or if the function requires them.

It returns out (B, H, n, D) in the dtype of q, or (out, lse), where lse (B, H, n) is a natural logarithm in
float32 (float64 for float64). Every rank returns the whole results. Query i is token S − n + i: it sees
itself and the tokens before it. Tokens are distributed to the ranks in turn, or in stretches.

The bounds are those of a prefill of the whole sequence (`ringlab.conformance.tolerance`), widened as for a
ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, product
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ringlab import oracle
from ringlab.conformance.checks.measuring import CHANCE, expected
from ringlab.conformance.kinds.calls import (
    NOT_ASKED,
    CallCheck,
    Calls,
    Failed,
    changed_inputs,
    distance,
    itself,
    lacks,
    made,
    numbers_of_ranks,
    report,
)
from ringlab.conformance.kinds.decode_cases import (
    COPIES,
    COUNTS,
    FREE,
    GIVEN,
    LENGTHS,
    LOCAL_LENGTHS,
    NAMES,
    NEW_KEYS,
    NEW_VALUES,
    TABLES,
    TOTAL_LENGTHS,
    Case,
    Result,
    arguments_of,
    names,
    result,
)
from ringlab.conformance.kinds.memory import LAID
from ringlab.conformance.kinds.page_lives import BY_CALLER, CALLS, COUNTED, EQUAL, LISTED
from ringlab.conformance.pairwise_cases import Axes, covering_pairs
from ringlab.conformance.report.findings import Report
from ringlab.conformance.run.run import Run, sinks_of, slopes_of
from ringlab.conformance.suite import LIMIT
from ringlab.conformance.target.argument_names import GROUPS
from ringlab.conformance.tolerance import bounds, score_rounding, truth
from ringlab.errors import BackendError, apart
from ringlab.merge import state_dtype

DecodeCalls: TypeAlias = Calls[Case, Result]
DecodeCheck: TypeAlias = CallCheck[Case, Result]
Settings: TypeAlias = tuple[tuple[str, Any], ...]
"""Fields of a case, each with its value."""


WHOLE = 800
"""The most tokens for which the truth is computed for all rows of a sequence."""


def _truth(case: Case, seed: int) -> dict[str, tuple[np.ndarray, float]]:
    """Return out and lse of the new tokens, each with the largest allowed error.

    Implementations disagree about the lse of a row with a sink, so it is left out.
    """
    if case.life:  # the truth does not depend on pages and ranks
        case = replace(Case(1, case.S, case.new), life=case.life, common=case.common)
    return _truth_of(case, seed)


@lru_cache(maxsize=512)
def _truth_of(case: Case, seed: int) -> dict[str, tuple[np.ndarray, float]]:
    run, at = case.run(seed), np.arange(case.S)
    if case.S > WHOLE:
        at = np.unique(np.concatenate(case.last_rows()))
    if case.life or case.rows or case.S > WHOLE:
        true, limits = _of_rows(run, case.inputs(seed), at)
    else:
        true, limits = expected(run.plain)
    results = {"out": true.out} if run.sinks else {"out": true.out, "lse": true.lse}
    return {
        name: (case.new_rows(x, at), limits[name] * max(np.abs(x).max(initial=0.0), 1e-30))
        for name, x in results.items()
    }


def _of_rows(
    run: Run, tensors: tuple[Tensor, ...], at: Int[np.ndarray, " rows"]
) -> tuple[Any, dict[str, float]]:
    """Return the results of `expected` for these q, k, v and dout, at the rows `at` alone.

    The bound of ALiBi is smaller than there. ALiBi adds a number b to a score. Rounding the product b and the
    sum moves the score by at most ε|b| together, or by 2ε|b| if scores are computed in another base. So out
    moves by at most Σ p 2ε|b| (|v| + |out|), and lse by Σ p 2ε|b|. A key far away has a large b and no weight.
    """
    q, k, v, dout = tensors
    q, dout = q[:, :, at], dout[:, :, at]
    tokens = np.arange(run.S)
    scoring: dict[str, Any] = {
        "scale": run.D**-0.5 if run.scale is None else run.scale,
        "softcap": run.softcap or None,
        "mask": run.mask.visible(at, tokens)[None, None],
        "sinks": sinks_of(run).double().numpy() if run.sinks else None,
    }
    if run.alibi:
        true, limits = _of_rows_with_alibi(run, (q, k, v, dout), at, scoring)
    else:
        true = truth(q, k, v, dout, **scoring)
        limits = bounds(q, k, v, dout, true=true, **scoring)
    if run.values != "normal":
        rounding = score_rounding(q, k, v, dout, true=true, **scoring)
        limits = {name: limit + rounding[name] for name, limit in limits.items()}
    return true, {name: CHANCE * limit for name, limit in limits.items()}


def _of_rows_with_alibi(
    run: Run, tensors: tuple[Tensor, ...], at: Int[np.ndarray, " rows"], scoring: dict[str, Any]
) -> tuple[Any, dict[str, float]]:
    q, k, v, dout = tensors
    k, v = (x.repeat_interleave(run.H // run.K, dim=1) for x in (k, v))
    distances = torch.from_numpy(np.abs(at[:, None] - np.arange(run.S))).double()
    added = -slopes_of(run).double()[:, None, None] * distances
    # One further dim for each row, so that products add the row's numbers for the keys to its scores
    of_rows = torch.eye(len(at)).to(q).expand(*q.shape[:2], -1, -1)
    of_keys = (added.mT / scoring["scale"]).expand(run.B, -1, -1, -1)
    longer = torch.cat((q, of_rows), dim=-1)
    exact = longer.double(), torch.cat((k.double(), of_keys), dim=-1), v.double()
    rounded = longer, torch.cat((k, of_keys.to(k)), dim=-1), v
    true = truth(*exact, dout, **scoring)
    limits = bounds(*rounded, dout, true=true, **scoring)
    scores = scoring["scale"] * (exact[0] @ exact[1].mT).numpy()
    weights = np.exp(np.where(scoring["mask"], scores, -np.inf) - true.lse[..., None])
    moves = weights * 2 * torch.finfo(state_dtype(q.dtype)).eps * np.abs(added.numpy())
    largest = {name: np.abs(getattr(true, name)).max(initial=1e-30) for name in ("out", "lse")}
    values = np.abs(exact[2].numpy())
    of_out = moves @ values + moves.sum(-1)[..., None] * np.abs(true.out)
    # Part 3 of the floor, without the numbers of ALiBi
    small, large = (
        score_rounding(*each, v, dout, true=true, **scoring)["lse"] for each in ((q, k), rounded[:2])
    )
    limits["out"] += of_out.max(initial=0.0) / largest["out"]
    limits["lse"] += small - large + moves.sum(-1).max(initial=0.0) / largest["lse"]
    return true, limits


def _differs(calls: DecodeCalls, case: Case) -> str:
    (ranks,) = calls.of(case)
    # In a world of two groups, the group of the odd ranks has other inputs.
    groups = [_truth(replace(case, world=""), calls.seed + odd) for odd in range(1 + bool(case.world))]
    for name in groups[0]:
        for rank, each in enumerate(ranks):
            true, allowed = groups[rank % len(groups)][name]
            if (found := getattr(each, name)) is None:
                continue
            errors = distance(oracle.float64(found), true)
            errors[case.empty_sequences] = 0.0
            if errors.max() > allowed:
                at = np.unravel_index(int(errors.argmax()), errors.shape)
                got, right = apart(float(found[at]), true[at])
                values = f"{got} for {right}, {allowed:.2g} is allowed"
                where = f"{case.place([int(each) for each in at])} ({case})"
                return f"{name} on rank {rank} is {values}: {where}{_without(ranks, case, calls.seed)}"
    return changed_inputs(calls, case, "is not as it must be after a call") if case.appended else ""


def _hides_nan(calls: DecodeCalls, case: Case) -> str:
    """Return a sentence if the result is finite although each query sees a key that is NaN, or ""."""
    for rank, out in enumerate(_outs(calls.of(case)[0])):
        if np.isfinite(out).all(-1).any():
            return f"out on rank {rank} is finite, although a key in use is NaN: nobody would notice ({case})"
    return ""


def _parts(calls: DecodeCalls, case: Case) -> str:
    """Return a sentence if two ranks return different bits, or ""."""
    first, *others = _outs(calls.of(case)[0])
    for rank, out in enumerate(others, start=1):
        if not np.array_equal(first, out):
            far = float(np.abs(first - out).max())
            return f"out of ranks 0 and {rank} differs by {far:.2g}, so they may choose different tokens ({case})"
    return ""


def _reached_by_nan(calls: DecodeCalls, case: Case) -> str:
    """Return a sentence if a result is wrong; it is a note, and no failure, if NaN in unused slots reaches a result."""
    wrong = _differs(calls, case)
    if wrong and all(np.isfinite(out).all() for out in _outs(calls.of(case)[0])):
        return wrong
    return (
        f"{NOT_ASKED}clear the cache before its first use: unused slots that hold NaN reach out, as 0 · NaN is NaN ({case})"
        if wrong
        else ""
    )


def _without(ranks: Sequence[Result], case: Case, seed: int) -> str:
    """Return words for an argument that all ranks ignore, or ""."""
    for field in () if case.world else arguments_of(case):
        other = replace(case, **{field: getattr(Case, field)})
        true, allowed = _truth(other, seed)["out"]
        if all(x.shape == true.shape and (distance(x, true) <= allowed).all() for x in _outs(ranks)):
            return f"; this is the result without {field}"
    return ""


def _outs(ranks: Sequence[Result]) -> list[np.ndarray]:
    return [oracle.float64(each.out) for each in ranks]


@dataclass(frozen=True)
class Argument:
    """A property of a call that only some functions take, and the check that tests it alone.

    field: the field of `NAMES` that has the parameters. values: the settings of its check; if it has a natural
    scale, some are below and some above the length of a shard. others: settings for the table of pairs only,
    because they change no result. larger: settings for the check alone, because their truth takes time. needs:
    as in a `CallCheck`.
    """

    check: str
    asks: str
    field: str
    values: tuple[Settings, ...]
    needs: tuple[tuple[str, ...], ...] = ()
    others: tuple[Settings, ...] = ()
    larger: tuple[Settings, ...] = ()

    def cases(self, ranks: tuple[int, ...]) -> list[Case]:
        """Return the calls of its check; the table of pairs has the other numbers of ranks."""
        return [
            replace(Case(P), **dict(value))
            for P in (1, ranks[len(ranks) // 2])
            for value in (*self.values, *self.larger)
        ]

    @property
    def alone(self) -> DecodeCheck:
        """Return its check."""
        needs = tuple(filter(None, (NAMES[self.field], *self.needs)))
        return CallCheck(self.check, self.asks, self.cases, itself, _differs, needs)


def _values(field: str, *values: Any) -> tuple[Settings, ...]:
    return tuple(((field, value),) for value in values)


PLACES = (("positions",),)
ARGUMENTS = (
    Argument("window", "windows that it takes, shorter and longer than a shard: the oracle's result, or an error", "window", _values("window", 3, 15), PLACES, _values("window", 30)),
    Argument("soft cap", "soft caps that it takes: the oracle's result, or an error", "softcap", _values("softcap", 0.75, 30.0)),
    Argument("sinks", "sinks that it takes, with large scores too: each counts once, or an error", "sinks", ((("sinks", True),), (("sinks", True), ("values", "large")))),
    Argument("alibi", "slopes of ALiBi that it takes: the oracle's result, or an error", "alibi", _values("alibi", True), PLACES),
    Argument("scale", "a scale of its own", "scale", _values("scale", 0.3)),
    Argument("value dims", "a head dim of v that is not that of q and k: the oracle's result, or an error", "dv", _values("dv", 8, 24)),
    Argument("padding", "padding before the sequences, by a mask that it takes: the oracle's result, or an error", "padding", _values("padding", 5, 15)),
    Argument("lengths of sequences", "sequences of different lengths in no order, down to one token", "shorter", (*_values("shorter", 3, 15, 23), (("shorter", 15), ("B", 3)), (("shorter", 22), ("B", 7))), (("positions", *LOCAL_LENGTHS),)),
    Argument("empty sequences", "a sequence without a token, as in a batch that is filled up: the results of the others, or an error", "empty", (*_values("empty", True), (("empty", True), ("B", 4))), (("positions", *LOCAL_LENGTHS),)),
    Argument("pages", "a cache in pages, which lie in random order", "paged", ((("paged", 4),), (("paged", 4), ("S", 37))), (LENGTHS,), larger=((("paged", 1), ("S", 300)), (("paged", 48), ("S", 300)))),
    Argument("new keys", "keys and values of new tokens that it writes itself, in several calls", "appended", ((("appended", True),), (("appended", True), ("new", (1, 1, 1)))), PLACES),
    Argument("rolling cache", "slots whose tokens are in no order, as when they were used before: the oracle's result, or an error", "rolled", ((("rolled", True),), (("rolled", True), ("dealt", "in stretches")))),
)  # fmt: skip
DEALT = ("in turn", "in stretches")
CUT_BACK: Settings = (("paged", 4), ("shorter", 13), ("rows", "of the longest"))
TWO_GROUPS = "of two groups"


def _base_axes(calls: DecodeCalls, ranks: tuple[int, ...]) -> dict[str, tuple[Settings, ...]]:
    """Return the axes of the table of pairs that are no arguments."""
    several = not lacks(PLACES, calls.function)
    slots = not lacks((LENGTHS,), calls.function)
    new = [(3,)] * several + [(1, 1, 1)] * slots + [(2, 1, 3)] * (several and slots)
    return {
        "P": _values("P", *ranks[::-1], *([] if 1 in ranks else [1])),
        "dtype": ((), *_values("dtype", "bfloat16", "float16", "float64")),
        "heads": ((), (("H", 4), ("K", 2)), (("H", 4), ("K", 1)), (("H", 6), ("K", 2))),
        "batch": ((), *_values("B", 1, 5)),
        "memory": ((), *_values("memory", *IN_PLACE)),
        "scores": ((), *_values("values", "stepped")),
        "new": ((), *_values("new", *new)),
        "dealt": ((), *_values("dealt", *DEALT[1:])),
        "uncleared": ((), *_values("uncleared", *["10,000"] * slots)),
        "world": ((), *_values("world", *[TWO_GROUPS] * _takes_a_group(calls))),
    }


def _tells_lengths(calls: DecodeCalls) -> Callable[[Case], bool]:
    """Return a function of a case: whether the target can know the lengths of sequences that the case needs.

    The keys that new tokens and windows see depend on the end of a sequence. The number of slots on this rank
    does not determine it.
    """
    whole = not lacks((TOTAL_LENGTHS, ("positions", *LOCAL_LENGTHS)), calls.function)
    own = not lacks((LOCAL_LENGTHS,), calls.function)

    def tells(case: Case) -> bool:
        places = max(case.new) > 1 or case.window or case.alibi or case.appended
        return whole or (own and not places) or not (case.shorter or case.empty or case.life)

    return tells


def _fits(chosen: Mapping[str, Settings], tells_lengths: Callable[[Case], bool]) -> bool:
    """Return whether these settings have a meaning together, for a function that can know these lengths."""
    changes = [change for settings in chosen.values() for change in settings]
    case = replace(Case(1), **dict(changes))
    visible = case.padding + case.shorter + sum(case.new) <= case.S
    # Whether a soft cap applies before or after ALiBi's bias differs among models.
    # A batch of one has no second sequence.
    filled = case.B > 1 or not (case.empty or case.rows)
    # A sequence that is cut back has its tokens already, in pages of others.
    cut = not (case.rows and case.appended)
    alone = case.P == 1 and "P" in chosen and case.world
    return (
        len(dict(changes)) == len(changes)
        and visible
        and filled
        and cut
        and not alone
        and not (case.softcap and case.alibi)
        and tells_lengths(case)
    )


def _pairs(calls: DecodeCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return the table of pairs. An argument takes part if the function honours it alone."""
    honoured = _honoured(calls, ranks)
    settings = {each.check: ((), *each.values, *each.others) for each in honoured}
    if {"pages", "lengths of sequences"} <= settings.keys():
        settings["pages"] = *settings["pages"], CUT_BACK
    axes: Axes = {**_base_axes(calls, ranks), **settings}
    rows = covering_pairs(axes, partial(_fits, tells_lengths=_tells_lengths(calls)))
    return [replace(Case(ranks[0]), **dict(chain.from_iterable(row.values()))) for row in rows]


def _honoured(calls: DecodeCalls, ranks: tuple[int, ...]) -> list[Argument]:
    """Return the arguments that the function honours if each of them is given alone."""
    asked = [each for each in ARGUMENTS if not lacks(each.alone.needs, calls.function)]
    calls.make(case for each in asked for case in each.cases(ranks))
    return [each for each in asked if all(_says(calls, case) == "" for case in each.cases(ranks))]


def _takes_a_group(calls: DecodeCalls) -> bool:
    return not calls.over_ring and not lacks((GROUPS,), calls.function)


def _says(calls: DecodeCalls, case: Case) -> str | None:
    """Return the sentence of `_differs`, or None if the call has no result."""
    try:
        return _differs(calls, case)
    except Failed:
        return None


def _differ_together(calls: DecodeCalls, case: Case) -> str:
    """Return a sentence on a wrong call, or "".

    Further calls, each with the usual value of one setting, show which settings the fault does not need. Once
    these have their usual values, others may not be needed either, so this is repeated.
    """
    usual, found = vars(Case(case.P)), ""
    said: str | None = _differs(calls, case)
    while said:
        found = said
        simpler = {
            name: replace(case, **{name: usual[name]})
            for name, value in vars(case).items()
            if value != usual[name]
        }
        calls.make(simpler.values())
        spare = {name: usual[name] for name, each in simpler.items() if _says(calls, each)}
        case = replace(case, **spare)
        calls.make([case])
        said = _says(calls, case) if spare else None
    return found


COPIERS = {BY_CALLER: (), LISTED: (COPIES,), COUNTED: (COUNTS, FREE)}
"""The parameters of each way to copy a shared page."""
IN_PLACE = tuple(name for name in LAID if name != "dims apart")
"""Forms of memory in which no function has a reason to refuse its arguments."""
MODES: tuple[dict[str, Any], ...] = ({"inference": True}, {"default": "bfloat16"}, {"default": "float64"})


def _long(calls: DecodeCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return calls with caches that are longer than the usual chunks, splits and tables of code.

    Some lengths, positions and numbers of pages exceed those that 16 bits, or 32-bit floats, can hold.
    """
    P, honoured = ranks[0], {each.check for each in _honoured(calls, ranks)}
    huge = Case(P, 66_000 * P, B=1, H=1, K=1)
    found = [Case(P, 650 * P), Case(P, 4200 * P, B=1, dealt="in stretches"), huge]
    found += [Case(P, 70_000, H=1, K=1, shorter=37_001)] * ("lengths of sequences" in honoured)
    pool: dict[str, Any] = {"paged": 1, "pool": 2**24 + 99, "dtype": "float16"}
    return found + [Case(1, B=1, H=1, K=1, D=8, **pool)] * ("pages" in honoured)


LONG: dict[str, Settings] = {
    "window": (("window", 4100),), "soft cap": (("softcap", 30.0),), "sinks": (("sinks", True),),
    "alibi": (("alibi", True),), "padding": (("padding", 4100),), "rolling cache": (("rolled", True),), "pages": (("paged", 16),),
}  # fmt: skip
"""Settings of a cache of 5,000 tokens, by the check of the argument."""


def _large_numbers(calls: DecodeCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return a call with a pool of many pages, and for each honoured argument a call with it and a long cache."""
    P, honoured = ranks[0], {each.check for each in _honoured(calls, ranks)}
    pool = [Case(P, K=1, paged=1, pool=66_001)] if "pages" in honoured else []
    return pool + [Case(P, 5000, **dict(LONG[check])) for check in LONG if check in honoured]


SHORT, LONGER = 100, 1_100
"""The numbers of tokens in the caches between which the bytes of a call are compared."""
SLACK = 128
"""The most bytes that a rank may send more with a longer cache, because headers may have longer numbers. One
byte for each further token would exceed it."""
ENOUGH = 2.5
"""The bytes that a rank may send to each other rank, as a multiple of the partials of all queries: 2, because
partials may be in float64 or come back merged, and 0.5 for names and shapes."""


def _caches(calls: DecodeCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return metered calls with a long cache: plain, and in pages and with new keys if the function takes them."""
    honoured = {each.check for each in _honoured(calls, ranks)}
    ways: list[dict[str, Any]] = [{}]
    ways += [{"paged": 16}] * ("pages" in honoured) + [{"appended": True}] * ("new keys" in honoured)
    ways += [{"new": (3,)}] * (not lacks(PLACES, calls.function))
    several = [P for P in ranks if P > 1][-1:]
    sizes: dict[str, Any] = {"H": 8, "K": 8, "metered": True}
    return [Case(P, LONGER, **sizes, **way) for P in several for way in ways]


def _shorter(case: Case) -> Case:
    return replace(case, S=SHORT)


def _sends_the_cache(calls: DecodeCalls, case: Case) -> str:
    """Return a sentence if the bytes that a rank sends grow with the cache, or exceed its partials; else ""."""
    short, longer = ([each.sent for each in ranks] for ranks in calls.of(_shorter(case), case))
    if case.P > 1 and not any((*short, *longer)):
        return f"{NOT_ASKED}no message was seen ({case})"
    rank = int(np.argmax([after - before for before, after in zip(short, longer, strict=True)]))
    if longer[rank] - short[rank] > SLACK:
        bytes_of = (
            f"{longer[rank]:,} bytes with {case.S:,} tokens in the cache, and {short[rank]:,} with {SHORT}"
        )
        return f"rank {rank} sends {bytes_of}: more with a longer cache, and not only partials of the new tokens ({case})"
    rows = case.B * case.H * sum(case.new)
    partials = rows * (case.D + 2) * state_dtype(getattr(torch, case.dtype)).itemsize
    most = int(ENOUGH * (case.P - 1) * partials)
    sent = max(*short, *longer)
    if sent > most:
        enough = f"{(case.P - 1) * partials:,} bytes bring the partials of all its queries to the other ranks"
        return f"a rank sends {sent:,} bytes, and at most {most:,} are allowed: {enough} ({case})"
    return ""


def _two_groups(ranks: tuple[int, ...]) -> list[Case]:
    several = [P for P in ranks if P > 1][-1:]
    return [Case(P, dtype=dtype, world=TWO_GROUPS) for P in several for dtype in ("float32", "bfloat16")]


def _differs_in_groups(calls: DecodeCalls, case: Case) -> str:
    if calls.over_ring:
        return f"{NOT_ASKED}it is called over a ring"
    if not (wrong := _differs(calls, case)):
        return ""
    return f"{wrong}; every second rank makes the call in a process group of its own"


def _many_new(calls: DecodeCalls, ranks: tuple[int, ...]) -> list[Case]:
    return [Case(P, S, (n,)) for P in (1, *ranks[:1]) for S, n in ((60, 37), (560, 530))]


def _sizes(calls: DecodeCalls, ranks: tuple[int, ...]) -> list[Case]:
    """Return calls with one unusual size each, smaller or larger than in the other checks; most are no power of two."""
    heads = [{"H": H, "K": K} for H, K in ((1, 1), (3, 3), (10, 2), (132, 12))]
    dims = [{"D": D} for D in (8, 40, 80, 264)]
    batches = [{"B": B} for B in (1, 3, 9)]
    every: list[dict[str, Any]] = [*heads, *dims, *batches]
    usual = [Case(P, **sizes) for P in (1, *ranks[:1]) for sizes in every]
    many = [] if lacks((LENGTHS,), calls.function) else [Case(ranks[0], 140, (1,) * 130, B=1)]
    return [*usual, Case(ranks[0], 9, B=300), *many]


def _lives(life: str, *copied: str) -> Callable[[DecodeCalls, tuple[int, ...]], list[Case]]:
    """Return a function for `CallCheck.more`; it returns lives of pages, with forks at a boundary of pages and others.

    copied: the ways to copy pages; a way is left out if the function lacks its parameters.
    """

    def cases(calls: DecodeCalls, ranks: tuple[int, ...]) -> list[Case]:
        several, writes = (
            not lacks(needs, calls.function) for needs in (PLACES, (*PLACES, NEW_KEYS, NEW_VALUES))
        )
        ways = [how for how in copied if not lacks(COPIERS[how], calls.function)]
        found = []
        for P in (1, ranks[len(ranks) // 2]):
            if life == "forked" and BY_CALLER in copied and not lacks((LOCAL_LENGTHS,), calls.function):
                found += [Case(P, S, **dict(CUT_BACK)) for S in (24, 37)]
            # Slots of a page, common tokens, new tokens in a call, and how tokens are dealt. The first and last forks are on a
            # boundary of pages.
            sizes = (4, 8 * P, 1, 0), (4, 9 * P + 1, 3, 0), (16, 6 * P, 1, 1), (1, 3, 3, 0)
            for (paged, common, new, dealt), how in product(sizes, ways):
                n = new if several else 1
                case = Case(P, common + CALLS * n, (n,), DEALT[dealt], paged=paged, life=life, common=common)
                found += [replace(case, appended=True, copied=how)] if writes else []
                found += [case] if how == BY_CALLER else []
        tells = _tells_lengths(calls)
        return [case if tells(case) else replace(case, life=EQUAL.get(life, life)) for case in found]

    return cases


def _differs_beside(calls: DecodeCalls, case: Case) -> str:
    if not calls.over_ring:
        return f"{NOT_ASKED}it is called over a ring of virtual ranks only"
    if not (wrong := _differs(calls, case)):
        return ""
    alone = replace(case, beside=False)
    calls.make([alone])
    said = "right" if _says(calls, alone) == "" else "wrong too"
    return f"{wrong}; another thread made a call in between, and without it the result is {said}"


def _may_be_refused(case: Case) -> bool:
    large = case.pool > 0 or (
        case.S > WHOLE or max(case.new) > 16 or (case.B, case.D) != (2, 16) or case.H > 4 or case.H % 2 > 0
    )
    return bool(arguments_of(case) or case.life or case.world) or large or case.memory == "dims apart"


CHECKS: tuple[DecodeCheck, ...] = (
    CallCheck("values", "one new token, against caches that are dealt in turn and in stretches", lambda ranks: [Case(P, S, dealt=dealt) for P in (1, *ranks) for S in (24, 37) for dealt in DEALT], itself, _differs),
    CallCheck("dtypes", "half dtypes merged in float32, and float64", lambda ranks: [Case(P, 64, dtype=dtype) for P in ranks[-1:] for dtype in ("bfloat16", "float16", "float64")], itself, _differs),
    CallCheck("lse digits", "scores near 128 in half dtypes: the lse of a partial keeps its fraction", lambda ranks: [Case(P, S, dtype=dtype, values="stepped") for P in ranks for S in (37, 64) for dtype in ("bfloat16", "float16")], itself, _differs),
    CallCheck("grouped heads", "fewer key/value heads than query heads", lambda ranks: [Case(P, H=4, K=K) for P in ranks for K in (2, 1)], itself, _differs),
    CallCheck("empty ranks", "fewer tokens than ranks", lambda ranks: [Case(P, S, dealt=dealt) for P in ranks for S in (1, max(1, P - 1)) for dealt in DEALT], itself, _differs),
    CallCheck("large scores", "scores of some hundreds, which overflow without a maximum", lambda ranks: [Case(P, values=values) for P in ranks for values in ("large", "negative")], itself, _differs),
    CallCheck("new tokens", "some new tokens, causal among themselves", lambda ranks: [Case(P, new=(n,), dealt=dealt, H=H) for P in ranks for n, H in ((2, 2), (7, 4)) for dealt in DEALT], itself, _differs, PLACES),
    CallCheck("new tokens in half", "several new tokens in half dtypes, causal among themselves", lambda ranks: [Case(P, 13, (7,), dtype=dtype) for P in ranks[-1:] for dtype in ("bfloat16", "float16")], itself, _differs, PLACES),
    CallCheck("short prefix", "a prefix of one token, and none", lambda ranks: [Case(P, S, (S - before,)) for P in ranks for S in (8, 13) for before in (1, 0)], itself, _differs, PLACES),
    CallCheck("uncleared slots", "slots that are not in use", lambda ranks: [Case(P, S, uncleared="10,000") for P in ranks for S in (24, max(1, P - 1))], itself, _differs, (LENGTHS,)),
    CallCheck("uncleared, new tokens", "several new tokens, and slots that are not in use", lambda ranks: [Case(P, new=(3,), uncleared="10,000") for P in ranks], itself, _differs, PLACES),
    CallCheck("NaN in slots", "slots that are not in use, and hold NaN: whether they must be cleared first", lambda ranks: [Case(P, S, uncleared="NaN") for P in ranks for S in (1, 24)], itself, _reached_by_nan, (LENGTHS,)),
    CallCheck("bytes", f"what a rank sends in a call: no more with {LONGER:,} tokens in the cache than with {SHORT}, and little more than its partials", lambda ranks: [], lambda case: [_shorter(case), case], _sends_the_cache, more=_caches),
    CallCheck("long caches", "650, 4,200 and 66,000 tokens on a rank, which exceed the chunks, splits and 16 bits of kernels: the oracle's result, or an error", lambda ranks: [], itself, _differs, more=_long, large=True),
    CallCheck("large numbers", "a pool of 66,001 pages, and each argument in a cache of 5,000 tokens: the oracle's result, or an error", lambda ranks: [], itself, _differs, more=_large_numbers),
    CallCheck("many new tokens", "37 and 530 new tokens, as in a chunk of a prompt: the oracle's result, or an error", lambda ranks: [], itself, _differs, PLACES, more=_many_new, large=True),
    CallCheck("other sizes", "batches, heads, head dims and numbers of calls that are small, large, and no power of two: the oracle's result, or an error", lambda ranks: [], itself, _differs, more=_sizes, large=True),
    CallCheck("other modes", "calls under inference_mode, and with another default dtype", lambda ranks: [Case(P, **mode) for P in (1, *ranks[:1]) for mode in MODES], itself, _differs),
    CallCheck("two at once", "a call while another thread makes one, over a ring", lambda ranks: [Case(P, beside=True) for P in ranks if P > 1][:2], itself, _differs_beside),
    CallCheck("two groups", "two process groups of a world at once, each with a cache of its own", _two_groups, itself, _differs_in_groups, (GROUPS,)),
    CallCheck("rejected drafts", "slots of new tokens that are written again, after a call with other values in them", lambda ranks: [Case(P, new=new, drafted=True) for P in ranks[-1:] for new in ((1,), (1, 1))], itself, _differs, (LENGTHS,)),
    CallCheck("strided", "arguments that are parts of larger tensors, or have another order of axes", lambda ranks: [Case(P, memory=memory, dealt=dealt) for P in (1, *ranks[:1]) for memory, dealt in zip(IN_PLACE, (*DEALT, *DEALT), strict=False)], itself, _differs),
    CallCheck("dims apart", "arguments of which no axis is dense: the oracle's result, or an error", lambda ranks: [Case(P, memory="dims apart") for P in (1, *ranks[:1])], itself, _differs),
    CallCheck("NaN", "a key that is NaN shows in the result", lambda ranks: [Case(P, values="NaN in a key") for P in ranks], itself, _hides_nan),
    CallCheck("equal ranks", "the same bits on all ranks, each of which chooses the next token", lambda ranks: [Case(P) for P in ranks], itself, _parts),
    CallCheck("growing cache", "a cache that gets a new token before each of four calls", lambda ranks: [Case(P, S, (1,) * 4, dealt) for P in ranks for S in (24, 4) for dealt in DEALT], itself, _differs, (LENGTHS,)),
    *(each.alone for each in ARGUMENTS),
    CallCheck("shared pages", "sequences that share the pages of a common prefix, and grow alone and together: the oracle's result, or an error", lambda ranks: [], itself, _differs, (TABLES, LENGTHS), more=_lives("forked", BY_CALLER)),
    CallCheck("reused pages", "pages of sequences that ended, which others get while a fork still has some of them: the oracle's result, or an error", lambda ranks: [], itself, _differs, (TABLES, LENGTHS), more=_lives("reused", BY_CALLER)),
    CallCheck("copied pages", "shared pages that the function has to copy before it writes to them: what other sequences have there stays", lambda ranks: [], itself, _differs, (TABLES, *PLACES, NEW_KEYS, NEW_VALUES, (*COPIES, *COUNTS)), more=_lives("forked", LISTED, COUNTED)),
    CallCheck("pairs", "every two settings together: arguments, dtypes, heads, numbers of new tokens, ranks", lambda ranks: [], itself, _differ_together, more=_pairs),
    CallCheck("side effects", "arguments, random numbers and modes as they were, in every call", lambda ranks: [], itself, changed_inputs, more=made(lambda ranks: [Case(P) for P in (1, *ranks)], lambda case: not case.appended)),
)  # fmt: skip
"""The checks, in the order in which they are reported."""


def check_decode(
    target: Any,
    *,
    ranks: Sequence[int] | None = None,
    quick: bool = False,
    seed: int = 0,
    only: Sequence[str] = (),
    limit: float = LIMIT,
) -> Report:
    """Return the findings about `target`, a decode or "package.module:name".

    ranks: the numbers of ranks; if None, 2, 3 and 4, or 2 and 3 with `quick`. quick: whether to leave out large
    calls. limit: seconds for each call on processes; a function over ringlab's Comm runs on virtual ranks in
    this process, without a limit.
    Raises: BackendError for an unknown check, a target that is not a function of q, or invalid ranks.

    >>> from ringlab.conformance.kinds.decode import check_decode
    >>> def alone(ring, q, k, v):  # right on one rank, which has the whole cache
    ...     weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    ...     return weights @ v
    >>> check_decode(alone, only=["values"], ranks=[1]).failed, check_decode(alone, only=["values"]).failed
    ([], ['values'])
    """
    ranks = numbers_of_ranks(ranks, quick)
    if not ranks or min(ranks) < 1:
        raise BackendError("numbers of ranks of at least 1", repr(ranks))
    calls = DecodeCalls(target, result, seed, limit, GIVEN, names, _may_be_refused)
    return report(calls, CHECKS, only, ranks, "a decode", {}, quick)
