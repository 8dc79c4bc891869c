"""The functions that learners call in exercise 16's clinic for faulty rings.

They show the complaint about a ring, examine the ring, commit a diagnosis, and show the ring's source.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from ringlab.conformance.report.findings import Report
from ringlab_course.checking.failures import Failure
from ringlab_course.clinic import bedside, suite
from ringlab_course.clinic.case import Case, Findings
from ringlab_course.clinic.case import examine as _examine
from ringlab_course.clinic.field import FIELD
from ringlab_course.clinic.patients import PATIENTS, TO_MEND, patient
from ringlab_course.notebook import committed

_RUNS = re.compile(r"in (\d+) of (\d+) runs, P = ([\d, ]+); first: ")
_PLACE = re.compile(r"error (\S+) beyond \S+, batch \d+, head \d+, token \d+: (\S+) for \S+ \(")


def ward(*names: str) -> None:
    """Print the complaints of the patients of exercise 16, or of the patients in `names`.

    Patients from the field can be named, too.
    """
    for name in names or TO_MEND:
        each = FIELD.get(name) or patient(name)
        print(f"{each.name}, returns {', '.join(each.returns)}")
        print(textwrap.indent(textwrap.fill(f"“{each.complaint}”", 96), "    "))


def examine(name: str, ranks: int, tokens: int, **case: Any) -> Findings:
    """Return the findings of one run on `ranks` ranks with `tokens` tokens each; print() shows them readably.

    case: layout (one of `ringlab.layout.layout_names()`), causal, dtype ("float32" or "bfloat16"). Errors
    within the bound are shown as "rounding".
    Raises: CourseError for a patient or a case that does not exist.
    """
    return _examine(patient(name), Case(ranks, tokens, **case))


def report(name: str, *only: str) -> Report:
    """Return the conformance report of a patient, and print the result of each check.

    only: the names of the checks to run; all of the clinic's checks if empty.
    """
    found = suite.report(patient(name), only or suite.CHECKS)
    for finding in found.findings[1:]:
        if not finding.applies:
            continue
        if finding.ok:
            print(f"{finding.name:14} holds")
            continue
        begin = f"{finding.name:14} FAILS  "
        print(textwrap.fill(begin + seen(finding.evidence), 116, subsequent_indent=" " * len(begin)))
    return found


def seen(evidence: str) -> str:
    """Return a check's evidence as the ward prints it: the first wrong run, without the remedy and the bound.

    The digits of the bound depend on the machine, because it is measured on the plainest implementation.
    """
    text = " ".join(evidence.split()).partition("; worst: ")[0].partition("; remedy: ")[0]
    text = _RUNS.sub(r"in \1 of the \2 runs on P = \3; first: ", text)
    return _PLACE.sub(
        lambda found: f"error {'NaN' if found[2] == 'nan' else found[1]} beyond its bound (", text
    )


def commit(name: str, chart: Any) -> None:
    """Keep this chart as the diagnosis of a patient if its claims hold; otherwise print which do not.

    The claims that are tested are the case, that no smaller case fails, what matters, and the check. The name
    of the fault is not tested, because the learner opens the source to see it. A chart may be changed until
    then, and not afterwards.
    Raises: CourseError if the chart differs from the one with which the source was opened.
    """
    from ringlab_course.exercises.e16_bug_clinic import charts as e16_charts

    patient(name)
    try:
        read = e16_charts.examined(name, chart)
    except Failure as failure:
        print(f"Not committed. {failure}")
        return
    evidence = f"{read.case}, {read.check}, matters: {', '.join(sorted(set(read.matters))) or 'nothing'}"
    committed.commit(name, read.fault, evidence)
    print(f"{name}: “{read.fault}” is committed, and final once the source is open\n  {evidence}")


def open_source(name: str) -> None:
    """Print the patient's program; the patient's diagnosis is final from now on.

    Raises: CourseError if no diagnosis was committed.
    """
    each = patient(name)
    committed.opened(name)
    print(each.source.rstrip())


def open_helpers(*names: str) -> None:
    """Print the helpers that all patients share, or only the named ones. The helpers contain no fault."""
    for name in names or ("sees", "scores_of", "nothing_seen", "attend", "block_backward", "send", "receive"):
        print(inspect.getsource(getattr(bedside, name)))


__all__ = ["PATIENTS", "commit", "examine", "open_helpers", "open_source", "report", "ward"]
