"""The kill matrix and the sweep over seeds that are committed hold today."""

from __future__ import annotations

import json
from pathlib import Path

from ringlab.conformance import checks, evidence, matrix_page
from ringlab.conformance.mutants import MUTANTS

CHECKOUT = Path(__file__).resolve().parents[2]
MATRIX = CHECKOUT / "docs" / "conformance-matrix.md"
SEEDS = CHECKOUT / "benchmarks" / "results" / "conformance" / "seeds.json"
AGAIN = "python -m ringlab.conformance.evidence"


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


def test_the_committed_sweep_is_of_fifty_seeds_without_a_failure() -> None:
    told = json.loads(SEEDS.read_text(encoding="utf-8"))
    sweeps = told["sweeps"]
    assert [each["target"] for each in sweeps] == list(evidence.RIGHT)
    assert [(each["seeds"], each["passed"], each["failed"]) for each in sweeps] == [(50, 50, {})] * 2
    assert all(0.0 < each["closest"] <= 1.0 for each in sweeps)
    assert told["checks"] == [each.name for each in checks.CHECKS if each.tier == "quick"]
    assert told["fingerprint"] == evidence.fingerprint(), (
        f"the checks are others than those of the sweep: {AGAIN} seeds {SEEDS.relative_to(CHECKOUT)}"
    )
