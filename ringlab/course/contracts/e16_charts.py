"""Checks of 16.chart: what a chart says is tried on the patient; only the name of the fault is looked up.

The patients are ringlab's own programs and run here, in the judge: a submission only says what it found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ringlab.course.clinic import suite
from ringlab.course.clinic.examine import DTYPES, WARD_LAYOUTS, Case, examine
from ringlab.course.clinic.patients import FAULTS, PATIENTS, TO_MEND
from ringlab.course.contract import Check, Failure, Misconception, Stage
from ringlab.errors import CourseError

FIELDS = ("fault", "check", "case", "matters")
CHANGES: dict[str, tuple[Any, ...]] = {"layout": WARD_LAYOUTS, "causal": (True, False), "dtype": DTYPES}
"""What of a case may be changed while ranks and tokens stay."""
KEY = {
    "ash": "blind rows",
    "birch": "lost sum",
    "cedar": "masks by rank",
    "elm": "one hop too many",
    "fir": "keys as values",
    "hazel": "couriers backwards",
    "larch": "shared memory",
    "oak": "first block",
}
CLUES = {
    "ash": "some rows are NaN and none is merely wrong. Which arithmetic gives NaN, and from what?",
    "birch": "lse is right to the last digit and out is not. So which of the two sums of the softmax is right?",
    "cedar": "nothing is NaN and contiguous shards are well. What do ranks and positions have in common there, and only there?",
    "elm": "every value is right. Only a meter shows anything: how much more is sent than needed, for each number of ranks?",
    "fir": "look at the errors by rank, on two ranks without a mask: who is right, and what did the other one receive?",
    "hazel": "dQ is right, dK and dV are well on two ranks and ill on three. What is the same on two ranks and not on three?",
    "larch": "the very same program is well in bfloat16. What does a conversion do that has nothing to convert?",
    "oak": "all three gradients are ill as soon as there is a second block. What would dQ be if the second block were the first?",
}
"""What in the evidence speaks against another fault; not what the fault is."""

MISTAKES = (
    Misconception(
        "shows_nothing", "The case does not show the illness: the patient is well on it. Examine it there."
    ),
    Misconception("not_the_smallest", "The case is ill, but a smaller one with the same layout, mask and dtype is too."),
    Misconception(
        "matters_too_much", "The chart says of something that it matters, and yet the patient stays ill, whatever else one puts there."
    ),
    Misconception("matters_missed", "The patient gets well if something is changed that the chart says does not matter."),
    Misconception(
        "not_found_by_it", "The check that is named does not find this patient: it holds, or it does not apply."
    ),
    Misconception("no_such_fault", "The fault is none of those in FAULTS: copy its name from there."),
    Misconception("no_such_check", "The check is none of those in CHECKS: copy its name from there."),
    Misconception("no_case", "The case is none: `case` has ranks and tokens, and layout, causal and dtype where they are not the usual ones."),
    *(Misconception(f"{name}_is_ill_of_something_else", f"{name}: {clue}") for name, clue in CLUES.items()),
)  # fmt: skip
_NAMED = {mistake.name: mistake for mistake in MISTAKES}


@dataclasses.dataclass(frozen=True)
class Chart:
    """What a learner wrote down about one patient."""

    fault: str
    check: str
    case: Case
    matters: tuple[str, ...]


@lru_cache(maxsize=4096)
def well(name: str, case: Case) -> bool:
    """Return whether the patient is well on this case."""
    return examine(PATIENTS[name], case).well


def read(name: str, answer: Any) -> Chart:
    """Return the chart that `answer` is. Raises: Failure with what is missing or unknown in it."""
    if answer is None:
        raise Failure(f"The chart of {name} is None: not written yet, or is the `return` missing?")
    if not isinstance(answer, Mapping) or any(key not in answer for key in FIELDS):
        raise Failure(f"A chart is a dict with {', '.join(FIELDS)}.", f"{name}: {_short(answer)}")
    fault, check, matters = answer["fault"], answer["check"], answer["matters"]
    if fault not in FAULTS:
        raise _NAMED["no_such_fault"].failure(f"{name}: {_short(fault)}")
    if check not in suite.CHECKS:
        raise _NAMED["no_such_check"].failure(f"{name}: {_short(check)}")
    if (
        isinstance(matters, str)
        or not isinstance(matters, (Sequence, set))
        or not set(matters) <= set(CHANGES)
    ):
        raise Failure(f"`matters` is a list of some of {', '.join(CHANGES)}, or of none.", f"{name}: {_short(matters)}")  # fmt: skip
    try:
        case = Case(**answer["case"])
    except (TypeError, CourseError) as error:
        raise _NAMED["no_case"].failure(f"{name}: {_short(answer['case'])}\n{error}") from None
    return Chart(fault, check, case, tuple(matters))


def expect_ill(name: str, case: Case) -> None:
    """Return if the patient is ill on the case. Raises: Failure."""
    if well(name, case):
        raise _NAMED["shows_nothing"].failure(f"{name} is well on {case}")


def expect_smallest(name: str, case: Case) -> None:
    """Return if with fewer ranks or tokens, and no more of the other, the patient is well. Raises: Failure."""
    sizes = [(r, t) for r in range(1, case.ranks + 1) for t in range(1, case.tokens + 1)]
    for ranks, tokens in sorted(sizes, key=lambda size: size[0] * size[1])[:-1]:
        smaller = dataclasses.replace(case, ranks=ranks, tokens=tokens)
        if not well(name, smaller):
            raise _NAMED["not_the_smallest"].failure(
                f"{name} is ill on {case}, and on a case of fewer ranks or tokens"
            )


def curing(name: str, case: Case) -> set[str]:
    """Return what of the case, changed alone, makes the patient well."""
    others = {
        what: [dataclasses.replace(case, **{what: value}) for value in values]
        for what, values in CHANGES.items()
    }
    return {what for what, cases in others.items() if any(well(name, each) for each in cases)}


def expect_matters(name: str, case: Case, matters: Sequence[str]) -> None:
    """Return if `matters` is what makes the patient well if changed. Raises: Failure."""
    right = curing(name, case)
    if more := set(matters) - right:
        raise _NAMED["matters_too_much"].failure(f"{name} on {case}: {', '.join(sorted(more))}")
    if missed := right - set(matters):
        raise _NAMED["matters_missed"].failure(f"{name} on {case}: {len(missed)} not named")


def _examined(name: str) -> Callable[[Any, np.random.Generator], None]:
    def run(subject: Any, rng: np.random.Generator) -> None:
        chart = read(name, subject.call(name))
        expect_ill(name, chart.case)
        expect_smallest(name, chart.case)
        expect_matters(name, chart.case, chart.matters)
        if not suite.finds(name, chart.check):
            raise _NAMED["not_found_by_it"].failure(f"{name}: {chart.check}")

    return run


def _faults(names: Sequence[str]) -> Callable[[Any, np.random.Generator], None]:
    def run(subject: Any, rng: np.random.Generator) -> None:
        wrong = [name for name in names if read(name, subject.call(name)).fault != KEY[name]]
        if wrong:
            count = f"{len(names) - len(wrong)} of {len(names)} faults are right"
            raise _NAMED[f"{wrong[0]}_is_ill_of_something_else"].failure(count)

    return run


def _short(value: Any) -> str:
    return f"{value!r:.120}"


_ILL = {
    "ash": ("shows_nothing",),
    "birch": ("not_the_smallest",),
    "cedar": ("matters_missed",),
    "elm": ("not_found_by_it",),
    "fir": ("matters_too_much",),
    "hazel": ("no_such_fault",),
    "larch": ("no_such_check",),
    "oak": ("no_case",),
}
"""By patient: a mistake that a wrong submission makes in its chart."""
_FORWARD, _BACKWARD = ([n for n in TO_MEND if PATIENTS[n].is_forward is kind] for kind in (True, False))

STAGE = Stage(
    id="16.chart",
    function="chart",
    title="A chart for each patient",
    hints=(
        "On which cases is the patient well? The line between well and ill runs along what is wrong: what is the same on one side of it, and not on the other?",
        "Start from an ill case and shrink: first ranks, then tokens, until any further step makes it well. From there change one thing at a time: layout, mask, dtype. "
        "Then look at what is ill: which results, on which ranks, NaN or wrong, by how much; and at the bytes. Last, match: which line of FAULTS would do just that, and nothing else?",
        r"ill$(r, t)$ and well$(r', t')$ for all $r' \le r,\ t' \le t,\ (r', t') \ne (r, t)$; a thing matters if one other value of it makes $(r, t)$ well",
    ),
    misconceptions=MISTAKES,
    checks=(
        *(
            Check(name, 2, "visible", f"{name}: an ill case, the smallest, what matters, a check that finds it", _examined(name), _ILL[name])
            for name in TO_MEND
        ),
        Check("forward_faults", 5, "held-out", "what ails the forwards", _faults(_FORWARD), ("ash_is_ill_of_something_else",)),
        Check("backward_faults", 3, "held-out", "what ails the backwards", _faults(_BACKWARD), ("oak_is_ill_of_something_else",)),
    ),
)  # fmt: skip
