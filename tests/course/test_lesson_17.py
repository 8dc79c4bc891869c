"""Lesson 17's last task prints "not yet" if it is unchanged or answered wrongly, and "done" if right."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringlab_course.builder.build import find_root
from ringlab_course.builder.sources import read_percent

pytestmark = pytest.mark.thorough

SOURCE = find_root() / "ringlab_course/lessons/17_ring_in_jax.py"
KEPT = {"P", "tokens", "text", "q", "even"}
"""Variables that the task uses. Besides these, only imports and functions of the other cells are run."""
ALL = "for step in range(1, layout.P):"
ANSWER = "for step in range(1, min(layout.P, -(-(window - 1) // q.shape[2]) + 1)):"


def needed(cell: str, first: bool) -> str:
    """Return the statements of a cell that the lesson's last task needs.

    The first cell sets up JAX, so all its statements are returned.
    """
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    body = [
        node
        for node in ast.parse(cell).body
        if first or isinstance(node, kinds) or (isinstance(node, ast.Assign) and KEPT & names(node))
    ]
    return "\n".join(ast.unparse(node) for node in body)


def names(node: ast.Assign) -> set[str]:
    return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def task(loop: str) -> str:
    """Return a script of the task with `loop` in place of the loop that visits every rank."""
    *cells, last = [cell.source for cell in read_percent(SOURCE).cells if cell.cell_type == "code"]
    script = "\n".join(needed(cell, cell is cells[0]) for cell in cells)
    before, _, after = script.rpartition(ALL)
    assert before and "near(step)" in after, "the task no longer has this loop"
    return f"{before}{loop}{after}\n{last}"


@pytest.mark.needs_jax
@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (ANSWER, ["values right: True   messages: 4", "done"]),
        ("for step in range(1, 2):", ["values right: False   messages: 2", "not yet"]),
        ("for step in (2, 1):", ["values right: False   messages: 4", "not yet"]),
    ],
)
def test_the_task_judges_itself(loop: str, told: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", task(loop)],
        cwd=tmp_path,
        env=os.environ | {"RINGLAB_STATIC": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line[: len(want)] for line, want in zip(done.stdout.splitlines()[-2:], told, strict=True)] == told
