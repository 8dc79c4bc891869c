"""Fixtures that undo the changes that nbgrader makes to this process's environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def environment_restored() -> Iterator[None]:
    """Begin each test as in an activated environment, and restore the environment for the next tests."""
    before = dict(os.environ)
    # nbgrader starts `alembic` without a path, so it must be on PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before.get('PATH', '')}"
    yield
    os.environ.clear()
    os.environ.update(before)
