"""The kill matrix and the sweeps over seeds say what the reports say.

The kill matrix and the sweeps over seeds that are committed hold today.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ringlab.conformance import checks
from ringlab.conformance.decoding import CHECKS as DECODE_CHECKS
from ringlab.conformance.merging import CHECKS as MERGE_CHECKS
from ringlab.conformance.mutants import MUTANTS, STEPS
from ringlab.conformance.own import ring
from ringlab.conformance.runner import Finding, Report, check
from ringlab.conformance.stepping import CHECKS as STEP_CHECKS
from ringlab.conformance.styles import STYLES
from tools.conformance import evidence, matrix_page
from tools.conformance.matrix_page import MEASURES, Row


def report(*failed: str) -> Report:
    findings = [
        Finding(name, "", name not in failed, f"evidence of {name}", 0.0)
        for name in ("forward", "dq", "bytes")
    ]
    return Report("", "ring", "virtual", True, 0, 30.0, findings)


def test_the_matrix_marks_the_check_that_is_named() -> None:
    rows = {"no_scale": Row(("forward", "dq"), 0), "heads_repeated_on_the_wire": Row(("dq",), 2)}
    text = matrix_page.page(rows)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    head, first, second = lines[-3:]
    assert head == "| wrong ring | what is wrong | forward | dq | loose tests |"
    assert first.endswith("| ◉ | ● | falls to both |") and MUTANTS["no_scale"].fault in first
    assert second.endswith("|  | ● | passes both |")
    assert "**1 of 2 wrong rings are found" in text and "1 of them pass the first" in text
    assert matrix_page.read(text) == rows


def test_rows_that_are_not_named_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "matrix.md"
    page.write_text(matrix_page.page(dict.fromkeys([*MUTANTS][1:], Row(("dq",), 1))))
    monkeypatch.setattr(evidence, "row", lambda target: Row(("forward",), 0))
    first, second, third = [*MUTANTS][:3]
    rows = evidence.rows(page, (second,))
    assert (rows[first], rows[second], rows[third]) == (Row(("forward",), 0),) * 2 + (Row(("dq",), 1),)
    with pytest.raises(SystemExit, match="got nonsense"):
        evidence.rows(page, ("nonsense",))


def test_a_page_without_a_matrix_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="got none"):
        matrix_page.read("# A page\n")


def test_every_style_is_in_the_page_with_what_it_does_not_promise() -> None:
    text = matrix_page.page({})
    assert all(f"| `{name}` | {style.does} |" in text for name, style in STYLES.items())
    odd, bytes_lacking = (
        next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        for name in ("odd_ranks_receive_first", "travelling_queries")
    )
    assert odd.endswith("| nothing |") and "| `bytes`: rows are more bytes" in bytes_lacking


def test_the_measures_are_all_checks_each_once() -> None:
    counted = Counter(name for _, own in MEASURES for name in own)
    assert counted == Counter(each.name for each in checks.CHECKS)


def test_a_loose_test_passes_a_right_ring_and_finds_a_coarse_fault() -> None:
    assert all(test.passed_by(ring) for test in evidence.LOOSE_TESTS)
    assert not any(test.passed_by(MUTANTS["averages_blocks"].target()) for test in evidence.LOOSE_TESTS)
    first, second = evidence.LOOSE_TESTS
    unmasked = MUTANTS["no_mask"].target()
    assert first.passed_by(unmasked) and not second.passed_by(unmasked)


def test_the_fingerprint_changes_with_the_checks_and_not_with_their_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ast

    def dumped(source: str) -> str:
        return ast.dump(evidence._without_docstrings(ast.parse(source)))

    plain = 'def judge(x):\n    "Words."\n    return x < 2\n'
    assert dumped(plain) == dumped("def judge(x):  # other words\n    return (x < 2)\n")
    assert dumped(plain) != dumped(plain.replace("2", "3"))
    before = evidence.fingerprint()
    monkeypatch.setattr(evidence, "DECIDING", evidence.DECIDING[1:])
    assert evidence.fingerprint() != before


def test_a_failing_seed_keeps_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        evidence, "check", lambda target, **options: report(*(["dq"] if options["seed"] == 3 else []))
    )
    assert evidence._with_seed(["a:b"], ["dq"], 3) == {"a:b": ({"dq": "evidence of dq"}, 0.0)}
    assert evidence._with_seed(["a:b"], ["dq"], 4) == {"a:b": ({}, 0.0)}


def test_how_close_a_right_ring_comes_is_read_from_the_evidence() -> None:
    found = check(ring, quick=True, only=("dq",), isolate=False).findings[-1]
    assert 0.0 < evidence._share(found) <= 1.0
    assert (
        evidence._share(replace(found, evidence="closest to its bound: dv error 3e-7 within 4e-7 (P=2)"))
        == 0.75
    )


CHECKOUT = Path(__file__).resolve().parents[2]
MATRIX = CHECKOUT / "docs" / "conformance-matrix.md"
RESULTS = CHECKOUT / "benchmarks" / "results" / "conformance"
KINDS = {
    None: (checks.names(), MUTANTS),
    "merge": (MERGE_CHECKS, {}),
    "decode": ([check.name for check in DECODE_CHECKS], {}),
    "step": ([check.name for check in STEP_CHECKS], STEPS),
}
AGAIN = "python -m tools.conformance.evidence"


def test_the_committed_matrix_has_every_wrong_ring_found_by_its_check() -> None:
    text = MATRIX.read_text(encoding="utf-8")
    rows = matrix_page.read(text)
    assert list(rows) == list(MUTANTS), (
        f"{AGAIN} matrix docs/conformance-matrix.md, and the names of new ones"
    )
    missed = [name for name, row in rows.items() if MUTANTS[name].found_by not in row.failed]
    assert missed == []
    assert text == matrix_page.page(rows), f"{AGAIN} matrix docs/conformance-matrix.md"


def test_a_row_of_the_matrix_is_what_the_checks_say_today() -> None:
    rows = matrix_page.read(MATRIX.read_text(encoding="utf-8"))
    for name in ("lse_is_the_larger",):
        assert evidence.row(MUTANTS[name].target()) == rows[name]


@pytest.mark.parametrize("what", evidence.RIGHT)
def test_the_committed_sweep_is_of_all_its_seeds_without_a_failure(what: str) -> None:
    file = RESULTS / f"{what}.json"
    again = f"{AGAIN} {what} {file.relative_to(CHECKOUT)}"
    assert file.exists(), f"no sweep was made yet: {again}"
    told = json.loads(file.read_text(encoding="utf-8"))
    sweeps, targets = told["sweeps"], evidence.RIGHT[what]
    assert [each["target"] for each in sweeps] == list(targets), again
    seeds = evidence.SEEDS[what]
    found = [(each["seeds"], each["passed"], each["failed"]) for each in sweeps]
    assert found == [(seeds, seeds, {})] * len(targets)
    assert all(0.0 < each["closest"] <= 1.0 for each in sweeps)
    assert {*told["checks"]} <= {*evidence.ASKED[what]}


def test_what_is_said_of_reports_from_the_field_names_checks_and_wrong_rings_that_exist() -> None:
    text = (CHECKOUT / "docs" / "field-reports.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[\S+ \d+\]\(https://github\.com/\S+/issues/\d+\) \| (.*) \| (.*) \|$", text, re.MULTILINE
    )
    found = [by for _, by in rows if by.startswith("**found** by ")]
    for by in found:
        named, of, wrong = re.fullmatch(
            r"(.*?)(?: of `--kind (\w+)`[^;]*)?(?:; wrong \w+ `(\w+)`)?", by
        ).groups()
        known, mutants = KINDS[of]
        assert {*re.findall("`([^`]+)`", named)} <= {*known}, by
        assert wrong is None or wrong in mutants, by
    assert f"| all | {len(rows)} | {len(found)} |" in text and f"finds {len(found)}:" in text
    parts = re.findall(r"^\| \[[^]]+\]\(#\S+\) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert [sum(map(int, column)) for column in zip(*parts, strict=True)] == [len(rows), len(found)]


def test_each_kind_of_report_has_two_wrong_programs_after_its_threads() -> None:
    """Those of merges and decode stand in tests; of determinism there is one thread only."""
    text = (CHECKOUT / "docs" / "field-reports.md").read_text(encoding="utf-8")
    wrong = {
        part.partition("\n")[0]: {*re.findall(r"; wrong \w+ `(\w+)` \|", part)}
        for part in text.split("\n## ")[1:]
    }
    few = {kind for kind, names in wrong.items() if len(names) < 2}
    assert few == {"Merges of (out, lse), decode", "Determinism"}
