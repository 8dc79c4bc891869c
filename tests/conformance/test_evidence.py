"""The committed kill matrix agrees with the checks of today, and contains only existing names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringlab.conformance import checks
from ringlab.conformance.kinds.decode import CHECKS as DECODE_CHECKS
from ringlab.conformance.kinds.merge import CHECKS as MERGE_CHECKS
from ringlab.conformance.kinds.step import CHECKS as STEP_CHECKS
from ringlab.conformance.mutants import MUTANTS, STEPS
from tools.conformance import evidence, matrix_page
from tools.conformance.matrix_page import Row


def test_rows_that_are_not_named_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "matrix.md"
    page.write_text(matrix_page.page(dict.fromkeys([*MUTANTS][1:], Row(("dq",), 1))))
    monkeypatch.setattr(evidence, "row", lambda target: Row(("forward",), 0))
    first, second, third = [*MUTANTS][:3]
    rows = evidence.rows(page, (second,))
    assert (rows[first], rows[second], rows[third]) == (Row(("forward",), 0),) * 2 + (Row(("dq",), 1),)
    with pytest.raises(SystemExit, match="got nonsense"):
        evidence.rows(page, ("nonsense",))


def test_columns_that_are_not_named_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = next(each for each, mutant in MUTANTS.items() if mutant.found_by == "dq")
    monkeypatch.setattr(evidence, "MUTANTS", {name: MUTANTS[name]})
    monkeypatch.setattr(matrix_page, "read", lambda text: {name: Row(("forward", "dk"), 1)})
    page = tmp_path / "matrix.md"
    page.touch()
    assert evidence.rows(page, ("dq", "forward")) == {name: Row(("dq", "dk"), 1)}


CHECKOUT = Path(__file__).resolve().parents[2]


MATRIX = CHECKOUT / "docs" / "conformance-matrix.md"


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


@pytest.mark.thorough
def test_a_row_of_the_matrix_is_what_the_checks_say_today() -> None:
    rows = matrix_page.read(MATRIX.read_text(encoding="utf-8"))
    for name in ("lse_is_the_larger",):
        assert evidence.row(MUTANTS[name].target()) == rows[name]


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


def test_kinds_of_later_reports_name_checks_and_wrong_programs_that_exist() -> None:
    text = (CHECKOUT / "docs" / "field-reports.md").read_text(encoding="utf-8")
    table = text.partition("## Kinds of later reports")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for _, by, *wrong in rows:
        named, _, kind = by.partition(" of `--kind ")
        known, _ = KINDS[kind.partition("`")[0] or None]
        assert {*re.findall("`([^`]+)`", named)} <= {*known}, by
        assert {*re.findall("`([^`]+)`", " ".join(wrong))} <= {*MUTANTS, *STEPS}, wrong
