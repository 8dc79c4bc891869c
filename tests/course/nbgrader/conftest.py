"""nbgrader writes into this process's environment, and leaves it there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def environment_restored() -> Iterator[None]:
    """Start as in an activated environment; give the next tests, notebooks among them, the environment as it was."""
    before = dict(os.environ)
    # nbgrader starts `alembic` by its bare name.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before.get('PATH', '')}"
    yield
    os.environ.clear()
    os.environ.update(before)
