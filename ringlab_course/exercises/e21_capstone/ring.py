"""Stages 21.forward and 21.backward: the conformance suite's checks, and further checks.

The lists of common mistakes are grouped by the symptom: wrong values, wrong messages, wrong behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ringlab.conformance.checks.check import Check as SuiteCheck
from ringlab.conformance.checks.measuring import expected
from ringlab.conformance.run.run import Ran, Run, join
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Crashed, Failure, NotWritten, reason
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.exercises.e21_capstone.explain import Explainer, is_wrong, wrong_rings
from ringlab_course.exercises.e21_capstone.suite import (
    BACKWARD,
    FORWARD,
    Learners,
    claims,
    named,
    positions_of,
    shards_of,
    wide_runs,
)

mistake = mistakes_of("21.forward")
_as_in_05 = mistakes_of("05")
_as_in_09 = mistakes_of("09.couriers")


OWN_VALUES = (
    "adds_blocks", "halves_at_each_merge", "no_scale", "heads_in_turn", "computes_with_the_next",
)  # fmt: skip
AS_IN_05 = (
    "forgets_last_block", "forgets_own_block", "never_uses_the_visitor", "sends_own_block_again", "no_mask", "local_mask",
    "assumes_contiguous", "strictly_before", "sees_the_future", "origin_plus_step", "masks_own_block_only",
)  # fmt: skip
AS_IN_09 = (
    "goes_the_other_way", "ends_at_the_neighbour", "one_hop_too_far", "gradients_stay", "owner_alone", "last_rank_alone",
    "drops_own_block", "couriers_start_empty", "drops_last_block", "counts_to_three", "dq_of_the_last_block",
    "counts_what_was_sent", "averages_the_ranks", "swaps_dk_and_dv", "scales_dq_again", "lse_of_the_block", "no_delta",
    "narrow_couriers", "no_mask", "local_mask", "assumes_contiguous", "strictly_before", "sees_the_future", "origin_plus_step",
    "never_uses_the_visitor", "sends_own_block_again",
)  # fmt: skip
"""Mistakes in values whose descriptions and wrong rings are in exercises 05 and 09."""
SHARED = (
    mistake("does_not_unpack"),
    mistake("assumes_equal_lengths"),
    mistake("never_waits"),
    mistake("leaves_the_ring"),
    mistake("writes_what_is_sent"),
    mistake("one_buffer"),
    mistake("reads_before_waiting"),
    mistake("nan_in_blind_rows"),
    mistake("overflows"),
    mistake("finite_mask"),
    mistake("ignores_the_scale"),
    mistake("swallows_a_death"),
    mistake("takes_any_length"),
    mistake("another_dtype"),
    mistake("gathers_everything"),
    mistake("too_many_messages"),
    mistake("sends_kv_home"),
    mistake("repeats_heads_on_the_wire"),
    mistake("widens_the_blocks"),
    mistake("pads_to_the_longest"),
    mistake("keeps_every_block"),
    mistake("computes_hidden_tiles"),
    mistake("cleans_hidden_tiles"),
)  # fmt: skip
FORWARD_MISTAKES = (
    *map(mistake, OWN_VALUES),
    *map(_as_in_05, AS_IN_05),
    *SHARED,
    mistake("narrow_state"),
)
BACKWARD_OWN = ("averages_shared_heads", "dscores_without_scale")
_ONCE = "dQ has the factor 1/√D, or the given scale, twice. Apply it once."
BACKWARD_MISTAKES = (
    *(
        replace(each, message=_ONCE) if each.name == "scales_dq_again" else each
        for each in map(_as_in_09, AS_IN_09)
    ),
    *(replace(each, message=f"Backward: {each.message}") for each in SHARED),
    replace(_as_in_09("narrow_couriers"), name="narrow_sums"),
    *map(mistakes_of("21.backward"), BACKWARD_OWN),
)
FORWARD_NAMED = {each.name: each for each in FORWARD_MISTAKES}
BACKWARD_NAMED = {each.name: each for each in BACKWARD_MISTAKES}


Verify = Callable[[Any, np.random.Generator], None]
STRANGE = ("token-fold", "chunk-3", "chunk-5-folded")
EXPLAINERS = {
    FORWARD: Explainer(
        FORWARD_NAMED, lambda: wrong_rings(FORWARD, OWN_VALUES, AS_IN_05), of_groups={"heads_in_turn"}
    ),
    BACKWARD: Explainer(
        BACKWARD_NAMED,
        lambda: wrong_rings(BACKWARD, BACKWARD_OWN, AS_IN_09),
        of_groups={"averages_shared_heads"},
    ),
}


def asks(names: tuple[str, ...], *checks: str, **claimed: Any) -> Verify:
    """Return a check of the ring whose results are `names`.

    It runs the suite's checks with the names `checks`, on new inputs.
    """
    return _of(names, named(*checks), **claimed)


def _of(names: tuple[str, ...], selected: Sequence[SuiteCheck], **claimed: Any) -> Verify:
    def run(subject: Any, rng: np.random.Generator) -> None:
        learners = Learners(subject, names, claims(names, **claimed))
        finding = learners.failing(selected, seed=int(rng.integers(1 << 30)))
        if finding is not None:
            raise EXPLAINERS[names].failure(learners, finding)
        _expect_right(learners.rans.values())

    return run


def _expect_right(rans: Iterable[Ran]) -> None:
    """Raise Failure if a run whose messages or memory were counted has wrong values."""
    for ran in rans:
        if not ran.run.fault and is_wrong(ran):
            raise Failure("The values are wrong in the very run whose cost is counted.", str(ran.run))


def memory(names: tuple[str, ...]) -> Verify:
    """Return the suite's check of memory, on blocks that are large compared with other memory of a process.

    A failed check is run again, because chance, such as an import in a process's first call, only ever adds
    memory.
    """
    check = _of(names, [wide_runs(check) for check in named("peak memory")], ranks=(4, 8))

    def run(subject: Any, rng: np.random.Generator) -> None:
        try:
            check(subject, rng)
        except NotWritten:
            raise
        except Failure:
            check(subject, rng)

    return run


def bytes_to_the_last(names: tuple[str, ...]) -> Verify:
    """Return the suite's check of bytes, followed by one of exact bytes for shards of different lengths."""
    suite = asks(names, "bytes", ranks=(4,), dtypes=("float32", "bfloat16"))

    def run(subject: Any, rng: np.random.Generator) -> None:
        suite(subject, rng)
        seed = int(rng.integers(1 << 30))
        for S, layout in ((7, "striped"), (11, "zigzag"), (2, "contiguous")):
            given = Run(3, S, layout, causal=True, H=2, K=1, D=8, seed=seed)
            try:
                learners = Learners(subject, names, claims(names))
                outcome = learners.outcome(given)
            except Crashed as crash:
                name = reason(crash, ragged=True)
                if name is None:
                    raise
                raise EXPLAINERS[names].named[name].failure(f"{given}\n{crash.counterexample}") from None
            for rank in range(3):
                _expect_bytes(names, given, rank, outcome.trace.bytes_sent(rank))
            _expect_right([join(given, [learners._part(given, rank, outcome) for rank in range(3)])])

    return run


