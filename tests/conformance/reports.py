"""What the tests of this folder read in a report."""

from __future__ import annotations

from functools import partial

from ringlab.conformance.report.findings import Report
from ringlab.conformance.suite import check

quick = partial(check, quick=True, isolate=False)


def failed(report: Report) -> dict[str, str]:
    """Return the evidence of each check that failed, by its name."""
    return {finding.name: finding.evidence for finding in report.findings if not finding.ok}


def evidence(report: Report, name: str) -> str:
    """Return the evidence of one check."""
    return next(finding.evidence for finding in report.findings if finding.name == name)
