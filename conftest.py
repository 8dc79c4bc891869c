"""What notebooks under nbval need, also in `pytest --nbval notebooks` without tests/ beside it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

# A test run never reads or writes the learner's own progress.
_PROGRESS = Path(tempfile.mkdtemp(prefix="ringlab-progress-"))
os.environ["RINGLAB_PROGRESS"] = str(_PROGRESS / "progress.json")
# Notebooks run as they were built, with nobody there to move a widget; the browser test undoes this.
os.environ["RINGLAB_STATIC"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each notebook an empty progress file of its own, in place before its kernel starts."""
    if item.path.suffix == ".ipynb":
        progress = _PROGRESS / f"{item.path.parent.name}-{item.path.stem}.json"
        progress.touch()
        os.environ["RINGLAB_PROGRESS"] = str(progress)
