"""The generated pages of docs/ agree with the present code and results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tools.docs import __main__ as docs
from tools.docs import benchmarks

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = dict(docs.pages())


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (CHECKOUT / name).read_text(encoding="utf-8") == PAGES[name], f"out of date: {docs.COMMAND}"


def test_results_of_a_gpu_are_shown(tmp_path: Path) -> None:
    """The page of benchmarks shows made-up results that have the form of `make gpu`'s results."""
    results = tmp_path / "benchmarks/results"
    shutil.copytree(CHECKOUT / "benchmarks/results", results)
    made_up = {
        name: json.loads((CHECKOUT / f"tests/bench/made_up/{name}.json").read_text())
        for name in ("kernels", "ring")
    }
    (results / "hour").mkdir(exist_ok=True)
    steps = {name: {"result": result} for name, result in made_up.items()} | {"tests": {"result": None}}
    (results / "hour/made-up.json").write_text(json.dumps({"bench": "hour", "steps": steps}))
    page = benchmarks.page(tmp_path)
    assert "Nothing has been measured" not in page
    for told in (
        "`made-up.json`, kernels:",
        "| forward, causal | triton |",
        "| forward, causal | triton ring |",
    ):
        assert told in page
