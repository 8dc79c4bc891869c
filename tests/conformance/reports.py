"""Helpers that read the parts of a report that the tests of this folder use."""

from __future__ import annotations

from functools import partial

from ringlab.conformance.report.findings import Report
from ringlab.conformance.suite import check

quick = partial(check, quick=True, isolate=False)


def failed(report: Report) -> dict[str, str]:
    """Return the evidence of each failed check, by the check's name."""
    return {finding.name: finding.evidence for finding in report.findings if not finding.ok}


def evidence(report: Report, name: str) -> str:
    """Return the evidence of the check `name`."""
    return next(finding.evidence for finding in report.findings if finding.name == name)
