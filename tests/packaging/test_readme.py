"""The programs of the README and of the tour print the output shown below them, and their commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringlab.cli import app

CHECKOUT = Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_stands_below_it(tmp_path: Path) -> None:
    example = re.search(r"```python\n(import torch.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert example is not None
    done = subprocess.run([sys.executable, "-c", example[1]], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == example[2], done.stderr
    sent = 3 * 2 * 250 * 2 * 64 * 4  # P − 1 hops of K and V: tokens × K/V heads × head dim × bytes
    assert f"rank 0: {sent}" in done.stdout


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    contributing = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    commands = contributing.split("```sh\n")[1].split("```")[0].splitlines()
    assert [line for line in commands if not re.match(r"make [a-z-]+ +# ", line)] == []
    texts = README + contributing
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", texts, re.MULTILINE))
    assert named - targets == set()
    assert {"lab", "test", "build", "docs"} <= named


TOUR = (Path(__file__).parents[2] / "docs/tour.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```(\w+)\n(.*?)```\n\n```text\n(.*?)```", TOUR, re.DOTALL)


def words(text: str) -> str:
    """Return the words of a text without the frames of tables, whose width depends on the terminal."""
    return " ".join(re.sub("[┃│]", " ", text).split())


def test_every_block_of_the_tour_is_looked_at() -> None:
    assert len(SHOWN) == TOUR.count("```text") == TOUR.count("```") // 4 >= 4
    assert {kind for kind, _, _ in SHOWN} == {"py", "sh"}


@pytest.mark.parametrize("source, told", [(s, told) for kind, s, told in SHOWN if kind == "py"])
def test_a_program_prints_what_stands_below_it(source: str, told: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.stdout == told, done.stderr


@pytest.mark.parametrize("command, told", [(s, told) for kind, s, told in SHOWN if kind == "sh"])
def test_a_command_prints_what_stands_below_it(
    command: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    for line in told.splitlines():
        assert words(line) in words(result.output), result.output
