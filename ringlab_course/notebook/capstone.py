"""Functions that exercise 21 calls: run the conformance suite on the learner's functions, and show a table.

The table compares the learner's reports with the reports on known packages that are part of the repository.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from ringlab.errors import CourseError
from ringlab.viz.frontend import in_notebook

FUNCTIONS = ("owned", "attend_block", "merge", "ring_forward", "ring_backward")
REPORTS = ("benchmarks/results/conformance", "docs")
"""The folders of a checkout that contain reports of the suite, as JSON."""
HOLDS, FAILS, NOT_ASKED = "✓", "✗", "–"


@dataclass(frozen=True)
class Column:
    """One target in the table: its name, the result of each check, and how the target was run.

    checks: whether each check holds, or None if the check does not apply to this target.
    """

    name: str
    checks: Mapping[str, bool | None]
    about: str = ""

    def mark(self, check: str) -> str:
        """Return the table's mark for a check: holds, fails, does not apply, or "" if it was not run."""
        if check not in self.checks:
            return ""
        holds = self.checks[check]
        return NOT_ASKED if holds is None else HOLDS if holds else FAILS


@dataclass(frozen=True)
class _Forward:
    """The learner's forward ring as the suite calls it; gradients come from the learner's own backward."""

    function: Callable[..., Any]

    def __call__(
        self, ring: Any, q: Any, k: Any, v: Any, positions: Any, causal: bool, scale: float | None
    ) -> Any:
        import torch

        with torch.no_grad():
            answer = self.function(ring, q, k, v, positions, causal, scale)
        return answer


@dataclass(frozen=True)
class _Backward:
    function: Callable[..., Any]

    def __call__(
        self, ring: Any, q: Any, k: Any, v: Any, positions: Any, causal: bool, scale: float | None,
        dout: Any, out: Any, lse: Any,
    ) -> Any:  # fmt: skip
        import torch

        with torch.no_grad():
            return self.function(ring, dout, q, k, v, out, lse, positions, causal, scale)


def target(namespace: Mapping[str, Any]) -> Any:
    """Return the five functions as a `ringlab.conformance.Target` that claims to support everything.

    Its layouts are those of the learner's `owned`. Raises: CourseError if one of the five functions is
    missing.
    """
    from ringlab.conformance import Target
    from ringlab_course.exercises.e21_capstone.parts import OWNERS

    missing = [name for name in FUNCTIONS if not callable(namespace.get(name))]
    if missing:
        raise CourseError(
            f"the functions {', '.join(FUNCTIONS)}", f"no {', '.join(missing)}", "run the cells above"
        )
    layouts = {name: partial(namespace["owned"], name) for name in OWNERS}
    return Target(
        _Forward(namespace["ring_forward"]),
        "your ring",
        over="ring",
        layouts=layouts,
        causal=(False, True),
        gradients=_Backward(namespace["ring_backward"]),
    )


def conform(
    namespace: Mapping[str, Any] | None = None,
    *,
    transport: str = "virtual",
    quick: bool = True,
    **asked: Any,
) -> Any:
    """Return the conformance suite's report on the learner's five functions.

    They run on virtual ranks, or on processes with transport="gloo". The functions are taken from
    `namespace`, by default from the notebook, and run in separate processes. One line is printed for each
    check that fails.
    asked: further options of `ringlab.conformance.check`, such as only=("masks",).
    """
    from ringlab.conformance import check

    if namespace is None:
        namespace = sys._getframe(1).f_globals
    report = check(target(namespace), transport=transport, quick=quick, **asked)
    where = "virtual ranks" if transport == "virtual" else f"{transport} processes"
    applied = [finding for finding in report.findings if finding.applies]
    print(f"on {where}: {sum(finding.ok for finding in applied)} of {len(applied)} checks hold")
    for finding in report.findings:
        if not finding.ok:
            print(f"  {FAILS} {finding.name}: {finding.evidence}")
            if finding.counterexample:
                print(f"      smallest counterexample: {finding.counterexample}")
    return report


def known_reports(root: str | os.PathLike[str] | None = None) -> tuple[Column, ...]:
    """Return the committed reports on known packages below `root`, by default in this checkout.

    The result is empty if no reports are found.
    """
    base = Path(__file__).resolve().parents[2] if root is None else Path(root)
    found: dict[str, Column] = {}
    for folder in REPORTS:
        for path in sorted((base / folder).rglob("*.json")):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            for report in _reports_in(content):
                column = _column(_label(report), report, _about(report))
                found.setdefault(column.name, column)
    return tuple(found.values())


def beside(*yours: Any, known: Sequence[Column] | None = None) -> None:
    """Show a table with a row for each check, and a column for each report of `yours` and of `known`."""
    known = known_reports() if known is None else tuple(known)
    columns = [_column(f"yours, {report.transport}", report.as_dict()) for report in yours]
    columns += [replace(column, name=letter) for letter, column in zip(ascii_lowercase, known, strict=False)]
    rows = list(dict.fromkeys(check for column in columns for check in column.checks))
    if columns:
        _table(columns, rows)
    for letter, column in zip(ascii_lowercase, known, strict=False):
        print(f"{letter}  {column.name}{column.about}")
    if not known:
        print("No committed reports of known packages are here: a checkout of the course may have them.")


def _table(columns: Sequence[Column], rows: Sequence[str]) -> None:
    _show(
        [["check", *(column.name for column in columns)]]
        + [[row, *(c.mark(row) for c in columns)] for row in rows]
    )
    print(f"{HOLDS} holds   {FAILS} fails   {NOT_ASKED} does not apply to what it claims   empty: not asked")


def _reports_in(content: Any) -> Iterator[dict[str, Any]]:
    """Yield every report of the suite in a JSON document, at any depth."""
    if isinstance(content, dict):
        checks = content.get("checks")
        if isinstance(checks, list) and all(isinstance(c, dict) and {"name", "ok"} <= set(c) for c in checks):
            yield content
            return
        for each in content.values():
            yield from _reports_in(each)
    elif isinstance(content, list):
        for each in content:
            yield from _reports_in(each)


def _label(report: Mapping[str, Any]) -> str:
    names = [report.get(key) for key in ("study", "package", "name", "target") if report.get(key)]
    version = report.get("version")
    return f"{names[0] if names else 'unnamed'}{f' {version}' if version else ''}"


def _about(report: Mapping[str, Any]) -> str:
    """Return how a known package was run, according to its report."""
    tier = "quick tier" if report.get("quick") else "full tier"
    claims = report.get("claims") or {}
    less = [
        f"{name}: {', '.join(map(str, claims[name]))} only"
        for name in claims
        if isinstance(claims[name], list)
    ]
    kernel = f"kernel: {report['kernel']}" if report.get("kernel") else ""
    parts = [kernel, *less, tier, str(report.get("date", ""))]
    return f" ({'; '.join(filter(None, parts))})"


def _column(name: str, report: Mapping[str, Any], about: str = "") -> Column:
    checks = {
        each["name"]: bool(each["ok"]) if each.get("applies", True) else None for each in report["checks"]
    }
    return Column(name, checks, about)


def _show(rows: list[list[str]]) -> None:
    if in_notebook():
        from IPython.display import Markdown, display

        rules = ["---", *(":-:" for _ in rows[0][1:])]
        lines = [
            f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in (rows[0], rules, *rows[1:])
        ]
        display(Markdown("\n".join(lines)))
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
