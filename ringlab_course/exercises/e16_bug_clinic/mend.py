"""Checks and hints of 16.ash to 16.oak: the values and then the bytes of each mended patient.

A mend counts if the submission's chart of the patient is right, and if the mend is the patient's own program
with a few changed lines.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from ringlab.comm.protocol import Comm, Work
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.run.run import Run
from ringlab.errors import apart
from ringlab_course.checking.answers import expect_array, expect_tuple
from ringlab_course.checking.contract import Check, Misconception, Stage
from ringlab_course.checking.failures import Crashed, Failure
from ringlab_course.checking.faults import Faults
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of
from ringlab_course.clinic import bedside
from ringlab_course.clinic.case import errors_of, needed_bytes, shards_of
from ringlab_course.clinic.patients import PATIENTS, TO_MEND, Patient
from ringlab_course.exercises.e16_bug_clinic import charts as e16_charts

Results = list[tuple[torch.Tensor, ...]]
OF_ANY_PATIENT = (
    "as_it_was", "assumes_equal_lengths", "asks_everybody", "not_diagnosed", "another_program", "by_another_name",
)  # fmt: skip
NEAR = 2.5e-5
"""The relative error that results may have when they are compared with those of a known mistake.

Answers within four times this error count as alike. The order of float32 sums changes results by less than
that, and two mistakes differ by more.
"""


@cache
def mistakes(name: str) -> dict[str, Misconception]:
    """Return the mistakes in mending this patient, by name. The texts of some mistakes fit any patient."""
    any_patient = [mistakes_of("16")(each) for each in OF_ANY_PATIENT]
    told = [replace(each, message=each.message.format(patient=name)) for each in any_patient]
    own = [each for each in misconceptions_of(f"16.{name}") if each.name not in OF_ANY_PATIENT]
    return {each.name: each for each in (*own, *told)}


HINTS = {
    "ash": (
        "In the smallest case, which rows are NaN? What do just these rows see of the block that is being processed?",
        "Their maximum is −∞, and −∞ − (−∞) is NaN. Such a row must add nothing: weights of 0 and an lse of −∞. Subtract something finite instead, and take care where you divide by a sum that may be 0.",
        r"$m = \max_j s_j,\quad m' = 0$ where $m = -\infty$, else $m;\quad w_j = e^{s_j - m'},\quad \mathrm{lse} = m' + \log \sum_j w_j = -\infty$ there",
    ),
    "birch": (
        "On paper: two ranks with two tokens each, no mask, all scores 0 and all values 1. What should out be, and what is it after each block?",
        "After every block out is a mean, not a sum. Before you add to it, turn it back into a sum: multiply by the sum of weights that it was divided by. That sum, too, shrinks when the maximum rises.",
        r"$o' = \dfrac{o\,\ell\,e^{m - m'} + \sum_j w_j v_j}{\ell'},\qquad \ell' = \ell\,e^{m - m'} + \sum_j w_j$",
    ),
    "cedar": (
        "In the smallest case, write down each rank's tokens. Which query should see which key, and which one does?",
        "Rank 1 of 2, striped, has the tokens 1, 3, 5: token 1 does not see all of rank 0's. There is a helper that compares positions. A block must not be skipped because of its rank alone.",
        r"query $i$ of rank $r$ sees key $j$ of rank $o$ $\Leftrightarrow p_r[i] \ge p_o[j]$",
    ),
    "elm": (
        "Count the messages for 2, 3 and 4 ranks, and ask what each of them brings. Which one is never used?",
        "Attend P times, shift P − 1 times.",
        r"$\sum_{t=0}^{P-2}$ of the blocks of $r - t$: the block of $r + 1$ is attended to, and not sent on",
    ),
    "fir": (
        "On two ranks, in the order of time: what does each rank send, and what does each rank expect to receive?",
        "Which rank goes first may differ from rank to rank. Which tensor goes first must not: only its place in the order tells one message from another.",
        r"for every rank: $K$ before $V$, both when it sends and when it receives",
    ),
    "hazel": (
        "On paper, with three ranks, follow one block and its sums step by step. Where is the block, and where are the sums?",
        "Send the couriers the way the blocks go. Then count: where is courier r after P − 1 hops, and where does it belong?",
        r"after $t$ hops to the next rank: block $o$ and its courier on $(o + t) \bmod P$; home after $t = P$",
    ),
    "larch": (
        "Print dq after the first block, and again before anything is added to it in the second step. What has changed it?",
        "x.to(dtype) returns x itself if x has that dtype. If you write into a tensor later, no other tensor may share its memory. Give the sum memory of its own, in the dtype of lse, for any input.",
        r"$dQ = \sum_t dQ_t$, where $dQ_t$ is overwritten in every step: $dQ$ and $dQ_t$ must not share memory",
    ),
    "oak": (
        "In every step, print the first key of the block that is computed with, and of the one that is sent on. Whose are they?",
        "In step t the mask is that of origin(t). The block that you compute with must be that of origin(t), and so must the one that you send on.",
        r"step $t$: $(K, V)_{(r - t) \bmod P}$, in the scores, in $dQ$, and on its way to $r + 1$",
    ),
}
"""The hints for each patient: a question, a direction, a line of mathematics."""


ONWARD = "In this ring everything goes to the next rank: `ring.origin` relies on that."


def _plain(rng: np.random.Generator) -> list[Run]:
    """Return runs with equal shards in every layout on 1 to 4 ranks. Runs are in order of size."""
    seed = int(rng.integers(1 << 30))
    runs = [
        Run(P, P * L, layout, causal, H=1, K=1, D=4, seed=seed + P)
        for P, L, layout, causal in (
            (1, 3, "contiguous", True), (2, 2, "striped", True), (2, 3, "contiguous", False), (3, 1, "contiguous", True),
            (3, 4, "contiguous", True), (3, 4, "zigzag", True), (4, 2, "striped", True), (4, 4, "contiguous", False),
        )
    ]  # fmt: skip
    return runs


def _hard(rng: np.random.Generator) -> list[Run]:
    """Return runs with eight ranks, uneven lengths, empty ranks, other dtypes, scores of any size."""
    seed = int(rng.integers(1 << 30))
    run = partial(Run, H=2, K=2, D=8, causal=True)
    return [
        run(2, 5, "striped", seed=seed),
        run(3, 2, "contiguous", seed=seed + 1),
        run(3, 11, "zigzag", seed=seed + 2, dtype="float64"),
        run(3, 24, "striped", seed=seed + 3, values="negative"),
        run(3, 24, "contiguous", seed=seed + 4, values="rising"),
        run(4, 16, "token-fold", seed=seed + 5, dtype="bfloat16"),
        run(8, 35, "zigzag", seed=seed + 6),
        run(8, 40, "striped", seed=seed + 7, causal=False),
    ]


def _results(subject: Any, patient: Patient, run: Run, faults: Faults | None = None) -> tuple[Results, Any]:
    """Run the learner's program, check the shapes of its results, and return them and the outcome."""
    given = shards_of(run)
    shared = {"positions": given.positions, "causal": run.causal}
    try:
        outcome = subject.run_ring(run.P, *given.of(patient.returns), faults=faults, **shared)
    except Crashed as crash:
        told = f"{crash.message} {crash.counterexample}"
        if patient.name == "fir" and "(DeadlockError)" in crash.message:
            raise mistakes("fir")["all_send_first"].failure(f"{run}\n{crash.counterexample}") from None
        if len(set(given.layout.lengths)) == 1 or not re.search(r"MismatchError|size of tensor|shape", told):
            raise
        if not _right_on_equal_shards(subject, patient):
            raise  # equal lengths do not help: the program uses a wrong block
        raise mistakes(patient.name)["assumes_equal_lengths"].failure(
            f"{run}\n{crash.counterexample}"
        ) from None
    found: Results = []
    for rank, answer in enumerate(outcome.results):
        parts = expect_tuple(answer, patient.returns)
        like = given.qs[rank].shape
        for name, part in zip(patient.returns, parts, strict=True):
            expect_array(part, like[:-1] if name == "lse" else like, name=name)
        found.append(tuple(torch.as_tensor(part) for part in parts))
    return found, outcome


