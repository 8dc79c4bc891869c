"""The command line: `ringlab doctor`, `verify`, `check`, `bench`, `plan`, `simulate`, …

Other packages add commands by entry points: the groups "ringlab.commands", "ringlab.bench" and "ringlab.probes".
"""

from __future__ import annotations

import sys

import typer

from ringlab.cli import bench, check, doctor, kernels, plan, simulate, train, tune, verify
from ringlab.cli.contributed import ExtensibleGroup
from ringlab.errors import MissingExtraError

app = typer.Typer(
    name="ringlab",
    cls=ExtensibleGroup,
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
app.command("calibrate")(tune.calibrate)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("train")(train.train)


def main() -> None:
    """Run the command line; the exit status is 1 where something is not ok, 2 for a wrong call."""
    try:
        app()
    except MissingExtraError as error:
        sys.exit(f"ringlab: {error}")
