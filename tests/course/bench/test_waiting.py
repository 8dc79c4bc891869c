"""`ringlab bench lessons` and `bench all` write result files, and replace no file whose benchmark fails."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from ringlab.cli import app
from ringlab.errors import CourseError
from ringlab_course.bench import everything
from ringlab_course.bench.waiting import bench_lessons

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[3]


def lesson(folder: Path, name: str, *code: str) -> None:
    path = folder / "notebooks" / f"{name}.ipynb"
    path.parent.mkdir(exist_ok=True)
    cells = [nbformat.v4.new_markdown_cell("# A lesson"), *map(nbformat.v4.new_code_cell, code)]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)


def test_a_first_cell_is_timed_apart_from_its_lesson_and_from_the_kernel(tmp_path: Path) -> None:
    lesson(tmp_path, "01_slow_first", "import time; time.sleep(1)", "time.sleep(2)")
    lesson(tmp_path, "02_other", "1 / 0")
    found = bench_lessons(["01"], tmp_path)
    assert list(found["seconds"]) == ["01_slow_first"]
    assert 0.7 < found["first_cell"]["01_slow_first"] < found["seconds"]["01_slow_first"] - 1
    assert found["kernel_start"] > 0 and found["machine"]["cores"]
    with pytest.raises(CourseError, match="ZeroDivisionError"):
        bench_lessons(["02"], tmp_path)
    with pytest.raises(CourseError, match="one of the lessons 01, 02"):
        bench_lessons(["2"], tmp_path)


def test_a_bench_that_fails_replaces_nothing_and_the_next_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benches = {
        "bad.json": "bench emulate --ranks 0",
        "waiting/good.json": "bench answers --runs 1",
        "left.json": "bench judge",
    }
    monkeypatch.setattr(everything, "BENCHES", benches)
    (tmp_path / "bad.json").write_text("as before")
    asked = ["bench", "all", "--output", str(tmp_path), "--only", "bad", "--only", "waiting", "--json"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 1 and json.loads(done.stdout)["ok"] is False
    assert list(json.loads(done.stdout)["failed"]) == ["bad.json"] and "--ranks" in done.stdout
    assert (tmp_path / "bad.json").read_text() == "as before"
    assert json.loads((tmp_path / "waiting/good.json").read_text())["cases"]
    assert not (tmp_path / "left.json").exists()
    wrong = CliRunner().invoke(app, [*asked[:4], "--only", "nothing"])
    assert wrong.exit_code == 2 and "waiting/good.json" in wrong.output
