"""A report as text: Markdown, its parts in words, and a badge. `Report.as_dict()` gives JSON."""

from __future__ import annotations

import json
import re
import time

import ringlab
from ringlab.conformance.report.diagnosis import STOPPED
from ringlab.conformance.report.findings import ALLOWED, Finding, Report


def mark(finding: Finding) -> str:
    """Return the verdict: "passed", "failed", "allowed", "does not apply" or "not run"."""
    if finding.evidence == STOPPED:
        return "not run"
    if not finding.applies:
        return "does not apply"
    if finding.ok and finding.evidence.startswith(ALLOWED):
        return "allowed"
    return "passed" if finding.ok else "failed"


def summary(report: Report) -> str:
    """Return a summary of the findings in one sentence."""
    applied = [finding for finding in report.findings if mark(finding) not in SKIPPED]
    tier = "quick" if report.quick else "full"
    failed = f"{len(report.failed)} failed: {', '.join(report.failed)}" if report.failed else "all passed"
    verdict = f"{failed}; {report.left_open}" if report.left_open else failed
    return f"{len(applied)} checks of the {tier} tier, {report.runs} runs, seed {report.seed}, {report.seconds:.0f} s: {verdict}"


def evidence(report: Report) -> dict[str, str]:
    """Return each check's evidence by its name; repeated trouble refers to the earlier check."""
    before: dict[str, str] = {}
    found = {}
    for finding in report.findings:
        trouble = finding.where.get("trouble") if finding.where else None
        # The same error at other shapes counts as the same trouble.
        cause = re.sub(r"\d+", "0", f"{trouble['kind']}: {trouble['text']}") if trouble else finding.name
        first = before.setdefault(cause, finding.name)
        again = first != finding.name
        found[finding.name] = f"{trouble['kind']} as in “{first}”" if trouble and again else finding.evidence
    return found


def no_script(report: Report) -> list[str]:
    """Return a sentence on the reason why a requested script does not exist, or an empty list."""
    return [f"No script is written: {report.no_script}."] if report.no_script else []


def markdown(report: Report) -> str:
    """Return the report as a Markdown table, below its first fault and its verdict."""
    lines = [
        f"# Conformance of `{report.target}`",
        "",
        *(line for sentence in (*report.sentences, *no_script(report)) for line in (_plain(sentence), "")),
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


def badge(report: Report) -> str:
    """Return JSON for a shields.io badge: ringlab's version, the passed checks, and today's date."""
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


def printable(text: str) -> str:
    """Return the text with characters replaced that XML and HTML cannot contain."""
    return "".join(
        c if c in "\t\n" or (c >= " " and not "\ud800" <= c <= "\udfff" and c < "\ufffe") else "�"
        for c in text
    )
