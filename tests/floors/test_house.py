"""`make house` prints its table, and its figures are the right ones on a made-up tree whose figures are known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.house import figures
from tools.house.imports import CHECKOUT

TREE = {
    "README.md": "x" * 6001,
    "pyproject.toml": '[project]\ndependencies = ["numpy>=2.0", "jupyterlab", "triton; sys_platform == \'linux\'"]\n',
    "docs/kill-matrix.md": "",
    "ringlab/__init__.py": "HOME = {'zigzag': 'a.b', 'striped': 'a.b', 'contiguous': 'a.b'}\n",
    "ringlab/errors.py": "from ringlab.layout import zigzag\n",
    "ringlab/layout.py": "from ringlab.errors import LayoutError\n\n\ndef zigzag(x: Tensor):\n    raise LayoutError(x)\n",
    "ringlab/plain_ring.py": "from ringlab.comm.ring import Ring\n" + "\n" * 200,
    "ringlab/cost/sizes.py": "LAYOUTS = ('zigzag', 'striped', 'contiguous')\nclass Size:\n    def bytes(self): pass\n",
    "ringlab/nn/training.py": "make = {'a': zigzag, 'b': striped, 'c': contiguous}\nfirst = {'zigzag': 1, 'striped': 2}\n",
    "ringlab/viz/style.py": "def f():\n    table = {'zigzag': red, 'striped': 'blue', 'contiguous': lambda: 1}\n",
    "ringlab/blocks/__init__.py": "def known(): pass\n" + "\n" * 300,
    "ringlab_course/__init__.py": "",
    "ringlab_course/exercises/e01_one/contract.py": 'WRONG = [Misconception("adds", "You added.")]\n',
    "ringlab_course/exercises/e01_one/wrong_answers.md": "",
    "ringlab_course/exercises/e01_one/right/loops.py": "import ringlab.nowhere\n",
    **{f"ringlab_course/exercises/e02_two/part{number}.py": "" for number in range(9)},
    "tests/course/submissions/01/wrong_adds.py": "# misconception: adds\n\n",
    "benchmarks/results/waiting/tests.json": (
        '{"seconds": 630, "peak_gb": 0.5, "machine": {"cores": 2, "date": "2026-11-23T10:00:00"}}'
    ),
}
KNOWN = {
    "circles of imports": ("1: ringlab.errors ↔ ringlab.layout", False),
    "imports upward": ("1", False),
    "README": ("6.0 KB", True),
    "to read for the ring, forward and backward": ("1 file, 201 lines; imports ringlab.comm.ring", True),
    "files in an exercise's folder, beside right/": ("2 (e01_one) to 9 (e02_two)", True),
    "tests/course/submissions": ("1 files, 2 lines", False),
    "places of a mistake": (
        "4: Misconception(…), headers of submissions, wrong_answers.md, docs/kill-matrix.md",
        False,
    ),
    "tables of layout names": ("2: ringlab.cost.sizes, ringlab.viz.style", False),
    "base install": ("3: numpy, jupyterlab, triton", False),
    "files above 300 lines in ringlab": ("1 of 7", True),
    "files above 300 lines in ringlab_course": ("0 of 10", True),
    "lines of ringlab": ("516", True),
    "lines of ringlab_course": ("2", True),
    "exported names without a runnable example": ("1", False),
    "public methods without a docstring": ("1", False),
    "public functions that raise without `Raises:`": ("1", False),
    "public functions with arrays without axes": ("1", False),
    "`make test` from a fresh clone": ("10.5 min on 2 cores, 2026-11-23", False),
    "memory of a process of `make test`": ("0.50 GB on 2 cores, 2026-11-23", True),
    "files in git": ("3", True),
}  # fmt: skip


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "README.md", "pyproject.toml", "docs"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize("name", KNOWN)
def test_a_figure_is_the_right_one(name: str, made_up: Path) -> None:
    found = {row.name: (row.measured, row.ok) for row in figures.figures(made_up)}
    assert found[name] == KNOWN[name]


def test_every_figure_is_tested(made_up: Path) -> None:
    assert [row.name for row in figures.figures(made_up)] == [*KNOWN]


def test_a_tree_as_it_is_wanted_is_marked(made_up: Path) -> None:
    (made_up / "ringlab/errors.py").write_text("")
    (made_up / "ringlab/plain_ring.py").write_text("import math\n")
    rows = {row.name: row for row in figures.figures(made_up)}
    for name in ("circles of imports", "imports upward"):
        assert rows[name].ok, rows[name]
    assert rows["to read for the ring, forward and backward"].measured == "1 file, 1 lines; imports nothing"
    (made_up / "ringlab/plain_ring.py").unlink()
    (row,) = figures.of_the_ring(made_up)
    assert not row.ok and row.measured == "no ringlab/plain_ring.py"


TIMINGS = {"`make test` from a fresh clone", "memory of a process of `make test`"}
"""Rows that a machine decides, not the tree; their results are not committed."""


def test_the_command_prints_the_table_of_this_tree_and_the_tree_is_as_it_is_wanted() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.house"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [name for _, name, *_ in rows] == [*KNOWN]
    assert [row for row in rows if row[0] != "| ✓" and row[1] not in TIMINGS] == []


def test_the_command_names_what_is_missing() -> None:
    command = [sys.executable, "-m", "tools.house", "--missing"]
    done = subprocess.run([*command, "axes", "nowhere"], cwd=CHECKOUT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n")
    done = subprocess.run([*command, "shapes", "comm"], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 2 and "needed: one of examples, methods, raises, axes" in done.stderr
