"""The kill matrix and the sweep over seeds say what the reports say."""

from __future__ import annotations

import pytest

from ringlab.conformance import evidence
from ringlab.conformance.mutants import MUTANTS
from ringlab.conformance.runner import Finding, Report


def report(*failed: str) -> Report:
    findings = [
        Finding(name, "", name not in failed, f"evidence of {name}", 0.0)
        for name in ("forward", "dq", "bytes")
    ]
    return Report("", "ring", "virtual", True, 0, 30.0, findings)


def test_the_matrix_marks_the_check_that_is_named() -> None:
    text = evidence.matrix({"no_scale": report("forward", "dq"), "heads_repeated_on_the_wire": report("dq")})
    head, _, first, second = [line for line in text.splitlines() if line.startswith("|")]
    assert head == "| wrong ring | what is wrong | forward | dq |"
    assert first.endswith("| ◉ | ● |") and MUTANTS["no_scale"].fault in first
    assert second.endswith("|  | ● |")
    assert "1 of 2 wrong rings are found" in text


def test_a_failing_seed_keeps_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        evidence, "check", lambda target, **options: report(*(["dq"] if options["seed"] == 3 else []))
    )
    assert evidence._failures("a:b", 3) == {"dq": "evidence of dq"}
    assert evidence._failures("a:b", 4) == {}
