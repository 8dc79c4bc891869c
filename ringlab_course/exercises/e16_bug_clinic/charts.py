"""Checks of 16.chart: each statement of a chart is tested on the patient, and the fault's name is compared.

The patients are ringlab's own programs and run in the judge's process. A submission only returns charts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ringlab.errors import CourseError
from ringlab_course.checking.contract import Check, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.wrong_answers import mistakes_of
from ringlab_course.clinic import suite
from ringlab_course.clinic.case import DTYPES, Case, examine
from ringlab_course.clinic.patients import FAULTS, PATIENTS, TO_MEND

mistake = mistakes_of("16.chart")

FIELDS = ("fault", "check", "case", "matters")
FORMS = (
    "`fault` and `check` are names, `case` is a dict of examine's arguments, `matters` is a list of names."
)
LAYOUTS = ("contiguous", "striped", "zigzag")
"""The layouts that the exercise names. Another registered layout changes no right answer."""
CHANGES: dict[str, tuple[Any, ...]] = {"layout": LAYOUTS, "causal": (True, False), "dtype": DTYPES}
"""The fields of a case that may change while ranks and tokens stay the same, with their values."""
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
TAKEN_FOR = (
    ("ash", "lost sum"),
    ("ash", "masks by rank"),
    ("birch", "bf16 result"),
    ("birch", "mean over ranks"),
    ("fir", "first block"),
    ("fir", "masks by rank"),
    ("fir", "sent for received"),
    ("larch", "bf16 result"),
    ("larch", "delta of the block"),
)
"""Pairs (patient, fault): a fault that the patient does not have, but that is easily taken for its own."""
MISTAKES = (
    mistake("shows_nothing"),
    mistake("not_the_smallest"),
    mistake("matters_too_much"),
    mistake("matters_missed"),
    mistake("not_found_by_it"),
    mistake("no_such_fault"),
    mistake("no_such_check"),
    mistake("no_case"),
    *(mistake(f"{name}_is_ill_of_something_else") for name in KEY),
    *(mistake(f"{name}_taken_for_{fault.replace(' ', '_')}") for name, fault in TAKEN_FOR),
)  # fmt: skip
_NAMED = {each.name: each for each in MISTAKES}


@dataclasses.dataclass(frozen=True)
class Chart:
    """A learner's chart of one patient.

    `found` is the fault that the source showed, if it is not the one in the chart.
    """

    fault: str
    check: str
    case: Case
    matters: tuple[str, ...]
    found: str = ""


@lru_cache(maxsize=4096)
def well(name: str, case: Case) -> bool:
    """Return whether the patient is well on this case."""
    return examine(PATIENTS[name], case).well


def read(name: str, answer: Any) -> Chart:
    """Return the chart in `answer`. Raises: Failure for a missing field or an unknown value."""
    try:
        return _read(name, answer)
    except (TypeError, ValueError, RecursionError):  # the answer has a list or an array in place of a name
        raise Failure(
            f"A field of the chart has the wrong form. {FORMS}", f"{name}: {_short(answer)}"
        ) from None


def _read(name: str, answer: Any) -> Chart:
    if answer is None:
        raise Failure(f"The chart of {name} is None: it is not written yet, or the `return` is missing.")
    if not isinstance(answer, Mapping) or any(key not in answer for key in FIELDS):
        raise Failure(f"A chart is a dict with {', '.join(FIELDS)}. {FORMS}", f"{name}: {_short(answer)}")
    fault, check, matters = answer["fault"], answer["check"], answer["matters"]
    found = answer.get("found") or ""
    for called in (fault, found) if found else (fault,):
        if not isinstance(called, str) or called not in FAULTS:
            raise _NAMED["no_such_fault"].failure(f"{name}: {_short(called)}")
    if not isinstance(check, str) or check not in suite.CHECKS:
        raise _NAMED["no_such_check"].failure(f"{name}: {_short(check)}")
    if (
        isinstance(matters, str)
        or not isinstance(matters, (Sequence, set))
        or not set(matters) <= set(CHANGES)
    ):
        raise Failure(f"`matters` is a list that may hold {', '.join(CHANGES)}, and nothing else.", f"{name}: {_short(matters)}")  # fmt: skip
    return Chart(fault, check, _case(name, answer["case"]), tuple(matters), found)


def _case(name: str, given: Any) -> Case:
    fields = dataclasses.fields(Case)
    known = {each.name for each in fields}
    needed = {each.name for each in fields if each.default is dataclasses.MISSING}
    told = f"{name}: {_short(given)}"
    if not isinstance(given, Mapping):
        raise _NAMED["no_case"].failure(told)
    if wrong := [f"{key!r} is unknown" for key in given if key not in known] + [
        f"{key!r} is missing" for key in sorted(needed - set(given))
    ]:
        raise _NAMED["no_case"].failure(f"{told}: {', '.join(wrong)}")
    try:
        return Case(**given)
    except CourseError as error:
        raise _NAMED["no_case"].failure(f"{told}\n{error}") from None


def expect_ill(name: str, case: Case) -> None:
    """Raise Failure if the patient is well on the case."""
    if well(name, case):
        raise _NAMED["shows_nothing"].failure(f"{name} is well on {case}")


def expect_smallest(name: str, case: Case) -> None:
    """Raise Failure if the patient is ill on another case that has no more ranks and no more tokens."""
    sizes = [(r, t) for r in range(1, case.ranks + 1) for t in range(1, case.tokens + 1)]
    for ranks, tokens in sorted(sizes, key=lambda size: size[0] * size[1])[:-1]:
        smaller = dataclasses.replace(case, ranks=ranks, tokens=tokens)
        if not well(name, smaller):
            raise _NAMED["not_the_smallest"].failure(
                f"{name} is ill on {case}, and on a case of fewer ranks or tokens"
            )


def curing(name: str, case: Case) -> set[str]:
    """Return each field of the case for which a change of this field alone makes the patient well."""
    others = {
        what: [dataclasses.replace(case, **{what: value}) for value in values]
        for what, values in CHANGES.items()
    }
    return {what for what, cases in others.items() if any(well(name, each) for each in cases)}


def expect_matters(name: str, case: Case, matters: Sequence[str]) -> None:
    """Raise Failure unless `matters` are the fields that `curing` returns."""
    right = curing(name, case)
    if more := set(matters) - right:
        raise _NAMED["matters_too_much"].failure(f"{name} on {case}: {', '.join(sorted(more))}")
    if missed := right - set(matters):
        raise _NAMED["matters_missed"].failure(f"{name} on {case}: {len(missed)} not named")


def examined(name: str, answer: Any) -> Chart:
    """Return the chart in `answer`, after trying everything except the fault's name on the patient.

    Raises: Failure for the first statement that does not hold.
    """
    chart = read(name, answer)
    expect_ill(name, chart.case)
    expect_smallest(name, chart.case)
    expect_matters(name, chart.case, chart.matters)
    if not suite.finds(name, chart.check):
        raise _NAMED["not_found_by_it"].failure(f"{name}: {chart.check}")
    return chart


def _examined(name: str) -> Callable[[Any, np.random.Generator], None]:
    def run(subject: Any, rng: np.random.Generator) -> None:
        examined(name, subject.call(name))

    return run


def _fault(name: str) -> Callable[[Any, np.random.Generator], None]:
    def run(subject: Any, rng: np.random.Generator) -> None:
        fault = read(name, subject.call(name)).fault
        if fault == KEY[name]:
            return
        taken = f"{name}_taken_for_{fault.replace(' ', '_')}"
        raise _NAMED.get(taken, _NAMED[f"{name}_is_ill_of_something_else"]).failure(f"{name}: {fault}")

    return run


def _short(value: Any) -> str:
    return f"{value!r:.120}"


STAGE = Stage(
    id="16.chart",
    function="chart",
    title="A chart for each patient",
    hints=(
        "On which cases is the patient well? What do these cases have in common that the ill ones lack?",
        "Start from an ill case and shrink it, first ranks, then tokens, until every smaller case is well. From there change one thing at a time: layout, mask, dtype. "
        "Then look at what is ill: which results, on which ranks, NaN or wrong, by how much; and at the bytes. Finally ask of each line of FAULTS: would it cause just that, and nothing else?",
        r"ill$(r, t)$ and well$(r', t')$ for all $r' \le r,\ t' \le t,\ (r', t') \ne (r, t)$; a thing matters if one other value of it makes $(r, t)$ well",
    ),
    misconceptions=MISTAKES,
    checks=(
        *(
            Check(name, 1, "visible", f"{name}: an ill case, the smallest, what matters, a check that finds it", _examined(name))
            for name in TO_MEND
        ),
        *(
            Check(f"{name}_fault", 3, "held-out", f"the name of {name}'s fault", _fault(name))
            for name in TO_MEND
        ),
    ),
)  # fmt: skip