def _right_on_equal_shards(subject: Any, patient: Patient) -> bool:
    """Return whether three ranks with two tokens each get the right results."""
    run = Run(3, 6, "contiguous", True, H=1, K=1, D=4, seed=5)
    try:
        return _wrong(patient, run, _results(subject, patient, run)[0]) is None
    except (Crashed, Failure):
        return False


def _verify(
    subject: Any, patient: Patient, runs: Iterable[Run], faults: Callable[[], Faults | None] = lambda: None
) -> None:
    """Raise the Failure of the first wrong run.

    All runs are made, because together they distinguish mistakes.
    """
    first: Failure | None = None
    try:
        for run in runs:
            results, _ = _results(subject, patient, run, faults())
            first = first or _wrong(patient, run, results)
    except Failure:
        if first is None:
            raise
    if first is not None:
        first.allowed, first.read = [NEAR] * len(patient.returns), _wide
        raise first


def _wide(results: Sequence[Any]) -> list[Any]:
    """Return the results without the bfloat16 ones, because even a right bfloat16 result is rounded."""
    return [
        tuple(part for part in result if torch.as_tensor(part).dtype != torch.bfloat16) for result in results
    ]


def _wrong(patient: Patient, run: Run, results: Results) -> Failure | None:
    """Return the Failure that describes the wrong results, or None if all results are right."""
    found = errors_of(run, patient.returns, results)
    ill = {name: each for name, each in found.items() if not each.ok}
    if not ill:
        return None
    well = [name for name in found if name not in ill]
    blank = any(part.isnan().any() for result in results for part in result)
    told = "NaN" if blank else "wrong values"
    rest = f"; {' and '.join(well)} {'is' if len(well) == 1 else 'are'} right" if well else ""
    lines = [str(run)]
    for name, each in ill.items():
        worst = int(np.argmax([np.inf if np.isnan(error) else error for error in each.by_rank]))
        off, most = apart(each.error, each.bound, digits=1, kind="e")
        lines.append(f"{name}: relative error {off}, allowed {most}; largest on rank {worst}")
    return Failure(f"{patient.name}: {told} in {' and '.join(ill)}{rest}.", "\n".join(lines))


