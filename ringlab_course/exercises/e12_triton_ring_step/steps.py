"""Checks of 12.step and 12.table: whole steps in one launch, with all keys seen and by the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab.plan import tiles
from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.exercises.e12_triton_ring_step import mistakes
from ringlab_course.exercises.e12_triton_ring_step.cases import (
    RESULT,
    SAYS,
    STATE,
    Chain,
    compare,
    expect_named_keys_only,
    expect_one_launch,
    expect_read_once,
    expect_same,
    expect_state,
    expect_state_not_read,
    expect_state_written,
    expect_written,
    garbage,
    poisoned,
    random,
    rounded,
)
from ringlab_course.exercises.e12_triton_ring_step.emulate import Step, comparable, tables, whole_block

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Recorded

D = 16


def _chain(
    rng: np.random.Generator, rows: int, keys: Sequence[int], H: int = 1, K: int = 1, B: int = 1, *, size=1.0
) -> Chain:
    """A chain of steps whose blocks are seen whole."""
    q = random(rng, B, H, rows, D, size=size)
    steps = [Step(random(rng, B, K, n, D), random(rng, B, K, n, D), *whole_block(rows, n)) for n in keys]
    heads = f"{H} heads on {K} K/V heads, " if (H, K) != (1, 1) else ""
    blocks = ", ".join(map(str, keys))
    return Chain(
        q, steps, f"{f'{B} entries, ' if B > 1 else ''}{heads}{rows} queries, blocks of {blocks} keys"
    )


def _token_fold(S: int, P: int) -> Layout:
    return layouts.dealt(S, P, chunk=1, folded=True, name="token fold")


def _of_layout(
    rng: np.random.Generator, layout: Layout, rank: int, H: int = 1, K: int = 1, *, causal: bool = True
) -> Chain:
    """The steps of one rank of a causal ring; keys that no segment names hold NaN."""
    rows, steps = layout.length(rank), []
    for number in range(layout.P):
        origin = (rank - number) % layout.P
        ends = number in (0, layout.P - 1)
        programs, segments = tables(tiles(layout, rank, origin, causal), rows, every_row=ends)
        named = np.zeros(layout.length(origin), bool)
        for _, _, first, last in programs:
            for k_begin, _, k_end, _ in segments[first:last]:
                named[k_begin:k_end] = True
        k, v = (random(rng, 1, K, layout.length(origin), D) for _ in range(2))
        for part in (k, v):
            part[..., ~named, :] = torch.nan
        steps.append(Step(k, v, programs, segments))
    heads = f"{H} heads on {K} K/V heads, " if (H, K) != (1, 1) else ""
    return Chain(random(rng, 1, H, rows, D), steps, f"{heads}{layout!r}, rank {rank}")


def _run(
    subject: Any, chain: Chain, known: Sequence[Misconception], *, by_table: bool, record: bool = False
) -> None:
    """Go through all steps; after each compare what the state says, after the last out and lse."""
    shape = chain.q.shape
    state: Any = garbage(shape)
    for number, block in enumerate(chain.steps):
        case, result = chain.upto(number + 1), poisoned(shape)
        arrays = [torch.from_numpy(table) for table in (block.programs, block.segments)] if by_table else []
        given = (chain.q, block.k, block.v, *state, *result, *arrays)
        ends = {"first": number == 0, "last": case.ends}
        recorded = subject.record(*given, **ends) if record else None
        answer = recorded.answer if recorded else subject.call(*given, **ends)
        parts = expect_tuple(answer, (*STATE, *RESULT))
        after = expect_state(parts[:3], state, case.text)
        if case.ends:
            expect_written(*parts[3:], case.text)
        else:
            expect_same(parts[3:], result, mistakes.TOO_EARLY, case.text)
        says, names = (parts[3:], RESULT) if case.ends else (comparable(after), SAYS)
        try:
            compare(says, case, case.bound(), names, known)
        except Failure as failure:
            if any(np.isnan(np.asarray(part)).any() for part in says):
                _explain_nan(recorded or subject.record(*given, **ends), state, block, case, number, by_table)
            if failure.misconception is None and not case.ends and rounded(after, case):
                raise mistakes.ROUNDED_BETWEEN_STEPS.failure(failure.counterexample) from None
            raise
        if case.ends:
            expect_same(after, state, mistakes.LAST_WRITES_STATE, case.text)
        if recorded:
            expect_one_launch(recorded, case.text)
            if by_table:
                expect_named_keys_only(recorded, block, case.text, mistakes.HIDDEN_TILES)
            expect_read_once(recorded, ("K", "V", "ACC"), case.text)
        state = after


def _explain_nan(
    recorded: Recorded, state: Any, block: Step, case: Chain, number: int, by_table: bool
) -> None:
    """Raise a Failure where the kernels' own loads and stores say where a NaN came from."""
    if number == 0:
        expect_state_not_read(recorded, case.text)
        if not case.ends:
            expect_state_written(recorded, state, case.text)
    if by_table:
        expect_named_keys_only(recorded, block, case.text, mistakes.READS_UNNAMED)


