"""Checks of 12.step and 12.table: whole steps in one launch, with all keys visible and with launch tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ringlab import layout as layouts
from ringlab.layout import Layout
from ringlab_course.checking.answers import expect_tuple
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.emulated import Emulated, compare_emulated, is_wrong
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.exercises.e12_triton_ring_step import mistakes
from ringlab_course.exercises.e12_triton_ring_step.cases import (
    RESULT_NAMES,
    SAYS,
    STATE_NAMES,
    Chain,
    answered,
    block,
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
from ringlab_course.exercises.e12_triton_ring_step.emulate import (
    KEYS,
    NOTHING,
    RESULT,
    ROWS,
    STATE,
    Step,
    comparable,
    tables,
    whole_block,
)

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Recorded

D = 16


def _chain(
    rng: np.random.Generator, rows: int, keys: Sequence[int], H: int = 1, K: int = 1, B: int = 1, *, size=1.0
) -> Chain:
    """Return a chain of steps whose blocks are visible as a whole."""
    q = random(rng, B, H, rows, D, size=size)
    steps = [Step(*block(rng, B, K, n, D), *whole_block(rows, n)) for n in keys]
    heads = f"{H} heads on {K} K/V heads, " if (H, K) != (1, 1) else ""
    blocks = ", ".join(map(str, keys))
    return Chain(
        q, steps, f"{f'{B} entries, ' if B > 1 else ''}{heads}{rows} queries, blocks of {blocks} keys"
    )


def _resuming(rng: np.random.Generator, rows: int, seen: int, keys: Sequence[int]) -> Chain:
    """Return a chain that begins from the result over `seen` keys."""
    whole = _chain(rng, rows, (seen, *keys))
    out, lse = Chain(whole.q, whole.steps[:1], "").answer()
    start = tuple(part.astype(np.float32).astype(np.float64) for part in (out, lse))
    text = (
        f"{rows} queries, from OUT and LSE over {seen} keys, then blocks of {', '.join(map(str, keys))} keys"
    )
    return Chain(whole.q, whole.steps[1:], text, start=start)


def _token_fold(S: int, P: int) -> Layout:
    return layouts.dealt(S, P, chunk=1, folded=True, name="token fold")


def _of_layout(
    rng: np.random.Generator,
    layout: Layout,
    rank: int,
    H: int = 1,
    K: int = 1,
    *,
    causal: bool = True,
    window: int | None = None,
) -> Chain:
    """Return the chain of one rank of a ring. The scales of keys that no segment names are NaN."""
    rows, steps = layout.length(rank), []
    for number in range(layout.P):
        origin = (rank - number) % layout.P
        ends = number in (0, layout.P - 1)
        programs, segments = tables(layout, rank, origin, causal, window, every_row=ends)
        named = np.zeros(layout.length(origin), bool)
        for _, _, first, last in programs:
            for k_begin, _, _, k_end, _, _ in segments[first:last]:
                named[k_begin:k_end] = True
        k, ks, v, vs = block(rng, 1, K, layout.length(origin), D)
        for scales in (ks, vs):
            scales[..., ~named] = torch.nan
        steps.append(Step(k, ks, v, vs, programs, segments))
    heads = f"{H} heads on {K} K/V heads, " if (H, K) != (1, 1) else ""
    seen = f", a window of {window}" if window else ""
    return Chain(random(rng, 1, H, rows, D), steps, f"{heads}{layout!r}{seen}, rank {rank}")


def _run(subject: Any, chain: Chain, *, by_table: bool, record: bool = False) -> Iterator[Emulated]:
    """Run all steps.

    Yield (acc / total, m + log2 total) after each step, and (out, lse) after the last step.
    """
    shape = chain.q.shape
    state: Any = garbage(shape)
    for number, each in enumerate(chain.steps):
        case, result = chain.upto(number + 1), poisoned(shape)
        start = STATE if number else RESULT if chain.start else NOTHING
        if start == RESULT and chain.start:
            out, lse = (torch.from_numpy(part.astype(np.float32)) for part in chain.start)
            result = out, lse
        arrays = [torch.from_numpy(table) for table in (each.programs, each.segments)] if by_table else []
        result = result[0].clone(), result[1].clone()
        given = (chain.q, *each[:4], *state, *result, *arrays)
        ends = {"start": start, "last": case.ends}
        recorded = subject.record(*given, **ends) if record else None
        answer = recorded.answer if recorded else subject.call(*given, **ends)
        parts = expect_tuple(answer, (*STATE_NAMES, *RESULT_NAMES))
        after = expect_state(parts[:3], state, case.text)
        if case.ends:
            expect_written(*parts[3:], case.text)
            if start == RESULT and any(map(_equal, parts[3:], result)):
                raise mistakes.UNCHANGED.failure(case.text)
        else:
            expect_same(parts[3:], result, mistakes.TOO_EARLY, case.text)
        says, names = (parts[3:], RESULT_NAMES) if case.ends else (comparable(after), SAYS)
        if any(np.isnan(np.asarray(part)).any() for part in says):
            _explain_nan(recorded or subject.record(*given, **ends), state, each, case, start, by_table)
        found = answered(says, case, case.bound(), names)
        if not case.ends and is_wrong(found) and rounded(after, case):
            raise mistakes.ROUNDED_BETWEEN_STEPS.failure(case.text)
        yield found
        if case.ends:
            expect_same(after, state, mistakes.LAST_WRITES_STATE, case.text)
        if recorded:
            expect_one_launch(recorded, case.text)
            if by_table:
                expect_named_keys_only(recorded, each, case.text, mistakes.HIDDEN_TILES)
            expect_read_once(recorded, ("K", "KS", "V", "VS", "ACC"), case.text)
        state = after


def _explain_nan(recorded: Recorded, state: Any, each: Step, case: Chain, start: int, by_table: bool) -> None:
    """Raise Failure if the recorded loads and stores show the origin of a NaN."""
    if start != STATE:
        expect_state_not_read(recorded, case.text)
        if not case.ends:
            expect_state_written(recorded, state, case.text)
    if by_table:
        expect_named_keys_only(recorded, each, case.text, mistakes.READS_UNNAMED)


def _equal(after: Any, before: torch.Tensor) -> bool:
    return np.array_equal(np.asarray(after), before.numpy())


def _step(subject: Any, *chains: Chain, record: bool = False) -> None:
    found = (each for chain in chains for each in _run(subject, chain, by_table=False, record=record))
    compare_emulated(found, mistakes.STEP)


def _table(subject: Any, *chains: Chain, record: bool = False) -> None:
    found = (each for chain in chains for each in _run(subject, chain, by_table=True, record=record))
    try:
        compare_emulated(found, mistakes.TABLE)
    except Failure as failure:
        if failure.misconception is None and _reads_four_columns(subject):
            raise mistakes.FOUR_COLUMNS.failure(failure.counterexample) from None
        raise


def _reads_four_columns(subject: Any) -> bool:
    """Return whether the kernel reads segments as if they were rows of four numbers instead of six.

    On these keys and tables, such a kernel reads no memory outside of its arguments.
    """
    rng = np.random.default_rng(0)
    keys, own = block(rng, 1, 1, 3 * KEYS, D), np.array([(0, ROWS, 0, 2)], np.int32)
    band, seen = (KEYS, KEYS), [(0, 0, KEYS, KEYS), (2 * KEYS, 2 * KEYS, 3 * KEYS, 3 * KEYS)]
    segments = np.array([(*part, *band) for part in seen], np.int32)
    taken = np.array([segments.flatten()[at : at + 6] for at in (0, 4)], np.int32)
    q = random(rng, 1, 1, ROWS, D)
    chain, wrong = (Chain(q, [Step(*keys, own, each)], "") for each in (segments, taken))
    try:
        (found,) = _run(subject, chain, by_table=True)
    except Failure:
        return False
    return is_wrong(found) and not is_wrong(replace(found, truth=wrong.answer()))


def _check_values(subject: Any, rng: np.random.Generator) -> None:
    cases = (32, (16,)), (32, (16, 16)), (64, (32, 16, 32))
    _step(subject, *(_chain(rng, rows, keys) for rows, keys in cases))


def _check_resumed(subject: Any, rng: np.random.Generator) -> None:
    _step(subject, _resuming(rng, 32, 16, (16,)), _resuming(rng, 20, 5, (7, 18)))


def _check_ragged(subject: Any, rng: np.random.Generator) -> None:
    cases = (3, (17, 5)), (16, (1,)), (36, (21, 16, 37))
    _step(subject, *(_chain(rng, rows, keys) for rows, keys in cases))


def _check_grouped(subject: Any, rng: np.random.Generator) -> None:
    """Check answers on grouped heads.

    Blocks have whole tiles, so a missing mask causes no read outside of K and V.
    """
    cases = [_chain(rng, 16, (16, 32), H, K, B) for H, K, B in ((4, 2, 1), (2, 1, 1), (4, 2, 2))]
    try:
        _step(subject, *cases)
    except Crashed as crash:
        if not re.search(r"a load within the memory of '[KV]S?'", crash.counterexample):
            raise
        raise mistakes.GROUP_FORGOTTEN.failure(f"{cases[0].text}\n{crash.counterexample}") from None


def _check_empty(subject: Any, rng: np.random.Generator) -> None:
    _step(subject, *(_chain(rng, 20, keys) for keys in ((0, 16), (16, 0, 0))))


def _check_large(subject: Any, rng: np.random.Generator) -> None:
    _step(subject, _chain(rng, 16, (16, 24), size=300.0))


def _check_state(subject: Any, rng: np.random.Generator) -> None:
    """Check the state for q in bfloat16.

    All weights are 1 and all scales are powers of two, so that sums are exact in float32. OUT is float32.
    """
    q = random(rng, 1, 1, 1, D).bfloat16().expand(1, 1, 16, D).contiguous()
    k = (
        torch.from_numpy(rng.integers(-127, 128, (1, 1, 1, D)).astype(np.int8))
        .expand(1, 1, 37, D)
        .contiguous()
    )
    ks, steps = torch.full((1, 1, 37), 2.0**-6), []
    for _ in range(7):
        v = torch.from_numpy(rng.integers(-127, 128, (1, 1, 37, D)).astype(np.int8))
        vs = torch.from_numpy(np.exp2(rng.integers(-8, -5, (1, 1, 37))).astype(np.float32))
        steps.append(Step(k, ks, v, vs, *whole_block(16, 37)))
    _step(subject, Chain(q, steps, "q in bfloat16, 7 blocks of 37 equal keys"))


def _check_once(subject: Any, rng: np.random.Generator) -> None:
    _step(subject, _chain(rng, 36, (20, 16), 2, 1, 2), record=True)


def _check_reads(subject: Any, rng: np.random.Generator) -> None:
    cases = (layouts.contiguous(80, 2), 1, 30), (layouts.zigzag(72, 2), 1, None)
    chains = (_of_layout(rng, layout, rank, 2, window=window) for layout, rank, window in cases)
    _table(subject, *chains, record=True)


def _on_all_ranks(rng: np.random.Generator, cases: Iterable[tuple[Layout, int | None]]) -> Iterator[Chain]:
    for layout, window in cases:
        for rank in range(layout.P):
            yield _of_layout(rng, layout, rank, window=window)


def _check_causal(subject: Any, rng: np.random.Generator) -> None:
    cases = [(layouts.contiguous(S, P), None) for S, P in ((16, 1), (64, 1), (96, 2))]
    _table(subject, *_on_all_ranks(rng, cases))


def _check_window(subject: Any, rng: np.random.Generator) -> None:
    """Check answers with sliding windows.

    The narrow windows mask every tile. In the wide windows a program has a head, whole tiles and a tail.
    """
    cases = (
        (layouts.contiguous(32, 1), 5),
        (layouts.contiguous(64, 2), 20),
        (layouts.contiguous(144, 1), 60),
        (layouts.zigzag(64, 2), 23),
        (layouts.striped(96, 2), 61),
    )
    _table(subject, *_on_all_ranks(rng, cases))


def _check_layouts(subject: Any, rng: np.random.Generator) -> None:
    cases = [(each, None) for each in (layouts.striped(64, 2), layouts.zigzag(96, 3), _token_fold(128, 2))]
    _table(subject, *_on_all_ranks(rng, cases))


def _check_ragged_table(subject: Any, rng: np.random.Generator) -> None:
    cases = (
        (layouts.zigzag(83, 3), None),
        (layouts.striped(75, 2), 17),
        (_token_fold(125, 2), None),
        (layouts.contiguous(77, 2), 41),
    )
    _table(subject, *_on_all_ranks(rng, cases))


def _check_heads(subject: Any, rng: np.random.Generator) -> None:
    heads = (2, 1), (4, 2)
    _table(subject, *(_of_layout(rng, layouts.zigzag(80, 2), 1, H, K, window=33) for H, K in heads))


def _check_without_mask(subject: Any, rng: np.random.Generator) -> None:
    _table(subject, _of_layout(rng, layouts.contiguous(40, 2), 1, causal=False))


TABLE_HINTS = (
    "Row i sees the keys from i + low to i + high. For the rows of one program, which of these keys does every row see?",
    "Read row_start and row_stop from PROGRAMS; the rest is your step_kernel. A segment has three parts: masked, whole, masked. "
    "The middle one is your visit. The other two are visit with both bounds in the mask, where rows are those of the shard.",
    r"$\mathrm{visible}_{ij} = [\,j < \mathrm{stop}\,] \wedge [\,i + \mathrm{low} \le j \le i + \mathrm{high}\,]$, "
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
        "Index first: a program's head h of B · H owns rows h · Lq + …, and its K/V head begins at row (h // group) · Lk, of "
        "the numbers and of the scales. Then begin, load q, visit the keys from 0 to Lk, finish. In visit the last tile is "
        "short: mask its loads and its scores.",
        r"$\mathrm{at} = h L_q + i$, $\;\mathrm{base} = \lfloor h/g \rfloor L_k$, $\;\mathrm{visible}_{ij} = [\,j < \mathrm{stop}\,]$",
    ),
    misconceptions=mistakes.STEP,
    checks=(
        Check("values", 2, "visible", "one to three steps", _check_values),
        Check("resumed", 1, "visible", "a first step that goes on from OUT and LSE", _check_resumed),
        Check("ragged", 2, "visible", "queries and keys that fill no tile", _check_ragged),
        Check("grouped", 1, "visible", "fewer K/V heads than query heads", _check_grouped),
        Check(
            "once", 1, "visible", "one launch, and every key read once by a program", _check_once, kind="cost"
        ),
        Check("empty", 1, "stress", "blocks without a key", _check_empty),
        Check("large", 1, "stress", "scores in the hundreds", _check_large),
        Check("state", 1, "visible", "q in bfloat16, the state still in float32", _check_state),
    ),
)

TABLE = Stage(
    id="12.table",
    function="table_step",
    title="A sliding window by the table",
    kind="kernel",
    helpers=("one_tile", "begin", "finish", "visit"),
    hints=TABLE_HINTS,
    misconceptions=mistakes.TABLE,
    checks=(
        Check("contiguous", 2, "visible", "causal, without a window", _check_causal),
        Check("window", 2, "visible", "sliding windows, on one rank and on two", _check_window),
        Check("layouts", 1, "visible", "striped, zig-zag and token fold", _check_layouts),
        Check("ragged", 2, "stress", "lengths that fill no tile", _check_ragged_table),
        Check(
            "reads",
            2,
            "visible",
            "a program reads the keys of its own segments, once",
            _check_reads,
            kind="cost",
        ),
        Check("heads", 1, "visible", "grouped heads and a window in a zig-zag", _check_heads),
        Check("without_mask", 1, "held-out", "no causal mask", _check_without_mask),
    ),
)
