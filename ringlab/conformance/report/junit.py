"""A report as JUnit XML, for test viewers."""

from __future__ import annotations

from xml.etree import ElementTree

from ringlab.conformance.report.findings import Report
from ringlab.conformance.report.text import SKIPPED, mark, printable


def junit(report: Report) -> str:
    """Return the report as JUnit XML, with a test case for each check, skipped if it does not apply."""
    failed = len(report.failed)
    skipped = sum(mark(finding) in SKIPPED for finding in report.findings)
    suite = ElementTree.Element(
        "testsuite", name=f"ringlab check {printable(report.target)}", tests=str(len(report.findings)),
        failures=str(failed), errors="0", skipped=str(skipped), time=f"{report.seconds:.3f}",
    )  # fmt: skip
    if report.not_asked:
        properties = ElementTree.SubElement(suite, "properties")
        ElementTree.SubElement(
            properties, "property", name="not asked", value=printable(", ".join(report.not_asked))
        )
    for finding in report.findings:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=printable(report.target),
            name=finding.name,
            time=f"{finding.seconds:.3f}",
        )
        if mark(finding) in SKIPPED:
            ElementTree.SubElement(case, "skipped", message=printable(finding.evidence))
        elif not finding.ok:
            message = printable(
                f"{finding.evidence}. {report.right_if}" if report.right_if else finding.evidence
            )
            ElementTree.SubElement(case, "failure", message=message).text = (
                printable(finding.counterexample) or message
            )
        else:
            ElementTree.SubElement(case, "system-out").text = printable(finding.evidence)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