def _expect_diagnosed(subject: Any, name: str, *, by_name: bool) -> None:
    """Raise Failure unless the submission's own chart of the patient holds.

    by_name: whether the chart's fault, or the fault that it says was found, must be right too. That is for
    hidden checks only, because a visible check would reveal the name.
    """
    try:
        chart = e16_charts.examined(name, subject.other("chart").call(name))
    except Failure as failure:
        raise mistakes(name)["not_diagnosed"].failure(str(failure)) from None
    if by_name and e16_charts.KEY[name] not in (chart.fault, chart.found):
        raise mistakes(name)["by_another_name"].failure()


def _own_program(subject: Any, patient: Patient) -> tuple[Any, Failure | None]:
    """Return the subject to check, and the failure to raise after its values were checked, or None.

    If the mend is the patient's own program with a few changed lines, the subject contains only the texts of
    such mends, and there is no failure. If it is another program, the subject is the whole submission, and
    the failure says why this is another program.
    """
    texts = subject.texts(TO_MEND)
    told = {name: _another_program(texts.get(name, ""), PATIENTS[name]) for name in TO_MEND}
    if reason := told[patient.name]:
        return subject, mistakes(patient.name)["another_program"].failure(reason)
    return subject.alone(bedside.__name__, [name for name in TO_MEND if not told[name]]), None