def _expect_bytes(names: tuple[str, ...], run: Run, rank: int, sent: int) -> None:
    """Raise Failure unless the bytes are those of K and V in P − 1 hops, and of their gradients in P hops."""
    vectors = 2 * run.B * run.K * run.D * 4
    passing = [len(positions_of(run)[(rank - step) % run.P]) for step in range(run.P)]
    right = vectors * (sum(passing[:-1]) + (sum(passing) if names == BACKWARD else 0))
    if sent != right:
        lengths = ", ".join(str(len(own)) for own in positions_of(run))
        example = (
            f"{run}, {lengths} tokens on the ranks: rank {rank} sent {sent:,} bytes, {right:,} are needed"
        )
        if sent < right:
            raise Failure("Fewer bytes travel than the blocks, and their gradients, contain.", example)
        raise EXPLAINERS[names].named["pads_to_the_longest"].failure(example)


def hidden_tiles(names: tuple[str, ...]) -> Verify:
    """Return a check that a ring does not compute pairs of stretches in which all keys are hidden.

    Hidden keys are NaN, which must reach no result. In the contiguous layout, the rank that sees one block
    must also have less work than the rank that sees all blocks. In the notebook, the process that computes
    the ring counts its products of matrices, as the suite does, or elements if there are no products. The
    judge cannot rely on a worker's counts, so it uses the values and the processor's time.
    """

    def run(subject: Any, rng: np.random.Generator) -> None:
        seed = int(rng.integers(1 << 30))
        for P, S, layout in ((3, 6, "contiguous"), (3, 12, "zigzag")):
            given = Run(P, S, layout, causal=True, D=4, seed=seed)
            learners = Learners(subject, names, claims(names))
            for rank, rows, keys in _hiding(given):
                _expect_untouched(learners, given, rank, rows, keys)
        _expect_less_work(Learners(subject, names, claims(names)), seed)

    return run


