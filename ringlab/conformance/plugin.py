"""The pytest plugin: `pytest --ringlab-target package.module:function` makes each check a test."""

from __future__ import annotations

from typing import Any

import pytest

_REPORT: pytest.StashKey[Any] = pytest.StashKey()


class Failed(Exception):
    """A check that failed; its text is the evidence."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `ringlab check` that the tests need."""
    group = parser.getgroup("ringlab", "conformance of a ring attention")
    group.addoption(
        "--ringlab-target", metavar="MODULE:NAME", help="make a test of each conformance check of this target"
    )
    group.addoption("--ringlab-full", action="store_true", help="run the full tier instead of the quick one")
    group.addoption("--ringlab-seed", type=int, default=0, help="seed of all inputs")
    group.addoption(
        "--ringlab-limit", type=float, default=30.0, help="seconds for the import, and for each run"
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the checks after the collected tests."""
    target = config.getoption("--ringlab-target")
    if not target:
        return
    from ringlab.conformance import checks

    full = config.getoption("--ringlab-full")
    names = [checks.LOADS, *(each.name for each in checks.CHECKS if full or each.tier == "quick")]
    items.extend(CheckItem.from_parent(session, name=f"ringlab[{name}]", check=name) for name in names)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the parameters of the target to which no run gave a value."""
    report = config.stash.get(_REPORT, None)
    if report is not None and report.not_asked:
        terminalreporter.write_line(f"{report.target}: {report.unasked}")


class CheckItem(pytest.Item):
    """One check of the target as a test. The first one that runs makes the report of all checks."""

    def __init__(self, *, check: str, **options: Any) -> None:
        super().__init__(**options)
        self.check = check

    def runtest(self) -> None:
        """Pass, or skip the test if the check does not apply.

        Raises: Failed, with the evidence, if the check failed.
        """
        report = _report(self.session)
        finding = next(each for each in report.findings if each.name == self.check)
        self.add_report_section("call", "evidence", finding.evidence)
        if not finding.applies:
            pytest.skip(finding.evidence)
        if not finding.ok:
            smallest = f"\nsmallest: {finding.counterexample}" if finding.counterexample else ""
            right_if = f"\n{report.right_if}" if report.right_if else ""
            raise Failed(f"{finding.asks}\n{finding.evidence}{smallest}{right_if}")

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Return the evidence instead of a traceback of the plugin."""
        if isinstance(excinfo.value, Failed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return the location and the name printed before the verdict."""
        return self.path, None, f"{self.config.getoption('--ringlab-target')}: {self.check}"


def _report(session: pytest.Session) -> Any:
    """Return the report on all checks of this session, which is made only once."""
    config = session.config
    if _REPORT not in config.stash:
        from ringlab.conformance.suite import check

        config.stash[_REPORT] = check(
            config.getoption("--ringlab-target"),
            quick=not config.getoption("--ringlab-full"),
            seed=config.getoption("--ringlab-seed"),
            limit=config.getoption("--ringlab-limit"),
            only=[item.check for item in session.items if isinstance(item, CheckItem)],
        )
    return config.stash[_REPORT]
