"""What notebooks under nbval need, also in `pytest --nbval notebooks` without tests/ beside it."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ringlab.temporary import TemporaryFolder

# All temporary files of a run, those of its workers and other processes too, lie in one folder, which goes with it.
# pytest's own folders stay where it keeps those of the last runs.
_TEMPORARY = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    _TEMPORARY = TemporaryFolder(prefix="ringlab-")  # a short name, because paths of sockets lie below it
    atexit.register(_TEMPORARY.cleanup)  # also of `pytest --help`, which begins no session
    os.environ["TMPDIR"] = tempfile.tempdir = _TEMPORARY.name
# No test may need an active environment: `make test` runs in one that is not.
os.environ["PATH"] = os.pathsep.join(
    folder
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep)
    if Path(folder) != Path(sys.executable).parent
)
# A test run never reads or writes the learner's own progress.
_PROGRESS = Path(tempfile.mkdtemp(prefix="progress-"))
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


_NOT_OURS = ("torchelastic_", "torchinductor_", "dask-scratch-space")
"""Beginnings of the names of folders that torch and Dask make and leave, whoever calls them."""


def left_behind() -> list[str]:
    """Return what processes of this run have left in its temporary folder; one that is just ending may take some seconds."""
    assert _TEMPORARY is not None
    deadline = time.monotonic() + 10
    while left := [path for path in Path(_TEMPORARY.name).iterdir() if not path.name.startswith(_NOT_OURS)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return sorted(path.name for path in left)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Fail a run in which a process left something in the temporary folder. The folder goes with this process."""
    yield
    shutil.rmtree(_PROGRESS, ignore_errors=True)
    if _TEMPORARY is None:
        return
    if left := left_behind():
        sys.stderr.write(f"\nleft in the temporary directory, which fails this run: {', '.join(left)}\n")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


_PATIENCE = 300.0
"""Seconds for a kernel to start, and to say what it has to say: only a failure takes so long."""


def pytest_configure(config: pytest.Config) -> None:
    """Have the kernels of nbval start without ports, and wait for them where the machine is busy.

    A port is looked for before the kernel starts, and may be another's when the kernel takes it: then it dies.
    """
    if not getattr(config.option, "nbval", False):
        return
    from jupyter_client.manager import KernelManager
    from nbval import kernel, plugin

    class Patient(kernel.RunningKernel):  # type: ignore[misc]
        def await_reply(self, msg_id: str, timeout: float | None = None) -> None:
            super().await_reply(msg_id, timeout and max(timeout, _PATIENCE))

    numbers = itertools.count()

    def on_files(**options: Any) -> KernelManager:
        return KernelManager(
            transport="ipc", connection_file=str(_PROGRESS / f"{next(numbers)}.json"), **options
        )

    plugin.RunningKernel = Patient
    config.option.nbval_kernel_startup_timeout = _PATIENCE
    if os.name == "posix" and len(str(_PROGRESS)) <= 80:  # a socket's path may have some hundred characters
        kernel.KernelManager = on_files


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each notebook an empty progress file of its own, in place before its kernel starts."""
    if item.path.suffix == ".ipynb":
        item.output_timeout = _PATIENCE  # type: ignore[attr-defined]
        progress = _PROGRESS / f"{item.path.parent.name}-{item.path.stem}.json"
        progress.touch()
        os.environ["RINGLAB_PROGRESS"] = str(progress)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where workers share the tests, begin with files that take long, so that no worker is left alone with one."""
    if hasattr(config, "workerinput"):
        long = {
            item.path for item in items if item.path.suffix == ".ipynb" or item.get_closest_marker("slow")
        }
        items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have xdist deal its workers whole files, in the order of collection.

    Its own `--dist loadgroup` deals single tests under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByFile(config, log)


def group_of(nodeid: str) -> str:
    """Return the tests that one worker runs together: those of a file; in a sweep of answers, those of an exercise.

    The files that look at the built pages are one group: a worker builds the pages once.
    """
    file, _, rest = nodeid.partition("::")
    if file.endswith(_PAGES):
        return "pages"
    return file + (rest.rpartition("[")[2][:2] if "[" in rest and file.endswith(_SWEEPS) else "")


_PAGES = tuple(f"site/test_{name}.py" for name in ("accessible", "formulas", "found", "playground", "site"))
_SWEEPS = ("course/test_submissions.py", "course/test_kill_matrix.py")
