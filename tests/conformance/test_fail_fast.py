"""With `ringlab check --fail-fast` a report ends at its first fault."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.report.diagnosis import STOPPED
from ringlab.conformance.report.html import html
from ringlab.conformance.report.junit import junit
from ringlab.conformance.report.text import badge, mark, summary
from ringlab.conformance.suite import check

WRONG = "ringlab.conformance.mutants"


def test_a_report_ends_at_its_first_fault_if_that_is_asked_for() -> None:
    wrong = MUTANTS["tiles_of_512_keys"].target()
    report = check(wrong, quick=True, fail_fast=True, isolate=False)
    left = [each.name for each in report.findings if each.evidence == STOPPED]
    assert report.failed == ["long shards"] and len(left) > 30 and not report.ok
    assert report.runs < 60, "the whole quick tier makes more than a hundred"
    first, *others = report.sentences
    assert first.startswith("out is wrong") and f"{len(left)} other checks were not run." in others
    assert summary(report).endswith("1 failed: long shards")
    assert mark(report.findings[-1]) == "not run" and "not run" in html(report)
    passed = sum(each.ok and each.applies for each in report.findings)
    assert json.loads(badge(report))["message"].startswith(f"{passed} of {passed + 1 + len(left)} ")
    suite = ElementTree.fromstring(junit(report))[0]
    assert suite.get("failures") == "1" and len(suite.findall("testcase/skipped")) >= len(left)


def test_a_command_ends_at_the_first_fault() -> None:
    done = CliRunner().invoke(app, ["check", f"{WRONG}:no_scale", "--quick", "--fail-fast", "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 1 and report["first"].startswith("out is wrong")
    assert sum(each["evidence"] == STOPPED for each in report["checks"]) > 30


@pytest.mark.parametrize(
    "options",
    [
        ("--kind", "merge"),
        ("--kind", "decode"),
        ("--kind", "step"),
        ("--badge", "b.json"),
        ("--init", "t.py"),
    ],
)
def test_where_fail_fast_would_be_ignored_it_is_refused(options: tuple[str, str]) -> None:
    done = CliRunner().invoke(app, ["check", f"{WRONG}:no_scale", "--fail-fast", *options])
    assert done.exit_code == 2 and "--fail-fast" in done.output