def _step(subject: Any, chain: Chain) -> None:
    _run(subject, chain, mistakes.STEP, by_table=False)


def _table(subject: Any, chain: Chain) -> None:
    _run(subject, chain, mistakes.TABLE, by_table=True)


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    for rows, keys in ((16, (16,)), (16, (16, 16)), (32, (32, 32, 32))):
        _step(subject, _chain(rng, rows, keys))


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    for rows, keys in ((3, (17, 5)), (16, (1,)), (20, (21, 16, 37))):
        _step(subject, _chain(rng, rows, keys))


def _check_grouped(subject: Any, rng: np.random.Generator) -> None:
    for H, K, B in ((2, 1, 1), (4, 2, 1), (4, 2, 2)):
        _step(subject, _chain(rng, 16, (16, 20), H, K, B))


def _check_empty(subject: Any, rng: np.random.Generator) -> None:
    for keys in ((0,), (0, 16), (16, 0, 0)):
        _step(subject, _chain(rng, 20, keys))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    _step(subject, _chain(rng, 16, (16, 24), size=300.0))


def _check_state(subject: Any, rng: np.random.Generator) -> None:
    """All keys are equal, so all weights are 1 and the sums exact in float32; OUT is float32."""
    q, k = random(rng, 1, 1, 1, D).bfloat16(), random(rng, 1, 1, 1, D).bfloat16()
    q = q.expand(1, 1, 16, D).contiguous()
    keys = k.expand(1, 1, 37, D).contiguous()
    steps = [Step(keys, random(rng, 1, 1, 37, D).bfloat16(), *whole_block(16, 37)) for _ in range(7)]
    _step(subject, Chain(q, steps, "7 blocks of 37 bfloat16 keys, all equal"))


def _check_once(subject: Any, rng: np.random.Generator) -> None:
    _run(subject, _chain(rng, 20, (20, 16), 2, 1, 2), mistakes.STEP, by_table=False, record=True)


def _check_reads(subject: Any, rng: np.random.Generator) -> None:
    for layout, rank in ((layouts.contiguous(40, 1), 0), (layouts.zigzag(72, 2), 1)):
        _run(subject, _of_layout(rng, layout, rank, 2), mistakes.TABLE, by_table=True, record=True)


def _check_contiguous(subject: Any, rng: np.random.Generator) -> None:
    for S, P in ((16, 1), (32, 1), (32, 2), (40, 2)):
        for rank in range(P):
            _table(subject, _of_layout(rng, layouts.contiguous(S, P), rank))


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    folded = [_token_fold(48, 3), _token_fold(128, 2)]  # the last one has whole tiles behind masked ones
    for layout in (layouts.striped(32, 2), layouts.zigzag(64, 2), layouts.zigzag(48, 3), *folded):
        for rank in range(layout.P):
            _table(subject, _of_layout(rng, layout, rank))


