"""What notebooks under nbval need, also in `pytest --nbval notebooks` without tests/ beside it."""

from __future__ import annotations

import os
import re
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
# Where these are missing, their notebooks say so and stop, which nbval would count as a failure. Triton is for Linux
# on x86-64; an extra can be installed anywhere, so where everything is required its notebook runs and fails.
_NEEDS = {"triton": r"needs_triton\(\)"}
if os.environ.get("RINGLAB_REQUIRE_ALL") != "1":
    _NEEDS["jax"] = r"needs_extra\(\W+jax\W+\)"
_LEFT_OUT = {
    str(path): module
    for module, call in _NEEDS.items()
    if find_spec(module) is None
    for folder in ("notebooks", "solutions")
    for path in sorted((_HERE / folder).glob("*.ipynb"))
    if re.search(call, path.read_text(encoding="utf-8"))
}
collect_ignore = [*_LEFT_OUT]


def pytest_report_header() -> list[str]:
    """Say which notebooks are left out, and for want of what."""
    return [
        f"not run, as {module} is not installed here: {Path(path).name}" for path, module in _LEFT_OUT.items()
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each notebook an empty progress file of its own, in place before its kernel starts."""
    if item.path.suffix == ".ipynb":
        progress = _PROGRESS / f"{item.path.parent.name}-{item.path.stem}.json"
        progress.touch()
        os.environ["RINGLAB_PROGRESS"] = str(progress)
