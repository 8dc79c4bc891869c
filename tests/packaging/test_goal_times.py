"""What was measured with tools/goal_times.py keeps its goals: lessons in three minutes, tiers in one and ten."""

from __future__ import annotations

import json
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "benchmarks/results/waiting"


def test_every_lesson_runs_in_three_minutes() -> None:
    measured = json.loads((RESULTS / "notebooks.json").read_text(encoding="utf-8"))
    assert set(measured["seconds"]) == {path.stem for path in (CHECKOUT / "notebooks").glob("*.ipynb")}
    assert max(measured["seconds"].values()) < 180
    assert measured["machine"]["cores"] == 2


def test_the_tiers_pass_right_rings_in_a_minute_and_in_ten() -> None:
    measured = json.loads((RESULTS / "tiers.json").read_text(encoding="utf-8"))
    assert {case["target"].split(":")[0] for case in measured["cases"]} == {
        "ringlab.attention",
        "ringlab.conformance.plain_distributed",
    }
    limits = {"quick": 60, "full": 600}
    assert {case["tier"] for case in measured["cases"]} == set(limits)
    for case in measured["cases"]:
        assert case["ok"] and case["checks"] >= 30 and case["seconds"] < limits[case["tier"]], case
    assert measured["machine"]["cores"] == 2
