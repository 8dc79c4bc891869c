"""Imports point down only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.floors import direction

MODULES = dict(direction.modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    path = MODULES[module]
    assert direction.upward(module, path.read_text(), is_package=path.name == "__init__.py") == []


def test_the_package_was_found() -> None:
    assert {"ringlab.errors", "ringlab.oracle", "ringlab.comm.ring", "ringlab.blocks"} <= MODULES.keys()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringlab.errors", "import ringlab.layout"),
        ("ringlab.merge", "from ringlab.blocks.naive import Naive"),
        ("ringlab.plan", "def late():\n    from ringlab.comm import ring"),
        ("ringlab.oracle", "if TYPE_CHECKING:\n    from ringlab.cli import main"),
        ("ringlab.blocks.naive", "from ringlab import attention"),
        ("ringlab.comm.ring", "from ..schedules import ring"),
        ("ringlab.comm.ring", "from .. import course"),
        ("ringlab.conformance.tolerance", "from ringlab.viz import ring_view"),
    ],
)
def test_an_upward_import_is_caught(module: str, source: str) -> None:
    assert len(direction.upward(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ringlab.plan", "from ringlab.layout import Layout"),
        ("ringlab.comm.ring", "from . import trace\nfrom ..errors import CommError"),
        ("ringlab.cli", "from ringlab import attention, oracle\nimport torch"),
    ],
)
def test_a_downward_import_passes(module: str, source: str) -> None:
    assert direction.upward(module, source) == []


def test_a_module_without_a_floor_is_caught() -> None:
    with pytest.raises(LookupError, match="stands on no floor"):
        direction.upward("ringlab.utils", "import math")


def test_the_oracle_stands_on_numpy_alone() -> None:
    allowed = {"__future__", "collections", "math", "typing", "numpy", "jaxtyping", "ringlab"}
    tree = ast.parse(Path(MODULES["ringlab.oracle"]).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= allowed
    assert {name for name in names if name.startswith("ringlab")} <= {"ringlab.errors"}