WORK = {
    InProcessSubject.effort: Run(4, 256, "contiguous", causal=True, D=4),
    "seconds of processor time": Run(4, 1024, "contiguous", causal=True, H=16, K=4, D=64),
}
"""The run in which the work of ranks is compared, for each way of counting work.

Products of matrices are counted exactly. Counts of elements, for a ring without such products, and times
also include all other work of a rank. So the tiles have to be large. A tile has 64 × 64 × 4 elements, and
other work takes some dozen elements for each of 64 × 4 numbers. For times, a tile has 16 heads of 256 × 256
pairs, and other work takes some microseconds for each of 256 tokens.
"""
MOST = 0.8
"""The largest work that the first rank may have, as a fraction of the last rank's.

The first rank has 1 block, the last rank has 4, and a step has other costs. The measured fraction is 0.25 in
products and 0.3 to 0.6 in time, even on a busy machine. A ring that computes hidden tiles has the same work
on both ranks, so the fraction is 1 or more.
"""
TRIES = 3


def _expect_less_work(learners: Learners, seed: int) -> None:
    """Compare the work of the first and the last rank in one run.

    The run is made up to three times, because other work on the machine is unlikely to disturb all of them.
    """
    run = replace(WORK[learners.subject.effort], seed=seed)
    by_clock = learners.subject.effort != InProcessSubject.effort
    least = (
        0.0 if by_clock else run.H * run.S // run.P * run.S * run.D
    )  # one multiplication per pair and dimension
    shares = []
    for _ in range(TRIES):
        ran, efforts = learners.efforts(run)
        _expect_right([ran])
        if efforts[-1] <= least:
            return  # work outside torch is not counted, so here only wrong values can show hidden tiles
        shares.append(efforts[0] / efforts[-1])
        if shares[-1] <= MOST:
            return
    text = f"{run}: rank 0 sees 1 block and rank {run.P - 1} {run.P}; {learners.subject.effort}, rank 0 / rank {run.P - 1}: "
    raise (
        EXPLAINERS[learners.names]
        .named["cleans_hidden_tiles"]
        .failure(text + ", ".join(f"{share:.2f}" for share in shares))
    )