def _check_ragged_table(subject: Any, rng: np.random.Generator) -> None:
    folded = [_token_fold(45, 3), _token_fold(125, 2)]
    for layout in (layouts.zigzag(41, 3), layouts.striped(37, 2), *folded, layouts.contiguous(33, 3)):
        for rank in range(layout.P):
            _table(subject, _of_layout(rng, layout, rank))


def _check_heads(subject: Any, rng: np.random.Generator) -> None:
    for H, K in ((2, 1), (4, 2)):
        _table(subject, _of_layout(rng, layouts.zigzag(40, 2), 1, H, K))


def _check_without_mask(subject: Any, rng: np.random.Generator) -> None:
    _table(subject, _of_layout(rng, layouts.contiguous(40, 2), 1, causal=False))


TABLE_HINTS = (
    "Which of the 16 rows does program p own, and which does its neighbour? Which number is i in j ≤ i + shift?",
    "Read row_start and row_stop from PROGRAMS, the rest is your step_kernel. In the loop over segments the first part is "
    "your visit; the second is visit with one more condition, and rows are those of the shard.",
    r"$\mathrm{visible}_{ij} = [\,j < k_{\mathrm{end}}\,] \wedge [\,j \le i + \mathrm{shift}\,]$, "
    r"$\;i = \mathrm{row\_start} + 0, 1, \dots$",
)

STEP = Stage(
    id="12.step",
    function="ring_step",
    title="Block and merge in one launch",
    kind="kernel",
    helpers=("one_tile", "begin", "finish"),
    hints=(
        "What has to be done so that two blocks of keys look to a row like one long block?",
        "Index first: a program's head h of B · H owns rows h · Lq + …, and its K/V head begins at row (h // group) · Lk. Then "
        "begin, load q, visit the keys from 0 to Lk, finish. In visit the last tile is short: mask the loads and the scores.",
        r"$\mathrm{at} = h L_q + i$, $\;\mathrm{base} = \lfloor h/g \rfloor L_k$, $\;\mathrm{visible}_{ij} = [\,j < \mathrm{stop}\,]$",
    ),
    misconceptions=mistakes.STEP,
    checks=(
        Check("values", 3, "visible", "one to three steps", _check_values),
        Check("ragged", 2, "visible", "queries and keys that fill no tile", _check_ragged),
        Check("grouped", 1, "visible", "fewer K/V heads than query heads", _check_grouped),
        Check(
            "once", 1, "visible", "one launch, and every key read once by a program", _check_once, kind="cost"
        ),
        Check("empty", 1, "stress", "blocks without a key", _check_empty),
        Check("large", 1, "stress", "scores in the hundreds", _check_large),
        Check("state", 1, "held-out", "bfloat16 blocks, float32 state", _check_state),
    ),
)

TABLE = Stage(
    id="12.table",
    function="table_step",
    title="Tiles by the table",
    kind="kernel",
    helpers=("one_tile", "begin", "finish", "visit"),
    hints=TABLE_HINTS,
    misconceptions=mistakes.TABLE,
    checks=(
        Check("contiguous", 2, "visible", "causal, rank r owns the r-th stretch", _check_contiguous),
        Check(
            "layouts", 3, "visible", "striped, zig-zag and token fold, two and three ranks", _check_layouts
        ),
        Check("ragged", 2, "stress", "lengths that fill no tile", _check_ragged_table),
        Check(
            "reads",
            2,
            "visible",
            "a program reads the keys of its own segments, once",
            _check_reads,
            kind="cost",
        ),
        Check("heads", 1, "stress", "grouped heads in a zig-zag", _check_heads),
        Check("without_mask", 1, "held-out", "no causal mask", _check_without_mask),
    ),
)
