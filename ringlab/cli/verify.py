"""`ringlab verify`: compares ringlab's attention with the oracle on every case of the case table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ringlab.cli.output import Json, finish, people, print_json, progress_bar, reporting_errors

if TYPE_CHECKING:
    from ringlab.conformance.verify import Finding


def verify(
    quick: Annotated[bool, typer.Option("--quick", help="A selection of the cases, under a minute.")] = False,
    as_json: Json = False,
) -> None:
    """Compare every transport, block, schedule, layout, mask and dtype with the float64 oracle."""
    from ringlab.conformance.verify import jobs, summary
    from ringlab.conformance.verify import verify as run

    selected = jobs(quick)
    with reporting_errors(as_json):
        with progress_bar() as bar:
            task = bar.add_task("verify", total=len(selected))
            findings = run(selected, lambda finding: bar.advance(task))
        found = summary(findings)
    if as_json:
        print_json(found)
    else:
        people.print(_table(findings))
        verdict = "all within their bounds" if found["ok"] else f"{len(found['failed'])} beyond their bounds"
        people.print(f"{found['cases']} cases, {verdict}; a bound is 2× the plainest implementation's error")
    finish(found["ok"])


def _table(findings: list[Finding]) -> Table:
    """Return a table with the case closest to its bound for each transport, block, layout and dtype."""
    table = Table(title="errors against the float64 oracle, relative to the largest true value")
    for column in ("transport", "block", "layout", "dtype", "cases", "worst", "error", "bound", ""):
        table.add_column(
            column, no_wrap=True, justify="right" if column in ("cases", "error", "bound") else "left"
        )
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        job = finding.job
        groups.setdefault((job.transport, job.block, job.case.layout, job.case.dtype), []).append(finding)
    for key, group in sorted(groups.items()):
        worst = max(group, key=lambda finding: finding.ratios[finding.worst])
        name, ok = worst.worst, all(finding.ok for finding in group)
        error, bound = f"{worst.errors[name]:.1e}", f"{worst.bounds[name]:.1e}"
        mark = Text("✓", "green") if ok else Text("✗", "red")
        table.add_row(*key, str(len(group)), name, error, bound, mark)
    return table
