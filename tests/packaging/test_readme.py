"""What the README says can be done and found, can be.

The tour: programs print what stands below them, commands at least that.

What was measured with `ringlab bench` keeps its goals: lessons in three minutes, tiers in one and ten.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab_course.catalogue import LESSONS

CHECKOUT = Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")


def test_the_first_screen_has_the_picture_and_the_two_commands() -> None:
    first = "\n".join(README.splitlines()[:12])
    assert re.search(r"^make lab\b", first, re.MULTILINE)
    assert re.search(r"^make test\b", first, re.MULTILINE)
    picture = re.search(r"!\[[^\]]{40,}\]\((\S+\.svg)\)", first)
    assert picture is not None and (CHECKOUT / picture[1]).exists()


def test_what_the_tree_names_exists() -> None:
    tree = README.split("```text\n")[-1].split("```")[0]
    names = [row.split()[0] for row in tree.splitlines()]
    assert names and [name for name in names if not (CHECKOUT / name).is_dir()] == []


def test_every_lesson_has_its_line() -> None:
    lines = re.findall(r"^- \[(\d\d)\]\(notebooks/(\w+)\.ipynb\) (.+)$", README, re.MULTILINE)
    assert [(number, slug) for number, slug, _ in lines] == [(lesson.id, lesson.slug) for lesson in LESSONS]
    assert all(text.startswith(lesson.title) for (*_, text), lesson in zip(lines, LESSONS, strict=True))


def test_all_kinds_of_readers_find_their_start() -> None:
    """That the links lead to files is tested with those of the other documents, in test_guide.py."""
    doors = README.split("## Start here\n")[1].split("\n## ")[0]
    assert re.findall(r"^- \*\*(.+?)\*\*", doors, re.MULTILINE) == [
        "Play",
        "Learn",
        "Read",
        "Check yours",
        "Teach",
    ]
    assert "[ringlab/plain_ring.py](ringlab/plain_ring.py) first" in doors


def test_the_example_prints_what_stands_below_it(tmp_path: Path) -> None:
    example = re.search(r"```python\n(import torch.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert example is not None
    done = subprocess.run([sys.executable, "-c", example[1]], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == example[2], done.stderr
    sent = 3 * 2 * 250 * 2 * 64 * 4  # P − 1 hops of K and V: tokens × K/V heads × head dim × bytes
    assert f"rank 0: {sent}" in done.stdout


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    texts = README + (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", texts, re.MULTILINE))
    assert named - targets == set()
    assert {"lab", "test", "build", "docs"} <= named


TOUR = (Path(__file__).parents[2] / "docs/tour.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```(\w+)\n(.*?)```\n\n```text\n(.*?)```", TOUR, re.DOTALL)


def words(text: str) -> str:
    """The words of a text, without the frames of tables: columns are as wide as the terminal."""
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


RESULTS = CHECKOUT / "benchmarks/results/waiting"


def test_every_lesson_runs_in_three_minutes() -> None:
    measured = json.loads((RESULTS / "lessons.json").read_text(encoding="utf-8"))
    assert set(measured["seconds"]) == {path.stem for path in (CHECKOUT / "notebooks").glob("*.ipynb")}
    assert measured["first_cell"].keys() == measured["seconds"].keys()
    assert max(measured["seconds"].values()) < 180
    assert measured["machine"]["cores"] == 2


def test_the_tiers_pass_right_rings_in_a_minute_and_in_ten() -> None:
    measured = json.loads((RESULTS / "check.json").read_text(encoding="utf-8"))
    assert {case["target"].split(":")[0] for case in measured["cases"]} == {
        "ringlab.attention",
        "ringlab.conformance.plain_distributed",
    }
    limits = {"quick": 60, "full": 600}
    assert {case["tier"] for case in measured["cases"]} == set(limits)
    for case in measured["cases"]:
        assert case["ok"] and case["checks"] >= 30 and case["seconds"] < limits[case["tier"]], case
    assert measured["machine"]["cores"] == 2
