"""The command line: `ringlab doctor`, `verify`, `check`, `bench`, `plan`, `simulate`, …

Other packages add commands by entry points of the groups "ringlab.commands", "ringlab.bench" and
"ringlab.probes".
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import ClassVar

import typer

from ringlab.cli.contributed import ExtensibleGroup
from ringlab.errors import MissingExtraError


class Commands(ExtensibleGroup):
    """The command `ringlab`, which contains all other commands."""

    entry_group = "ringlab.commands"
    own: ClassVar = {
        "doctor": "ringlab.cli.doctor:doctor",
        "verify": "ringlab.cli.verify:verify",
        "check": "ringlab.cli.check:check",
        "diff": "ringlab.cli.diff:diff",
        "bench": "ringlab.cli.bench:app",
        "kernels": "ringlab.cli.kernels:kernels",
        "tune": "ringlab.cli.tune:tune",
        "calibrate": "ringlab.cli.tune:calibrate",
        "plan": "ringlab.cli.plan:plan",
        "simulate": "ringlab.cli.simulate:simulate",
        "train": "ringlab.cli.train:train",
    }


app = typer.Typer(
    name="ringlab", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


@app.callback()
def about() -> None:
    """Ring attention, taught and verified."""


def _leave(number: int, frame: object) -> None:
    """End the process as Ctrl-C does, so that files are closed and temporary folders are removed."""
    sys.exit(128 + number)


def main() -> None:
    """Run the command line. The exit status is 1 if a result is not ok, and 2 for a wrong call."""
    # Imports leave no garbage, and garbage collections would take a tenth of the time of a short command.
    gc.set_threshold(50_000)
    if (
        "TORCHELASTIC_RUN_ID" not in os.environ
    ):  # ranks of torchrun may wait in calls that a Python handler cannot interrupt
        signal.signal(signal.SIGTERM, _leave)
    try:
        app()
    except MissingExtraError as error:
        sys.exit(f"ringlab: {error}")
