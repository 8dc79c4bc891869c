"""The contract by which hostile functions are graded. Each check makes three calls, of increasing size.

The file also has code with which several hostile submissions begin.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import numpy as np

from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Check, Exercise, Stage
from tests.course.judge.small_contract import HINTS

SECRET = 31337.0
"""A number that only hidden probes contain."""


def _visible(subject, rng) -> None:
    for _ in range(3):
        x = rng.standard_normal(5)
        compare_with(subject.call(x), 2 * x, bound=1e-12)


def _hidden(subject, rng) -> None:
    for rows in range(3, 6):
        x = rng.standard_normal((rows, 4)).astype(np.float32)
        x[0, 0] = SECRET
        compare_with(subject.call(x), 2 * x, bound=1e-6, case=f"probe {x.tolist()}")


class _Tensors:
    """A subject that turns a check's arrays into tensors and then calls the submission's function."""

    def __init__(self, subject) -> None:
        self.subject = subject

    def call(self, x):
        import torch

        return self.subject.call(torch.from_numpy(x))


def _with_tensors(check):
    return lambda subject, rng: check(_Tensors(subject), rng)


def stage(name: str, torch: bool = False) -> Stage:
    """Return a stage in which the function `name` must double its argument, an array or a tensor."""
    seen, hidden = (_with_tensors(check) if torch else check for check in (_visible, _hidden))
    checks = (
        Check("seen", 2, "visible", "what a notebook shows", seen),
        Check("hidden", 3, "held-out", "what it does not", hidden),
    )
    return Stage(id=f"90.{name}", function=name, title=name, hints=HINTS, checks=checks)


EXERCISE = Exercise(id="90", slug="90_hostile", title="hostile", stages=(stage("double"),))


def together(sources: Mapping[str, str]) -> tuple[list[str], Exercise]:
    """Return the cells of one notebook with all `sources`, and an exercise with a stage for each source.

    The names that a source defines are changed, so that no source disturbs another.
    """
    cells = [own(source, number) for number, source in enumerate(sources.values())]
    tensors = any("import torch" in cell for cell in cells)
    stages = tuple(stage(f"double_{number}", tensors) for number in range(len(sources)))
    return cells, Exercise(id="90", slug="90_hostile", title="hostile", stages=stages)


def own(source: str, number: int) -> str:
    """Return `source` with `number` appended to its top-level names, which makes them unique."""
    for name in _names(ast.parse(source)):
        source = re.sub(rf"(?<![\w.]){name}\b", f"{name}_{number}", source)
    return source


def _names(tree: ast.Module) -> set[str]:
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assigned = (node.targets for node in tree.body if isinstance(node, ast.Assign))
    return defined | {t.id for targets in assigned for t in targets if isinstance(t, ast.Name)}


CHANNEL = """
import sys
def channel():
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if type(value).__name__ == "Channel":
                return value
        frame = frame.f_back
"""
"""Code that finds the worker's end of its socket on the stack."""