def _another_program(text: str, patient: Patient) -> str:
    """Return the reason why this text is more than the patient's program with a few changed lines, or ""."""
    try:
        found, ours = _definition(text), _definition(patient.source)
    except (SyntaxError, ValueError, RecursionError, IndexError):
        return f"there is no `def {patient.name}(...)` at the top of a cell"
    if found.decorator_list:
        return "it is decorated: " + ", ".join(ast.unparse(each)[:80] for each in found.decorator_list)
    theirs, own = _lines(found), _lines(ours)
    blocks = SequenceMatcher(None, own, theirs, autojunk=False).get_matching_blocks()
    kept = sum(block.size for block in blocks)
    lost, new = len(own) - kept, len(theirs) - kept
    allowed = min(MOST_LOST, len(own) // 2)
    length = sum(map(len, theirs)) - sum(len(own[i]) for b in blocks for i in range(b.a, b.a + b.size))
    strange, grown = _strange(found, ours), _size(found) - _size(ours)
    if not (lost > allowed or new > MOST_NEW or length > MOST_NEW * LONGEST or grown > MOST_GROWN or strange):
        return ""
    told = f"{lost} of its {len(own)} lines are gone, at most {allowed}; {new} are new, at most {MOST_NEW}"
    if length > MOST_NEW * LONGEST:
        told += f"; the new ones have {length} characters, at most {MOST_NEW * LONGEST}"
    if grown > MOST_GROWN:
        told += f"; its syntax tree has {grown} nodes more, at most {MOST_GROWN}"
    if strange:
        told += f"; used, and not known to the patient: {', '.join(sorted(strange))[:200]}"
    return told


MOST_LOST, MOST_NEW = 6, 6
"""The number of lines of a patient that may be removed and added, without comments, layout and unreachable lines."""
MOST_GROWN = 75
"""The number of nodes that a patient's syntax tree may gain.

Known mends gain at most 52. A ring that is written in one line gains 143.
"""
LONGEST = 115
"""The length of a line of a patient's source. New lines may have MOST_NEW times as many characters."""
_BUILTINS = frozenset({
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "int", "isinstance", "iter", "len", "list",
    "map", "max", "min", "next", "print", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip", "Exception", "ValueError", "AssertionError",
})  # fmt: skip
"""The builtins that a mend may use.

None of them runs text as code or reaches anything that the program was not given.
"""
_MODULES = (math, torch)
_METHODS = frozenset(
    name
    for owner in (torch.Tensor, torch.Size, Ring, Comm, Work, tuple, list, dict, set, str, *_MODULES)
    for name, value in inspect.getmembers(owner)
    if not inspect.ismodule(value)
) - {"compile", "load", "save", "format", "format_map"}


def _definition(text: str) -> ast.FunctionDef:
    """Return the function that `text` defines, without docstring and annotations.

    Raises: ValueError, SyntaxError.
    """
    (node,) = ast.parse(text).body
    if not isinstance(node, ast.FunctionDef):
        raise ValueError
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    node.returns = None
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            part.annotation = None
    return node


def _lines(node: ast.FunctionDef) -> list[str]:
    """Return the reachable lines of a function's body.

    Lines after a `return` that always runs are unreachable.
    """
    for part in ast.walk(node):
        for block in (getattr(part, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                ends = (n for n, each in enumerate(block, 1) if isinstance(each, _LAST))
                del block[next(ends, len(block)) :]
    return [line.strip() for part in node.body for line in ast.unparse(part).splitlines()]


_LAST = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def _strange(theirs: ast.FunctionDef, ours: ast.FunctionDef) -> set[str]:
    """Return the names in a mend that the patient and its helpers lack, and those that no mend may use."""
    own = {*vars(bedside), *_BUILTINS, *_named(ours, ast.Name)}
    known = {name for name in own if not name.startswith("_")} | _given(theirs)
    methods = _METHODS | _named(ours, ast.Attribute)
    attributes = {
        f".{name}" for name in _named(theirs, ast.Attribute) if name.startswith("_") or name not in methods
    }
    return attributes | (_named(theirs, ast.Name) - known) | _forbidden(theirs)


def _size(node: ast.AST) -> int:
    return sum(1 for _ in ast.walk(node))


def _named(node: ast.AST, kind: type[ast.Name] | type[ast.Attribute]) -> set[str]:
    parts = [part for part in ast.walk(node) if isinstance(part, kind)]
    return {part.id if isinstance(part, ast.Name) else part.attr for part in parts}


def _given(node: ast.FunctionDef) -> set[str]:
    """Return the names that a function assigns: arguments, targets of assignments, inner functions."""
    given = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            given.add(part.id)
        elif isinstance(part, ast.arg):
            given.add(part.arg)
        elif isinstance(part, (ast.FunctionDef, ast.ExceptHandler)) and part is not node and part.name:
            given.add(part.name)
    return given


def _forbidden(node: ast.FunctionDef) -> set[str]:
    """Return the parts that may change more than the function's own names, such as imports and globals."""
    modules = {module.__name__ for module in _MODULES}
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            found |= {f"import {each.name}" for each in part.names if each.asname or each.name not in modules}
        elif isinstance(part, ast.ImportFrom):
            found.add(f"from {part.module} import")
        elif isinstance(part, ast.Lambda):
            found.add("lambda")
        elif isinstance(part, (ast.Global, ast.Nonlocal)):
            found |= {f"{type(part).__name__.lower()} {name}" for name in part.names}
        elif isinstance(part, ast.ClassDef) or (part is not node and getattr(part, "decorator_list", ())):
            found.add("a class or a decorator")
        elif isinstance(part, ast.Attribute) and not isinstance(part.ctx, ast.Load):
            found.add(f".{part.attr} =")
    return found


def _expect_wide_sums(subject: Any, patient: Patient, seed: int) -> None:
    """Raise Failure unless larch's gradients of bfloat16 inputs have the dtype of lse."""
    given = Run(2, 4, "contiguous", True, H=1, K=1, D=4, dtype="bfloat16", seed=seed)
    results, wide = _results(subject, patient, given)[0], shards_of(given).lses[0].dtype
    for name, part in zip(patient.returns, results[0], strict=True):
        if part.dtype != wide:
            told = f"{given}: {name} is {part.dtype}, lse {wide}".replace("torch.", "")
            raise mistakes(patient.name)["sums_in_the_narrow_dtype"].failure(told)


def _values(patient: Patient) -> Callable[[Any, np.random.Generator], None]:
    def run(subject: Any, rng: np.random.Generator) -> None:
        program, failure = _own_program(subject, patient)
        _verify(program, patient, _plain(rng))
        if patient.name == "larch":
            _expect_wide_sums(program, patient, int(rng.integers(1 << 30)))
        _expect_diagnosed(subject, patient.name, by_name=False)
        if failure:
            raise failure

    return run


def _any(patient: Patient) -> Callable[[Any, np.random.Generator], None]:
    def run(subject: Any, rng: np.random.Generator) -> None:
        program, failure = _own_program(subject, patient)
        _verify(program, patient, _hard(rng), lambda: Faults(seed=int(rng.integers(1 << 30)), late=0.5))
        _expect_diagnosed(subject, patient.name, by_name=True)
        if failure:
            raise failure

    return run


def _cost(patient: Patient) -> Callable[[Any, np.random.Generator], None]:
    def run(subject: Any, rng: np.random.Generator) -> None:
        subject, _ = _own_program(subject, patient)  # other programs fail in the check of values
        for P, S, layout in (
            (1, 3, "contiguous"),
            (2, 4, "contiguous"),
            (4, 16, "zigzag"),
            (3, 6, "striped"),
        ):
            given = Run(P, S, layout, True, H=2, K=2, D=4, seed=int(rng.integers(1 << 30)))
            results, outcome = _results(subject, patient, given)
            trace = outcome.trace
            most = 2 * (P - 1) if patient.is_forward else 4 * P - 2
            for rank in range(P):
                sends = [event for event in trace.exchanges(rank) if event.bytes_sent]
                sent, needed = sum(e.bytes_sent for e in sends), needed_bytes(given, patient.returns, rank)
                example = f"{given}: rank {rank} sent {sent:,} bytes in {len(sends)} messages; {needed:,} are needed, in {most} at most"
                others = {e.to for e in sends} - {(rank + 1) % P}
                if others == {(rank - 1) % P}:
                    raise Failure(f"{patient.name} sends to the previous rank. {ONWARD}", example)
                if others:
                    raise mistakes(patient.name)["asks_everybody"].failure(example)
                if sent > needed and P > 1 and _sent_before(patient.name, given, rank) == sent:
                    raise mistakes(patient.name)["as_it_was"].failure(example)
                if sent > needed or len(sends) > most:
                    raise Failure(f"{patient.name} sends more than needed.", example)
            if _wrong(patient, given, results):
                raise Failure("The values are wrong in the very run whose messages are counted.", str(given))

    return run


def _sent_before(name: str, run: Run, rank: int) -> int:
    """Return the bytes that `rank` sent before the patient was mended, or 0 if the run broke off."""
    given, patient = shards_of(run), PATIENTS[name]
    arguments = given.of(patient.returns)

    def on_rank(ring: Any) -> Any:
        own = (each[ring.rank].clone() for each in arguments)
        return patient.program(ring, *own, positions=given.positions, causal=run.causal)

    try:
        return VirtualCluster(run.P, memory=False).run(on_rank).trace.bytes_sent(rank)
    except Exception:
        return 0


def _stage(name: str) -> Stage:
    patient = PATIENTS[name]
    what = " and ".join(patient.returns) if patient.is_forward else "dQ, dK and dV"
    return Stage(
        id=f"16.{name}",
        function=name,
        title=f"{name.capitalize()}, mended",
        kind="ring",
        helpers=("chart",),
        waits=False,  # each stage needs only its own patient's chart
        hints=HINTS[name],
        misconceptions=tuple(mistakes(name).values()),
        checks=(
            Check("values", 1, "visible", f"{what} of every rank, any layout, P = 1 to 4; its chart holds; a small change of its own source", _values(patient)),
            Check("any", 2, "held-out", "8 ranks, lengths that do not divide, other dtypes, scores of any size; its chart names the fault", _any(patient)),
            Check("cost", 1, "visible", "to the next rank only, no byte more than needed", _cost(patient), kind="cost"),
        ),
    )  # fmt: skip


STAGES = tuple(_stage(name) for name in TO_MEND)
