"""The setup of every test run: shape checks, determinism, isolation, and the tests that may be skipped."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import secrets
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis
import jaxtyping._decorator
import numpy
import pytest
import torch
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook

from tests import chance, needs, shapes

CHECKOUT = Path(__file__).resolve().parents[1]

# Kernels run on a GPU if the machine has one, else in Triton's interpreter. Triton reads this variable when
# it is first imported, and nothing has imported it yet.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Otherwise jaxtyping imports jax, 125 MB in each worker, only to shorten jax's tracebacks.
jaxtyping._decorator._tb_flag = False

# Install the shape check before any module of ringlab is imported, because functions of modules that are
# already imported escape the check. Check only modules that name an array type: the check wraps every
# function of a module, which made the small functions of the virtual cluster five times slower.
install_import_hook(shapes.modules(), "tests.shapes.checked")

# These tests call the reference thousands of times, as its users do. Shapes are not checked in them, because
# that would double the time. Other tests check the reference's shapes.
UNCHECKED = (
    "tests/conformance/",
    "tests/course/",
    "tests/journey/",
    "tests/site/test_ring_model.py",
)

# The time to draw an example depends on what else the machine does.
TIMELESS = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("same", derandomize=True, database=None, **TIMELESS)
hypothesis.settings.register_profile("searching", **TIMELESS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        default="0",
        help="a number from which all draws of the tests follow, or 'fresh' for another one",
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    _one_thread_for_numpy()
    if config.option.seed == "fresh":
        config.option.seed = str(secrets.randbits(32))  # xdist passes this number to its workers
    chance.install(int(config.option.seed))


def pytest_report_header(config: pytest.Config) -> str:
    return f"draws: --seed {config.option.seed}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    chance.begin(item.config.option.seed, item.nodeid, "fixtures")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Seed all random draws of a test and its fixtures from the seed of the run and the test's name."""
    chance.begin(item.config.option.seed, item.nodeid)


def _one_thread_for_numpy() -> None:
    """Limit NumPy's BLAS to one thread, because small products in Triton's interpreter wait for every thread.

    BLAS reads OPENBLAS_NUM_THREADS when it is loaded. In this process, a plugin of pytest has loaded BLAS
    already, but the processes that tests start read the variable in time.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for library in Path(numpy.__file__).parent.with_name("numpy.libs").glob("*openblas*"):
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads"):
            if set_threads := getattr(ctypes.CDLL(str(library)), name, None):
                set_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell the garbage collector to skip the objects that collecting tests has made; they are never freed."""
    gc.collect()
    gc.freeze()


_settled = 0


def pytest_runtest_logfinish(nodeid: str, location: tuple[str, int | None, str]) -> None:
    """Return freed memory to the system after a test that left 100 MB more in use, because glibc keeps the pages."""
    global _settled
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and _resident_bytes() > _settled + (100 << 20):
        gc.collect()
        trim(0)
        _settled = _resident_bytes()


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_ALL_THOROUGH = re.compile(r"^pytestmark = \[?pytest\.mark\.thorough", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files with thorough tests only if none is selected, because some files import large packages."""
    if config.option.markexpr != "not thorough" or not collection_path.name.startswith("test_"):
        return None
    return True if _ALL_THOROUGH.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases of a sweep that only `make test-all` runs, and skip tests that cannot run on this machine.

    The name of a case decides whether the case is marked. Its place in the table would be a bad rule: the
    table has a regular order, so every n-th case would be of one kind. RINGLAB_REQUIRE_ALL=1 forbids
    skips, except for hardware that no package can bring.
    """
    for item in items:
        sweep = item.get_closest_marker("sweep")
        if sweep is not None and crc32(item.nodeid.encode()) % sweep.args[0] != 0:
            item.add_marker(pytest.mark.thorough)
    needs.skip_what_is_missing(items, needs.MAY_BE_ABSENT if needs.all_required() else needs.MISSING)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Turn skips into failures if everything is required, and print how to repeat a failed test's draws."""
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        report.sections.append(("draws", f"again with --seed {item.config.option.seed}"))
    allowed = hasattr(report, "wasxfail") or _said_by_absence(report)
    if needs.all_required() and report.skipped and not allowed:
        report.outcome = "failed"
        report.longrepr = f"skipped although RINGLAB_REQUIRE_ALL=1: {report.longrepr}"


def _said_by_absence(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Return the reason of a skip that is allowed even if everything is required."""
    reasons = (needs.MISSING[mark]() for mark in needs.MAY_BE_ABSENT)
    said = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
    return next((reason for reason in reasons if reason and said == f"Skipped: {reason}"), None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each missing program, package or device whose tests did not run, and peak memory."""
    reasons = [_said_by_absence(report) for report in terminalreporter.stats.get("skipped", [])]
    for reason in sorted(set(filter(None, reasons))):
        count = reasons.count(reason)
        terminalreporter.write_line(f"!!! {count} TESTS NOT RUN: {reason} !!!", yellow=True, bold=True)
    peaks = ", ".join(f"{peak / 1e9:.2f} GB in {name}" for name, peak in sorted(_peaks.items()))
    terminalreporter.write_line(f"peak of memory of any process: {peaks}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Treat a module that skips itself while it is collected like any other skip."""
    if needs.all_required() and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped although RINGLAB_REQUIRE_ALL=1: {report.longrepr}"


_peaks: dict[str, int] = {}
"""For each worker: the most bytes that it, or a process that it started, held at any time."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have a worker hand its peak of memory to the process that prints the summary."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    most = unit * max(resource.getrusage(each).ru_maxrss for each in whose)
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["peak_bytes"] = most
    elif not _peaks:
        _peaks["pytest"] = most


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Keep the peak of a worker that has ended."""
    if peak := getattr(node, "workeroutput", {}).get("peak_bytes"):
        _peaks[node.gateway.id] = peak


@pytest.fixture(autouse=True)
def shape_checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the shapes of functions only in the tests of the reference."""
    unchecked = request.node.nodeid.startswith(UNCHECKED)
    monkeypatch.setattr(jaxtyping_config, "jaxtyping_disable", unchecked)


@pytest.fixture(autouse=True)
def own_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each test a separate progress file."""
    monkeypatch.setenv("RINGLAB_PROGRESS", str(tmp_path / "progress.json"))
