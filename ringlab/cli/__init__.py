"""The command line: `ringlab doctor`, `verify`, `bench`, `kernels`, `tune`, `build`, `exercise`, `grade`, …"""

from __future__ import annotations

import typer

from ringlab.cli import (
    bench,
    calibrate,
    check,
    course,
    doctor,
    grade,
    gradebook,
    kernels,
    lab,
    nbgrader,
    plan,
    simulate,
    tune,
    verify,
)

app = typer.Typer(
    name="ringlab",
    help="Ring attention, taught and verified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.doctor)
app.command("verify")(verify.verify)
app.command("check")(check.check)
app.add_typer(bench.app, name="bench")
app.command("kernels")(kernels.kernels)
app.command("tune")(tune.tune)
app.command("calibrate")(calibrate.calibrate)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.add_typer(lab.app, name="lab")
app.command("build")(course.build)
app.add_typer(course.exercise, name="exercise")
app.command("grade")(grade.grade)
app.add_typer(gradebook.app, name="gradebook")
app.add_typer(nbgrader.app, name="nbgrader")
app.command("progress")(course.progress)


def main() -> None:
    """Run the command line; the exit status is 1 where something is not ok, 2 for a wrong call."""
    app()
