"""Checks of 10.diagnose: the fault behind error curves. The curves are measured anew for each seed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import misconceptions_of, mistakes_of
from ringlab_course.figures import error_curves
from ringlab_course.figures.error_curves import FAULTS

if TYPE_CHECKING:
    from ringlab_course.checking.subject import Subject

mistake = mistakes_of("10.diagnose")

Curves = dict[str, np.ndarray]


@dataclass(frozen=True)
class Patient:
    """Error curves, and the fault of the program that they were measured on."""

    fault: str
    ranks: tuple[int, ...]
    curves: Curves


MIXED_UP = (
    ("sound", "bf16 out"),
    ("sound", "arrival order"),
    ("bf16 out", "bf16 lse"),
    ("bf16 accumulator", "bf16 out"),
    ("fp16 overflow", "no rescale"),
    ("bf16 q", "sound"),
)
"""Pairs (fault, answer) that have a mistake of their own, `FAULT_called_ANSWER`.

Other wrong answers are the mistake `missed_FAULT`.
"""


def _slug(words: str) -> str:
    return words.replace(" ", "_")


def _lasting(curves: Curves) -> float:
    """Return the largest factor by which the error on plain inputs rises or falls from its first value."""
    ratios = curves["plain"] / curves["plain"][0]
    return float(max(ratios.max(), 1 / ratios.min()))


CLEAR: dict[str, Callable[[Curves], bool]] = {
    "sound": lambda c: _lasting(c) <= 1.2 and max(c["large"]) <= 1.8e-3,
    "bf16 q": lambda c: _lasting(c) <= 1.2 and min(c["large"]) >= 3e-3 and min(c["plain"]) >= 2e-3,
    "bf16 accumulator": lambda c: c["plain"][-1] <= 0.5 * c["plain"][0],
    "bf16 out": lambda c: c["plain"][-1] >= 2.5 * c["plain"][0] and max(c["plain"]) <= 8e-3,
    "bf16 lse": lambda c: c["plain"][-1] >= 2.5 * c["plain"][0] and c["plain"][-1] >= 1.2e-2,
    "fp16 overflow": lambda c: bool(np.isinf(c["large"]).any()),
    "no rescale": lambda c: max(c["sloped"]) >= 0.5,
    "arrival order": lambda c: _lasting(c) <= 1.2 and max(c["repeat"]) > 0,
}
"""For each fault, whether curves show it clearly. Other curves are drawn anew, so that no grade depends on luck."""


def check_merges(subject: Subject, rng: np.random.Generator) -> None:
    """Try programs that are sound, and programs that round between the blocks."""
    _examine(subject, _patients(rng, ("sound", "bf16 lse", "bf16 out"), error_curves.RANKS, 2))


def check_blocks(subject: Subject, rng: np.random.Generator) -> None:
    """Try programs that round inside the blocks, or before them."""
    for ranks in (error_curves.RANKS, (1, 2, 6, 24)):
        _examine(subject, _patients(rng, ("bf16 accumulator", "bf16 q", "sound"), ranks, 1, (10, 18)))


def check_no_rounding(subject: Subject, rng: np.random.Generator) -> None:
    """Try programs with faults other than rounding."""
    _examine(subject, _patients(rng, ("no rescale", "fp16 overflow", "arrival order"), error_curves.RANKS, 2))


def check_ranks(subject: Subject, rng: np.random.Generator) -> None:
    """Try curves that were measured at other numbers of blocks."""
    for ranks in ((1, 3, 9, 27), (1, 2, 4, 8, 16)):
        patients = _patients(rng, tuple(FAULTS), ranks, 1)
        try:
            _examine(subject, patients)
        except Failure as failure:
            if type(failure) is Failure:
                raise
            raise mistake("positions_not_ranks").failure(f"P = {ranks}: {failure.message}") from None


def check_any(subject: Subject, rng: np.random.Generator) -> None:
    """Try other lengths, head dims and inputs, with every fault twice."""
    _examine(subject, _patients(rng, tuple(FAULTS), (1, 2, 5, 12, 30), 2))


def _patients(
    rng: np.random.Generator,
    faults: Sequence[str],
    ranks: tuple[int, ...],
    times: int,
    gains: tuple[float, float] = (10, 14),
) -> list[Patient]:
    """Return `times` patients with each of these faults, in random order."""
    found = [_patient(rng, fault, ranks, gains) for fault in faults for _ in range(times)]
    rng.shuffle(found)
    return found


def _patient(
    rng: np.random.Generator, fault: str, ranks: tuple[int, ...], gains: tuple[float, float]
) -> Patient:
    while True:
        seed, S, D = int(rng.integers(2**31)), int(rng.choice([640, 768, 1024])), int(rng.choice([32, 64]))
        curves = _curves(fault, ranks, seed, S, D, float(rng.uniform(*gains)), float(rng.uniform(10, 14)))
        if CLEAR[fault](curves):
            return Patient(fault, ranks, curves)


@functools.lru_cache(maxsize=256)  # all learners of a class get the same curves
def _curves(
    fault: str, ranks: tuple[int, ...], seed: int, S: int, D: int, gain: float, slope: float
) -> Curves:
    return error_curves.curves(fault, ranks, seed=seed, rows=64, S=S, D=D, gain=gain, slope=slope)


def _examine(subject: Subject, patients: list[Patient]) -> None:
    answers = [_answer(subject, p.ranks, p.curves) for p in patients]
    wrong = [(p, answer) for p, answer in zip(patients, answers, strict=True) if answer != p.fault]
    if not wrong:
        return
    patient, answer = min(wrong, key=lambda pair: list(FAULTS).index(pair[0].fault))
    example = f"answered {answer!r}, measured on {patient.fault!r}\n{_table(patient)}"
    strange = next((a for a in answers if a not in FAULTS), None)
    if strange is not None:
        raise mistake("no_such_name").failure(f"answered {strange!r}, not one of {', '.join(FAULTS)}")
    every = _everyone(patient.ranks)
    if len({*answers, *(_answer(subject, p.ranks, p.curves) for p in every)}) == 1:
        raise mistake("always_the_same").failure(example)
    for name, edit in (("one_point", _only_last), ("plain_only", _only_plain)):
        if _blind(subject, every, edit):
            raise mistake(name).failure(example)
    pair = patient.fault, answer
    raise mistake(_slug(f"{pair[0]} called {pair[1]}" if pair in MIXED_UP else f"missed {pair[0]}")).failure(
        example
    )


@functools.cache
def _everyone(ranks: tuple[int, ...]) -> tuple[Patient, ...]:
    """Return one patient with each fault, always the same ones; they serve only to tell mistakes apart."""
    return tuple(_patients(np.random.default_rng(0), tuple(FAULTS), ranks, 1))


def _blind(subject: Subject, patients: Sequence[Patient], edit: Callable[[Curves], Curves]) -> bool:
    """Return whether all of the learner's answers stay the same if `edit` takes information out of the curves."""
    try:
        return all(
            _answer(subject, p.ranks, p.curves) == _answer(subject, p.ranks, edit(p.curves)) for p in patients
        )
    except Failure:
        return False


