"""A report as a file: Markdown for people, JUnit for test viewers. JSON is `Report.as_dict()`."""

from __future__ import annotations

import json
import re
import time
from xml.etree import ElementTree

import ringlab
from ringlab.conformance import diagnosis
from ringlab.conformance.diagnosis import STOPPED
from ringlab.conformance.findings import ALLOWED, Finding, Report


def mark(finding: Finding) -> str:
    """Return "passed", "failed", "allowed", "does not apply" or "not run"."""
    if finding.evidence == STOPPED:
        return "not run"
    if not finding.applies:
        return "does not apply"
    if finding.ok and finding.evidence.startswith(ALLOWED):
        return "allowed"
    return "passed" if finding.ok else "failed"


def summary(report: Report) -> str:
    """Return the findings in one sentence."""
    applied = [finding for finding in report.findings if mark(finding) not in SKIPPED]
    tier = "quick" if report.quick else "full"
    failed = f"{len(report.failed)} failed: {', '.join(report.failed)}" if report.failed else "all passed"
    verdict = f"{failed}; {report.unasked}" if report.not_asked else failed
    return f"{len(applied)} checks of the {tier} tier, {report.runs} runs, seed {report.seed}, {report.seconds:.0f} s: {verdict}"


def said(report: Report) -> list[str]:
    """Return what is wrong in sentences (see `diagnosis.sentences`), none for a report in which nothing failed."""
    return diagnosis.sentences(report.findings, report.right_if)


def evidence(report: Report) -> dict[str, str]:
    """Return each check's evidence by its name; for a trouble that an earlier check had as well, a short reference to that."""
    before: dict[str, str] = {}
    found = {}
    for finding in report.findings:
        trouble = finding.where.get("trouble") if finding.where else None
        # The same error at other shapes is the same trouble.
        cause = re.sub(r"\d+", "0", f"{trouble['kind']}: {trouble['text']}") if trouble else finding.name
        first = before.setdefault(cause, finding.name)
        again = first != finding.name
        found[finding.name] = f"{trouble['kind']} as in “{first}”" if trouble and again else finding.evidence
    return found


def no_script(report: Report) -> list[str]:
    """Return a sentence on why there is no script, if one was requested and there is none."""
    return [f"No script is written: {report.no_script}."] if report.no_script else []


def script(report: Report) -> str:
    """Return the smallest counterexample as a script, "" if there is none."""
    return report.script


def markdown(report: Report) -> str:
    """Return the report as a Markdown table below its first fault and its verdict."""
    lines = [
        f"# Conformance of `{report.target}`",
        "",
        *(line for sentence in (*said(report), *no_script(report)) for line in (_plain(sentence), "")),
        f"Over {report.over or 'nothing: it could not be imported'}, transport {report.transport}. {summary(report)}.",
        "",
        "| check | asks | verdict | evidence |",
        "|---|---|---|---|",
    ]
    texts = evidence(report)
    for finding in report.findings:
        shown = texts[finding.name]
        if finding.counterexample:
            shown += f". Smallest counterexample: {finding.counterexample}"
        cells = (finding.name, finding.asks, mark(finding), shown)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


SKIPPED = ("does not apply", "not run")


def junit(report: Report) -> str:
    """Return the report as JUnit's XML: a test case for each check, skipped if it does not apply."""
    failed = len(report.failed)
    skipped = sum(mark(finding) in SKIPPED for finding in report.findings)
    suite = ElementTree.Element(
        "testsuite", name=f"ringlab check {_xml(report.target)}", tests=str(len(report.findings)),
        failures=str(failed), errors="0", skipped=str(skipped), time=f"{report.seconds:.3f}",
    )  # fmt: skip
    if report.not_asked:
        properties = ElementTree.SubElement(suite, "properties")
        ElementTree.SubElement(
            properties, "property", name="not asked", value=_xml(", ".join(report.not_asked))
        )
    for finding in report.findings:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(report.target), name=finding.name, time=f"{finding.seconds:.3f}"
        )
        if mark(finding) in SKIPPED:
            ElementTree.SubElement(case, "skipped", message=_xml(finding.evidence))
        elif not finding.ok:
            message = _xml(f"{finding.evidence}. {report.right_if}" if report.right_if else finding.evidence)
            ElementTree.SubElement(case, "failure", message=message).text = (
                _xml(finding.counterexample) or message
            )
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(finding.evidence)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def badge(report: Report) -> str:
    """Return JSON from which shields.io draws a badge: ringlab's version, the checks that passed, and today's date."""
    applied = [finding for finding in report.findings if finding.applies]
    kind = "merge" if report.over == "one process" else "quick" if report.quick else "full"
    allowed = sum(mark(finding) == "allowed" for finding in applied)
    passed = f"{sum(mark(finding) == 'passed' for finding in applied)} of {len(applied)} {kind} checks"
    passed += f", {allowed} allowed" if allowed else ""
    passed += f", {report.unasked}" if report.not_asked else ""
    fields = {
        "schemaVersion": 1,
        "label": f"ringlab {ringlab.__version__}",
        "message": f"{passed} · {time.strftime('%Y-%m-%d')}",
    }
    fields["color"] = "brightgreen" if report.ok else "red"
    return json.dumps(fields) + "\n"


def _cell(text: str) -> str:
    return " ".join(_plain(text).replace("|", "\\|").split())


def _plain(text: str) -> str:
    return text.replace("\\", "\\\\").replace("<", "&lt;")


def _xml(text: str) -> str:
    """The text without characters that XML cannot hold: a target may print anything."""
    return "".join(
        c if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c < "\ufffe") else "�"
        for c in text
    )
