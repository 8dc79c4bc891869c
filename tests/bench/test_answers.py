"""Waiting for `ringlab plan`: whole processes are timed, and what is no answer is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringlab.bench.answers import PLAN, bench_answers
from ringlab.cli import app
from ringlab.errors import RinglabError

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_the_first_answer_is_not_counted_and_the_others_are() -> None:
    ticks: list[int] = []
    measured = bench_answers(2, progress=lambda: ticks.append(1))
    assert len(measured["wall_s"]) == 2 and len(ticks) == 3
    assert measured["slowest_s"] == max(measured["wall_s"]) and measured["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    "arguments",
    [("plan", "--model", "nobody", "--tokens", "1M", "--json"), ("plan", "--no-such-option", "--json")],
)
def test_an_error_is_no_answer(arguments: tuple[str, ...]) -> None:
    with pytest.raises(RinglabError, match="an answer of ringlab plan"):
        bench_answers(1, arguments)


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.json"
    done = CliRunner().invoke(app, ["bench", "plan", "--runs", "1", "--json", "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text()) == json.loads(done.stdout)


def test_the_published_answers_came_within_two_seconds() -> None:
    published = json.loads((RESULTS / "plan/llama3-70b.json").read_text())
    assert published["command"] == ["ringlab", *PLAN]
    assert len(published["wall_s"]) >= 11 and max(published["wall_s"]) < 2.0
