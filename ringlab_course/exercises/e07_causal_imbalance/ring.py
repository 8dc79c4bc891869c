"""Checks of 07.ring: a causal ring on any layout that computes visible tiles only.

The checks look at values to find hidden scores that are computed. They put NaN into keys that share no
visible tile with a row. If the ring computes the score of such a key and gives it weight 0, the row becomes
NaN. Work whose result is thrown away does not change the values, and the checks do not look for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.answers import expect_tuple, relative_error, to_numpy
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.diagnosis import Answered
from ringlab_course.checking.failures import Crashed, Failure, NotWritten
from ringlab_course.checking.faults import Faults
from ringlab_course.checking.numbers import NAMES, random
from ringlab_course.checking.positions import MISTAKES as FORWARD
from ringlab_course.checking.positions import (
    Shards,
    answered_ranks,
    compare_runs,
    expect_bytes,
    expect_neighbours,
    reason,
    truth,
)
from ringlab_course.checking.wrong_answers import misconceptions_of
from ringlab_course.exercises.e07_causal_imbalance.relation import holds as relation_holds
from ringlab_course.exercises.e07_causal_imbalance.relation import mask
from ringlab_course.exercises.e07_causal_imbalance.runs import (
    Tuples,
    by_hand,
    described,
    positions_of,
    runs_of,
    shuffled,
    token_fold,
)

ON_THE_WIRE = tuple(
    FORWARD[name]
    for name in (
        "sends_p_times", "gathers_everything", "repeats_heads_on_the_wire", "sends_too_many_bytes", "does_not_unpack",
        "never_waits", "splits_the_exchange",
    )
)  # fmt: skip
"""Mistakes that any ring can show in its messages, in the words of exercise 05."""
NAMED = {each.name: each for each in (*misconceptions_of("07.ring"), *ON_THE_WIRE)}

Verify = Callable[[Any, np.random.Generator], None]
CALLED = {"skips_the_shift": "leaves_the_ring"}
"""Names that `positions.reason` returns, each with the name of the same mistake in this exercise."""


@dataclass(frozen=True)
class Dealt(Shards):
    """The q, k and v of every rank, and the runs that their tokens come from."""

    runs: Tuples = field(default_factory=list)

    def run(self, subject: Any, faults: Faults | None = None) -> Any:
        """Return the outcome of the learner's program on these shards.

        Raises: the named mistake if the program crashed for a known reason.
        """
        try:
            return subject.run_ring(self.world_size, self.qs, self.ks, self.vs, faults=faults, runs=self.runs)
        except Crashed as crash:
            name = reason(crash, ragged=len({q.shape[-2] for q in self.qs}) > 1, causal=True)
            name = CALLED.get(name or "", name)
            if name is None:
                raise
            raise NAMED[name].failure(f"{self.text}\n{crash.counterexample}") from None


def _case(rng: np.random.Generator, layout: Layout, H: int = 1, K: int = 1, D: int = 2) -> Dealt:
    runs = runs_of(layout)
    positions = [torch.from_numpy(positions_of(own)) for own in runs]
    lengths = [len(own) for own in positions]
    qs = [random(rng, 1, H, L, D) for L in lengths]
    ks, vs = ([random(rng, 1, K, L, D) for L in lengths] for _ in range(2))
    heads = "" if H == K == 1 else f", {H} query and {K} K/V heads"
    return Dealt(qs, ks, vs, f"{described(layout)}, D={D}{heads}", positions, runs=runs)


def _answers(case: Dealt, results: Sequence[Any]) -> Iterator[Answered]:
    return answered_ranks(case, results, NAMED["nan_in_blind_rows"])


def _verify(subject: Any, cases: Iterable[Dealt]) -> None:
    """Compare (out, lse) of every rank with the oracle; the smallest cases come first."""
    compare_runs(subject, cases, NAMED["nan_in_blind_rows"])


def after_relation(check: Verify) -> Verify:
    """Return the check, changed so that its failures blame `tiles_between` if that function is wrong.

    The ring calls `tiles_between`.
    """

    @wraps(check)
    def run(subject: Any, rng: np.random.Generator) -> None:
        try:
            check(subject, rng)
        except NotWritten:
            raise
        except Failure as failure:
            if relation_holds(subject):
                raise
            raise NAMED["relation_first"].failure(failure.counterexample) from None

    return run


@after_relation
def _check_contiguous(subject: Any, rng: np.random.Generator) -> None:
    _verify(subject, [_case(rng, layouts.contiguous(S, P)) for S, P in ((2, 1), (4, 2), (6, 3))])


@after_relation
def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    cases = [layouts.striped(4, 2), layouts.zigzag(4, 2), layouts.striped(8, 2), layouts.zigzag(8, 2)]
    cases += [layouts.striped(12, 3), layouts.zigzag(12, 3), token_fold(16, 2), token_fold(18, 3)]
    grouped = [_case(rng, make(24, 3), 4, 2, 4) for make in (layouts.striped, layouts.zigzag)]
    _verify(subject, [*(_case(rng, layout) for layout in cases), *grouped])


@after_relation
def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    ragged = (layouts.contiguous(3, 2), layouts.striped(5, 2), layouts.zigzag(7, 3), layouts.contiguous(2, 3))
    unordered = by_hand([(4, 1, 2), (0, 1, 3)], [(6, 1, 2), (3, 1, 1)])
    _verify(subject, [_case(rng, layout) for layout in (*ragged, token_fold(11, 3), unordered)])


@after_relation
def _check_any_layout(subject: Any, rng: np.random.Generator) -> None:
    """Try eight ranks, grouped heads, chunks of any size, and tokens that are dealt at random."""
    cases = [layouts.zigzag(16, 8), layouts.striped(19, 8), layouts.contiguous(29, 8)]
    for S in map(int, rng.integers(20, 40, 3)):
        cases.append(layouts.dealt(S, 5, chunk=int(rng.integers(2, 5)), folded=bool(rng.integers(2))))
    _verify(subject, [_case(rng, layout, 2, 1, 8) for layout in (*cases, shuffled(rng, 14, 3))])


@after_relation
def _check_rounds(subject: Any, rng: np.random.Generator) -> None:
    for layout in (layouts.contiguous(3, 3), layouts.zigzag(13, 3)):
        case = _case(rng, layout)
        expect_neighbours(_right_run(subject, case, "exchanges are counted"), case.text)


@after_relation
def _check_traffic(subject: Any, rng: np.random.Generator) -> None:
    for layout, H, K in ((layouts.contiguous(3, 3), 1, 1), (layouts.zigzag(13, 3), 4, 2)):
        case = _case(rng, layout, H, K, 4)
        trace = _right_run(subject, case, "bytes are counted")
        expect_neighbours(trace, case.text)
        expect_bytes(case, trace, H // K)


def _right_run(subject: Any, case: Dealt, counted: str) -> Any:
    """Return the trace of a run.

    Raises: Failure, whose message begins with `counted`, if the values of this run are wrong.
    """
    outcome = case.run(subject)
    for each in _answers(case, outcome.results):
        if relative_error(each.answer, each.truth) > 1e-4:
            raise Failure(f"{counted} only when the values are right.", each.text)
    return outcome.trace


@after_relation
def _check_hidden(subject: Any, rng: np.random.Generator) -> None:
    """For each run of queries, put NaN into those keys of other ranks that share no tile with the run."""
    cases = (layouts.contiguous(4, 2), layouts.contiguous(6, 3), layouts.zigzag(8, 2), layouts.zigzag(12, 3))
    for layout in (*cases, layouts.striped(8, 2), token_fold(16, 2)):
        case = _case(rng, layout)
        if any(relative_error(a.answer, a.truth) > 1e-4 for a in _answers(case, case.run(subject).results)):
            raise Failure("hidden keys are checked only when the values are right.", case.text)
        for rank in range(layout.P):
            for rows, keys in _hidden(case.runs, rank):
                _expect_untouched(subject, case, rank, rows, keys)


def _hidden(runs: Tuples, rank: int) -> Iterator[tuple[slice, list[np.ndarray]]]:
    """For each run of `rank` that does not see all keys, yield its local rows and a bool array for every rank.

    The arrays are True for the keys in stretches of other ranks that no row of the run sees, because such keys are in
    no tile of the run. They are False for the rank's own keys, because a ring may compute its own block as one triangle
    where the positions ascend.
    """
    row = 0
    for q in runs[rank]:
        rows, row = slice(row, row + q[2]), row + q[2]
        unseen = []
        for origin, own in enumerate(runs):
            parts = [~mask(q, k).astype(bool).any(axis=0) for k in own]
            unseen.append(np.concatenate([np.zeros(0, bool), *parts]) & (origin != rank))
        if any(keys.any() for keys in unseen):
            yield rows, unseen


def _expect_untouched(
    subject: Any, case: Dealt, rank: int, rows: slice, unseen: Sequence[np.ndarray]
) -> None:
    """Put NaN into the unseen keys, and raise Failure unless the values of `rows` are right."""
    ks, vs = ([x.clone() for x in xs] for xs in (case.ks, case.vs))
    for x, keys in zip((*ks, *vs), (*unseen, *unseen), strict=True):
        x[..., torch.from_numpy(keys), :] = torch.nan
    out, lse = expect_tuple(replace(case, ks=ks, vs=vs).run(subject).results[rank], NAMES)
    right = truth(rank, case.qs, case.ks, case.vs, case.positions)
    got = to_numpy(out)[..., rows, :], to_numpy(lse)[..., rows]
    wanted = right[0][..., rows, :], right[1][..., rows]
    nans = [
        f"rank {r}: {', '.join(map(str, np.flatnonzero(keys)))}"
        for r, keys in enumerate(unseen)
        if keys.any()
    ]
    example = (
        f"{case.text}: NaN in keys ({'; '.join(nans)}); rows {rows.start} to {rows.stop - 1} of rank {rank} "
        "see none of them"
    )
    if not all(np.isfinite(part).all() for part in got):
        raise NAMED["computes_hidden_blocks"].failure(example)
    if relative_error(got, wanted) > 1e-4:
        raise Failure("Rows that see nothing of some keys have wrong values.", example)


HINTS = (
    "A block has arrived. Which runs of queries meet which runs of keys now, and which of your functions says how they "
    "meet?",
    "In each step go through your own runs and those of rank ring.origin(step). Each run begins at some local index of its "
    "shard. For every tile of tiles_between attend to its rows and keys, and merge_into the same rows of the state. Without a "
    "tile nothing is computed, but the exchange always happens; length= is the sum over the runs of the next block.",
    r"rows $[a + q_0,\, a + q_1)$, keys $[b + k_0,\, b + k_1)$ with $a$, $b$ the lengths of the runs before; "
    r"$(o, L)_{\mathrm{rows}} \leftarrow (o, L)_{\mathrm{rows}} \oplus \mathrm{attend}(q_{\mathrm{rows}}, k_{\mathrm{keys}}, v_{\mathrm{keys}})$",
)

STAGE = Stage(
    id="07.ring",
    function="ring_causal",
    title="The causal ring that computes what is visible",
    kind="ring",
    helpers=("tiles_between",),
    hints=HINTS,
    misconceptions=tuple(NAMED.values()),
    checks=(
        Check("contiguous", 2, "visible", "rank r owns the r-th stretch of tokens", _check_contiguous),
        Check("layouts", 2, "visible", "striped, zig-zag and token fold; grouped heads", _check_layouts),
        Check(
            "hidden",
            2,
            "visible",
            "keys that are in no tile of a row never touch it",
            _check_hidden,
            kind="cost",
        ),
        Check(
            "ragged", 1, "visible", "shards of different lengths, empty ones, unordered runs", _check_ragged
        ),
        Check("rounds", 1, "visible", "P − 1 exchanges, all with the next rank", _check_rounds, kind="cost"),
        Check(
            "any_layout",
            2,
            "stress",
            "eight ranks, grouped heads, chunks of any size, tokens dealt at random",
            _check_any_layout,
        ),
        Check(
            "traffic",
            1,
            "visible",
            "exactly the bytes of K and V, heads not repeated",
            _check_traffic,
            kind="cost",
        ),
    ),
)
