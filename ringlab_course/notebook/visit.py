"""A learner's work in the ward: read complaints, examine, order a report, commit a diagnosis, then open a source."""

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
    """Print who complains of what: the patients of exercise 16, or those that are named, from the field too."""
    for name in names or TO_MEND:
        each = FIELD.get(name) or patient(name)
        print(f"{each.name}, returns {', '.join(each.returns)}")
        print(textwrap.indent(textwrap.fill(f"“{each.complaint}”", 96), "    "))


def examine(name: str, ranks: int, tokens: int, **case: Any) -> Findings:
    """Return the findings of one run on `ranks` ranks with `tokens` tokens each; print them to read them.

    case: layout (one of `ringlab.layout.layout_names()`), causal, dtype ("float32", "bfloat16"). Errors within
    the bound are shown as "rounding".
    Raises: CourseError for a patient or a case that does not exist.
    """
    return _examine(patient(name), Case(ranks, tokens, **case))


def report(name: str, *only: str) -> Report:
    """Return the conformance report of a patient, on the clinic's checks or on those that are named; print what failed."""
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
    """Return what a check saw in the words of the ward: the first wrong run, NaN as NaN, no remedy.

    No bound either: it is measured on the plainest implementation, so its digits are this machine's.
    """
    text = " ".join(evidence.split()).partition("; worst: ")[0].partition("; remedy: ")[0]
    text = _RUNS.sub(r"in \1 of the \2 runs on P = \3; first: ", text)
    return _PLACE.sub(
        lambda found: f"error {'NaN' if found[2] == 'nan' else found[1]} beyond its bound (", text
    )


def commit(name: str, chart: Any) -> None:
    """Keep this chart as the diagnosis of a patient if what it says holds; else print what does not.

    Tried are the case, that it is the smallest, what matters, and the check. The name of the fault is not:
    that is what the source is opened to see. Until then a chart may be changed, and after it no more.
    Raises: CourseError for another chart than the one with which the source was opened.
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
    """Print the patient's program; its diagnosis is final from now on.

    Raises: CourseError if none was committed.
    """
    each = patient(name)
    committed.opened(name)
    print(each.source.rstrip())


def open_helpers(*names: str) -> None:
    """Print the helpers that all patients share, all of them or those that are named. Nothing is wrong with them."""
    for name in names or ("sees", "scores_of", "nothing_seen", "attend", "block_backward", "send", "receive"):
        print(inspect.getsource(getattr(bedside, name)))


__all__ = ["PATIENTS", "commit", "examine", "open_helpers", "open_source", "report", "ward"]