def _hiding(run: Run) -> list[tuple[int, np.ndarray, list[np.ndarray]]]:
    """Return (rank, rows, keys) for each stretch of a rank's rows.

    keys: for each other rank, the keys in its stretches that lie wholly after these rows.
    """
    owned = [own.numpy() for own in positions_of(run)]
    cuts = [np.split(np.arange(len(own)), np.flatnonzero(np.diff(own) != 1) + 1) for own in owned]
    found = []
    for rank, own in enumerate(owned):
        for rows in cuts[rank]:
            keys = [
                np.concatenate(
                    [
                        np.zeros(0, int),
                        *(part for part in cuts[other] if theirs[part].min() > own[rows].max()),
                    ]
                )
                if other != rank
                else np.zeros(0, int)
                for other, theirs in enumerate(owned)
            ]
            if any(map(len, keys)):
                found.append((rank, rows, keys))
    return found


def _expect_untouched(
    learners: Learners, run: Run, rank: int, rows: np.ndarray, keys: Sequence[np.ndarray]
) -> None:
    names = learners.names
    shards = shards_of(run, names)
    for x in shards[1:3] if names == FORWARD else shards[2:4]:
        for other, hidden in enumerate(keys):
            x[other][:, :, torch.from_numpy(hidden)] = torch.nan
    keywords = {"positions": positions_of(run), "causal": True, "scale": None}
    result = learners.subject.run_ring(run.P, *shards, **keywords).results[rank]
    arrays = learners._arrays(run, rank, result)
    index = positions_of(run)[rank].numpy()[rows]
    for name in ("out", "lse") if names == FORWARD else ("dq",):
        got = np.asarray(arrays[name].detach().float().numpy())[:, :, rows]
        right = getattr(expected(run.plain)[0], name)[:, :, index]
        if not np.allclose(got, right, rtol=1e-3, atol=1e-3):
            if np.isfinite(got).all():
                raise Failure(
                    "First mend the values. Then this check looks at keys that a row may not see.", str(run)
                )
            text = f"{run}: NaN in keys that rows {rows[0]} to {rows[-1]} of rank {rank} may not see reaches {name}"
            raise EXPLAINERS[names].named["computes_hidden_tiles"].failure(text)


def _stage(**fields: Any) -> Stage:
    return Stage(kind="ring", **fields)


FORWARD_STAGE = _stage(
    id="21.forward",
    function="ring_forward",
    title="The forward ring",
    helpers=("attend_block", "merge"),
    hints=(
        "Whose keys does a rank hold after step t? What must it post before it computes, so that the next rank does not wait?",
        "P steps: post K and V (not in the last one) with the length of the block due next, attend to what is here, merge, wait. Cut shards into "
        "stretches, so that pairs of stretches that hide from each other need no attention. Convert to float32 where you compute, to q's dtype at the end.",
        r"step $t$, $o = (r-t) \bmod P$: $(O, L) \leftarrow (O, L) \oplus \mathrm{block}(q_r, k_o, v_o)$, query $i$ sees key $j$ where $p_r(i) \geq p_o(j)$",
    ),
    misconceptions=FORWARD_MISTAKES,
    checks=(
        Check("values", 2, "visible", "out and lse in full attention, P = 1, 2, 3; dtypes; scale", asks(FORWARD, "types", "forward", "lse", "scale", ranks=(1, 2, 3), dtypes=("float32", "bfloat16"), causal=(False,))),
        Check("masks", 2, "visible", "causal by global position: contiguous, striped, zig-zag; nothing sees ahead", asks(FORWARD, "masks", "causality", ranks=(3,))),
        Check("ragged", 1, "visible", "lengths that do not divide, ranks without tokens, shared heads", asks(FORWARD, "ragged", "grouped heads")),
        Check("hops", 1, "visible", "every message goes to the next rank; no more messages or bytes than needed", asks(FORWARD, "rounds", "bytes", ranks=(4,), dtypes=("float32",)), kind="cost"),
        Check("tiles", 1, "visible", "hidden tiles are never touched, contiguous and zig-zag, and cost nothing, contiguous", hidden_tiles(FORWARD), kind="cost"),
        Check("stable", 2, "stress", "scores of hundreds, sloped, and of −16,000", asks(FORWARD, "large logits", "sloped logits", "blind rows", layouts=("contiguous", "zigzag"))),
        Check("precision", 2, "stress", "errors that do not grow with P: float32, bfloat16, float64; P = 8", asks(FORWARD, "error growth", ranks=(1, 8), causal=(False,))),
        Check("faults", 2, "stress", "a slow network, a rank that dies, a shard of another length", asks(FORWARD, "rank stalls", "rank dies", "wrong shape")),
        Check("any", 1, "held-out", "layouts that have no name, lengths that do not divide", asks(FORWARD, "masks", "ragged", ranks=(3,), layouts=STRANGE)),
        Check("bytes", 2, "held-out", "exactly the bytes of K and V", bytes_to_the_last(FORWARD), kind="cost"),
        Check("memory", 2, "held-out", "memory of a shard's size, on 4 ranks and on 8", memory(FORWARD), kind="cost"),
    ),
)  # fmt: skip

