"""What a learner does in the ward: read complaints, examine, order a report, and open a source once the chart holds."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

from ringlab.conformance.runner import Report
from ringlab.course.clinic import bedside, suite
from ringlab.course.clinic.examine import Case, Findings
from ringlab.course.clinic.examine import examine as _examine
from ringlab.course.clinic.patients import PATIENTS, TO_MEND, patient
from ringlab.course.contract import Failure


def ward(*names: str) -> None:
    """Print who complains of what: the patients of exercise 16, or those that are named."""
    for name in names or TO_MEND:
        each = patient(name)
        print(f"{each.name}, returns {', '.join(each.returns)}")
        print(textwrap.indent(textwrap.fill(f"“{each.complaint}”", 96), "    "))


def examine(name: str, ranks: int, tokens: int, **case: Any) -> Findings:
    """Return the findings of one run on `ranks` ranks with `tokens` tokens each; print them to read them.

    case: layout ("contiguous", "striped", "zigzag"), causal, dtype ("float32", "bfloat16"). Errors within
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
        evidence = " ".join(finding.evidence.split()).partition(", batch ")[0]
        print(f"{finding.name:14} {'holds' if finding.ok else f'FAILS  {evidence[:110]}'}")
    return found


def open_source(name: str, chart: Any) -> None:
    """Print the patient's program if what the chart says of its case holds; else print what does not.

    The name of the fault is not looked at: that is what you open the source to see.
    """
    from ringlab.course.contracts import e16_charts

    each = patient(name)
    try:
        read = e16_charts.read(name, chart)
        e16_charts.expect_ill(name, read.case)
        e16_charts.expect_smallest(name, read.case)
    except Failure as failure:
        print(f"The source of {name} stays closed. {failure}")
        return
    print(inspect.getsource(each.program).rstrip())


def open_helpers(*names: str) -> None:
    """Print the helpers that all patients share, all of them or those that are named. Nothing is wrong with them."""
    for name in names or ("sees", "scores_of", "nothing_seen", "attend", "block_backward", "send", "receive"):
        print(inspect.getsource(getattr(bedside, name)))


__all__ = ["PATIENTS", "examine", "open_helpers", "open_source", "report", "ward"]
