"""The time of a command is that of a whole process, and an output without an answer is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringlab.bench.answers import bench_answers
from ringlab.cli import app
from ringlab.errors import RinglabError

pytestmark = pytest.mark.thorough


def test_the_first_answer_is_not_counted_and_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.json"
    done = CliRunner().invoke(app, ["bench", "answers", "--runs", "2", "--json", "--output", str(path)])
    assert done.exit_code == 0, done.output
    measured = json.loads(path.read_text())
    assert measured == json.loads(done.stdout)
    assert [case["command"].split()[1] for case in measured["cases"]] == ["plan", "--help"]
    assert all(len(case["wall_s"]) == 2 for case in measured["cases"])


@pytest.mark.parametrize(
    "arguments", [("plan", "--model", "nobody", "--tokens", "1M", "--json"), ("plan", "--no-such-option")]
)
def test_an_error_is_no_answer(arguments: tuple[str, ...]) -> None:
    with pytest.raises(RinglabError, match="an answer of ringlab plan"):
        bench_answers(1, [arguments])