def _only_plain(curves: Curves) -> Curves:
    return {name: curves["repeat" if name == "repeat" else "plain"].copy() for name in curves}


def _only_last(curves: Curves) -> Curves:
    return {name: np.full_like(values, values[-1]) for name, values in curves.items()}


def _answer(subject: Subject, ranks: tuple[int, ...], curves: Curves) -> str:
    """Return the learner's diagnosis. Raises: Failure unless it is a str."""
    answer = subject.call(ranks, curves)
    if answer is None:
        raise Failure("`diagnose` returned None. Does every path through it end in a `return`?")
    if not isinstance(answer, str):
        raise Failure(
            f"`diagnose` should return the name of a bug, a str. It returned {type(answer).__name__}."
        )
    return answer


def _table(patient: Patient) -> str:
    lines = ["ranks   " + " ".join(f"{P:8}" for P in patient.ranks)]
    lines += [f"{name:8}" + " ".join(f"{x:8.1e}" for x in values) for name, values in patient.curves.items()]
    return "\n".join(lines)


STAGE = Stage(
    id="10.diagnose",
    function="diagnose",
    title="Name the precision bug from error curves",
    hints=(
        "With one block there is nothing to merge. Where is a fault that shows there already? And one that shows only from two blocks on?",
        "Ask in this order: Is something not finite? Do two runs differ? Is something off by tens of percent? Otherwise it is rounding. "
        "Does the error grow with P, fall or stay? And is it as low as one rounding, on large scores too?",
        "$\\varepsilon_P / \\varepsilon_1$ on plain inputs: about 1 flat, below 1 inside the block, above 1 between blocks; out grows like "
        "$\\sqrt{P/2}$ times one rounding, lse by a factor of three more",
    ),
    misconceptions=misconceptions_of("10.diagnose"),
    checks=(
        Check("merges", 2, "visible", "sound, or rounded between blocks", check_merges),
        Check("blocks", 2, "visible", "rounded inside the blocks, or before", check_blocks),
        Check("other", 2, "visible", "faults other than rounding", check_no_rounding),
        Check("ranks", 1, "stress", "measured at other P", check_ranks),
        Check("any", 2, "held-out", "fresh curves of every fault", check_any),
    ),
)  # fmt: skip
