"""What notebooks under nbval need, also in `pytest --nbval notebooks` without tests/ beside it."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

# A test run never reads or writes the learner's own progress.
_PROGRESS = Path(tempfile.mkdtemp(prefix="ringlab-progress-"))
os.environ["RINGLAB_PROGRESS"] = str(_PROGRESS / "progress.json")
# Notebooks run as they were built, with nobody there to move a widget; the browser test undoes this.
os.environ["RINGLAB_STATIC"] = "1"

_HERE = Path(__file__).parent
# Triton is for Linux on x86-64; elsewhere its notebooks say so and stop, which nbval would count as a failure.
collect_ignore = [
    str(path)
    for folder in ("notebooks", "solutions")
    for path in sorted((_HERE / folder).glob("*.ipynb"))
    if find_spec("triton") is None and "needs_triton()" in path.read_text(encoding="utf-8")
]


def pytest_report_header() -> list[str]:
    """Say which notebooks are left out."""
    names = ", ".join(Path(name).name for name in collect_ignore)
    return [f"not run, for they need Triton, which is not installed here: {names}"] if names else []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each notebook an empty progress file of its own, in place before its kernel starts."""
    if item.path.suffix == ".ipynb":
        progress = _PROGRESS / f"{item.path.parent.name}-{item.path.stem}.json"
        progress.touch()
        os.environ["RINGLAB_PROGRESS"] = str(progress)
