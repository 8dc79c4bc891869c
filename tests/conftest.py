"""What every test run has in common: shape checks, determinism, isolation, and what may be skipped."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

from tests import needs, shapes

# Before anything imports a module of ringlab, or its functions would escape the check.
# Only modules that name an array type: the hook wraps every function of a module, which made the
# virtual cluster's small ones five times slower.
install_import_hook(shapes.modules(), "tests.shapes.checked")

# The same examples every time where the verdict counts; fresh ones on a developer's machine.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, database=None)
hypothesis.settings.register_profile("developer", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "developer")


def pytest_configure(config: pytest.Config) -> None:
    # One thread each: two workers share two cores, and sums keep one order.
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what cannot run on this machine, with the remedy as the reason; RINGLAB_REQUIRE_ALL=1 forbids that."""
    if needs.all_required():
        return
    for mark, missing in needs.MISSING.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and (reason := missing()):
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Where everything is required, turn every skip into a failure."""
    outcome = yield
    report = outcome.get_result()
    if needs.all_required() and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped although RINGLAB_REQUIRE_ALL=1: {report.longrepr}"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that skips itself while it is collected is a skip like any other."""
    if needs.all_required() and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped although RINGLAB_REQUIRE_ALL=1: {report.longrepr}"


@pytest.fixture(autouse=True)
def own_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Give each test a progress file of its own."""
    monkeypatch.setenv("RINGLAB_PROGRESS", str(tmp_path / "progress.json"))
