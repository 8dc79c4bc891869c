"""Grade notebooks without a gradebook, and print every report in full."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from ringlab.cli.output import finish, print_json, progress_bar, stderr
from ringlab.errors import RinglabError
from ringlab_course.cli.grading import Request, UnderWay, above, exit_status, pool_for, stoppable, tell

if TYPE_CHECKING:
    from ringlab_course.gradebook.pool import Job, Outcome


def grade_plainly(request: Request) -> None:
    """Grade every notebook, print each report in full, and end with status 1 if points are missing."""
    from ringlab_course.gradebook.collect import notebooks
    from ringlab_course.gradebook.export import failed_briefly
    from ringlab_course.gradebook.pool import Job

    notes: list[str] = []
    files = notebooks(request.paths, notes)
    jobs = [
        Job(number, path, request.only or "", "", request.seed, request.unsafe, path.name, request.patience)
        for number, (path, _) in enumerate(files)
    ]
    outcomes = _outcomes(request, jobs)
    reports = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.number):
        if outcome.report is not None:
            report = outcome.report
            extra = {"score": report["earned_with_reference"], "maximum": report["points"]}
            reports.append(
                {
                    **report,
                    "path": _shown(jobs[outcome.number]),
                    **extra,
                    "failed_checks": failed_briefly(report),
                }
            )
    failed = [o for o in outcomes if o.report is None]
    ok = bool(reports) and not failed and all(report["ok"] for report in reports)
    tell(notes if files else [*notes, "no notebooks found there"])
    if request.as_json:
        print_json({"ok": ok, "submissions": reports, **_failures(jobs, failed)})
    finish(ok)


def _outcomes(request: Request, jobs: list[Job]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with progress_bar() as bar, stoppable():
        task = bar.add_task("grade", total=len(jobs))
        under_way = UnderWay(bar, task)
        try:
            with contextlib.closing(pool_for(request, len(jobs)).run(jobs, under_way.begin)) as found:
                for outcome in found:
                    outcomes.append(outcome)
                    under_way.end(jobs[outcome.number])
                    if outcome.error is not None and len(jobs) == 1:
                        raise outcome.error
                    _tell_outcome(jobs[outcome.number], outcome, None if request.as_json else above(bar))
        except KeyboardInterrupt as stop:
            stderr.print(f"stopped: {len(outcomes)} of {len(jobs)} graded", style="red")
            raise typer.Exit(exit_status(stop)) from None
    return outcomes


def _failures(jobs: list[Job], failed: list[Outcome]) -> dict[str, Any]:
    """Return the JSON entry of the notebooks that were not graded, or {} if all were graded."""
    ungraded = [{"path": _shown(jobs[each.number]), "reason": each.reason} for each in failed]
    return {"not_graded": ungraded} if ungraded else {}


def _tell_outcome(job: Job, outcome: Outcome, screen: Console | None) -> None:
    if outcome.report is None:
        tell([f"{_shown(job)}: not graded: {outcome.reason}"])
        return
    if screen is not None:
        _print_report(screen, _shown(job), outcome.report)
    _keep_progress(outcome.report)


def _keep_progress(report: dict[str, Any]) -> None:
    """Keep the grade in the progress file if the notebook is this course's own exercise, not a submission."""
    from ringlab.checkout import find_checkout
    from ringlab_course.notebook.progressfile import ProgressFile

    try:
        mine = Path(report["path"]).resolve().parent == find_checkout() / "exercises"
    except RinglabError:  # outside of a checkout, every notebook is somebody's submission
        return
    if mine:
        for stage in report["stages"]:
            checks = stage["checks"]
            earned = sum(check["points"] for check in checks if check["ok"] and check["counted"])
            points = sum(check["points"] for check in checks)
            ProgressFile().update("grades", stage["stage"], earned=earned, points=points)


def _print_report(screen: Console, path: str, report: dict[str, Any]) -> None:
    from ringlab_course.gradebook.readable import legible, with_reference

    def show(line: str) -> None:
        screen.print(line, highlight=False, soft_wrap=True)

    label = f" [{report['label']}]" if report["label"] else ""
    score, more = report["earned_with_reference"], report["earned_with_reference"] - report["earned"]
    helped = f", {more} of them with the reference's helpers" if more else ""
    show(f"{path}: {score} of {report['points']} points{helped}{label}")
    if report["reason"]:
        show(f"  {report['reason']}")
    for stage in report["stages"]:
        said: set[str] = set()
        for check in stage["checks"]:
            mark, earned = ("✓", check["points"]) if check["ok"] else ("✗", 0)
            if not check["counted"]:
                mark, earned = "○", 0
            show(f"  {mark} {stage['stage']} {check['title']} ({earned} of {check['points']})")
            if mark == "✓" or not check["message"]:
                continue
            show(f"      {'the same as above' if check['message'] in said else check['message']}")
            if check["counterexample"] and check["counterexample"] not in said:
                show(textwrap.indent(legible(check["counterexample"]), "        "))
            said |= {check["message"], check["counterexample"]}
        if again := with_reference(stage):
            show(f"  → {stage['stage']}: {again}")


def _shown(job: Job) -> str:
    """Return the path with control characters, and bytes that are not text, written as escapes."""
    from ringlab_course.gradebook.readable import shown_name

    return shown_name(job.path)
