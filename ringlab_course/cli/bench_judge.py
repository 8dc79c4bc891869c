"""`ringlab bench judge`: measure how fast the judge grades, and whether its memory use grows."""

from __future__ import annotations

from typing import Annotated

import typer

from ringlab.cli.bench import Output
from ringlab.cli.output import Json, for_people, people, progress_bar, reporting_errors


def judge(
    numpy: Annotated[int, typer.Option("--numpy", min=0, help="NumPy submissions.")] = 60,
    rings: Annotated[int, typer.Option("--ring", min=0, help="Ring submissions, four ranks each.")] = 10,
    eight: Annotated[
        int, typer.Option("--eight", min=0, help="Exercise 05 as the course grades it, up to eight ranks.")
    ] = 0,
    flat: Annotated[
        int, typer.Option("--flat", min=0, help="NumPy submissions during which memory is watched.")
    ] = 0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Notebooks graded at a time.")] = 2,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure how many submissions the judge grades in a minute, how it spends the time, and its memory.

    Needs a checkout and a quiet machine.
    """
    with reporting_errors(as_json), progress_bar() as bar:
        from ringlab_course.bench.judge import bench_judge

        counts = {"numpy": numpy, "ring": rings, "eight": eight, "flat": flat}
        task = bar.add_task("bench judge", total=sum(counts.values()))
        measured = bench_judge(counts, jobs, tick=lambda: bar.advance(task))
    if not for_people(measured, output, as_json):
        return
    for kind in filter(measured.get, counts):
        part = measured[kind]
        where = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in part["seconds_each"].items())
        people.print(
            f"{kind}: {part['per_minute']:.1f} a minute ({part['submissions']} of exercise {part['exercise']}; {where})",
            highlight=False,
        )
        for of, held in part["memory"].items():
            slope = held["kib_per_submission"]
            grows = "" if slope is None else f", {slope:+.1f} KiB with each submission"
            people.print(f"  {of}: {held['last_mib']:.0f} MiB{grows}", highlight=False)