BACKWARD_STAGE = _stage(
    id="21.backward",
    function="ring_backward",
    title="The backward ring",
    helpers=("attend_block",),
    hints=(
        "Which sums stay at home? Which travel, and with which block? Which two numbers per row give a block's weights and their gradient?",
        "delta = rowsum(dO ⊙ O) once, in float32. A block's weights are e^(score − lse) with the lse you are given. dQ adds up at home; dK and dV go on "
        "with their block in float32, one hop later than it, and make P hops.",
        r"$P = e^{sQK^\top - \mathrm{lse}}$, $\;dS = P\circ(dO\,V^\top - \delta)$, $\;dQ \mathrel{+}= s\,dS\,K$, $\;dK_o \mathrel{+}= s\,dS^\top Q$, $\;dV_o \mathrel{+}= P^\top dO$",
    ),
    misconceptions=BACKWARD_MISTAKES,
    checks=(
        Check("values", 2, "visible", "dq, dk, dv in full attention, P = 1, 2, 3; dtypes; scale", asks(BACKWARD, "types", "dq", "dk", "dv", "scale", ranks=(1, 2, 3), dtypes=("float32", "bfloat16"), causal=(False,))),
        Check("masks", 2, "visible", "causal by global position, and no gradient from the past to the future", asks(BACKWARD, "masks", "causality", ranks=(3,))),
        Check("ragged", 1, "visible", "lengths that do not divide, ranks without tokens, shared heads", asks(BACKWARD, "ragged", "grouped heads")),
        Check("hops", 1, "visible", "every message goes to the next rank; no more messages or bytes than needed", asks(BACKWARD, "rounds", "bytes", ranks=(4,), dtypes=("float32",)), kind="cost"),
        Check("tiles", 1, "visible", "hidden tiles are never touched, contiguous and zig-zag, and cost nothing, contiguous", hidden_tiles(BACKWARD), kind="cost"),
        Check("stable", 2, "stress", "scores of hundreds, sloped, and of −16,000", asks(BACKWARD, "large logits", "sloped logits", "blind rows", layouts=("contiguous", "zigzag"))),
        Check("precision", 2, "stress", "errors that do not grow with P: float32, bfloat16, float64; P = 8", asks(BACKWARD, "error growth", ranks=(1, 8), causal=(False,))),
        Check("faults", 2, "stress", "a slow network, a rank that dies, a shard of another length", asks(BACKWARD, "rank stalls", "rank dies", "wrong shape")),
        Check("any", 1, "held-out", "layouts that have no name, lengths that do not divide", asks(BACKWARD, "masks", "ragged", ranks=(3,), layouts=STRANGE)),
        Check("bytes", 2, "held-out", "exactly the bytes of K and V, and of dK and dV", bytes_to_the_last(BACKWARD), kind="cost"),
        Check("memory", 2, "held-out", "memory of a shard's size, on 4 ranks and on 8", memory(BACKWARD), kind="cost"),
    ),
)  # fmt: skip
