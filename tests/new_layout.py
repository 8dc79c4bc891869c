"""A program that registers a layout before it imports anything else, and prints where the layout can be used.

With "--in-a-copy" the layout is registered in a copy of the table instead, so that no place may accept it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ringlab import layout

NAME = "in-pairs"


def in_pairs(S: int, P: int) -> layout.Layout:
    """Return the layout that deals pieces of two tokens in turn."""
    return layout.dealt(S, P, chunk=2, name=NAME)


def known() -> dict[str, Any]:
    """Return, for each place that takes layouts, whether the new layout can be used there."""
    if "--in-a-copy" in sys.argv:
        dict(layout.LAYOUTS)[NAME] = in_pairs
    else:
        layout.LAYOUTS[NAME] = in_pairs
    return {place: _holds(check) for place, check in PLACES.items()}


def _holds(check: Any) -> bool:
    try:
        return bool(check())
    except Exception as error:  # each place refuses the name with a different error
        if NAME not in str(error):
            raise
        return False


def _trains() -> bool:
    import torch

    from ringlab import VirtualCluster
    from ringlab.nn.training import Recipe, train
    from ringlab.nn.transformer import ModelConfig

    torch.manual_seed(0)
    recipe = Recipe(ModelConfig(layers=1, hidden=16, heads=2, kv_heads=2), S=16, steps=1, layout=NAME)
    return len(VirtualCluster(2).run(train, recipe).results[0]) == 1


def _planned() -> bool:
    from ringlab.cost.planner import Request, plan
    from ringlab.cost.planner.request import LAYOUTS

    asked: dict[str, Any] = {"model": "llama3-8b", "hardware": "h100", "nodes": 8, "cp": 64, "ulysses": 1}
    long, longest = (plan(Request(tokens=tokens, layout=NAME, **asked)) for tokens in (2**20, 2**24))
    assert 200 < longest.best.step_s / long.best.step_s < 300, "attention grows as S²"
    return NAME in LAYOUTS and long.best.layout == NAME and f"--layout {NAME}" in long.request.command()


def _simulated() -> bool:
    from typer.testing import CliRunner

    from ringlab.cli import app

    command = [
        "simulate",
        "--tokens",
        "64",
        "--ranks",
        "4",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--layout",
        NAME,
    ]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0 or NAME in done.output, done.output
    return done.exit_code == 0


def _in_conformance() -> bool:
    from ringlab.conformance.target.claims import Target

    target = Target(lambda ring, q, k, v, layout: q).completed()
    found = target.known_layout(NAME, 8, 2)
    return NAME in target.claims().layouts and found == in_pairs(8, 2)


def _verified() -> bool:
    from ringlab.conformance import self_targets
    from ringlab.conformance.cases import covering

    return NAME in self_targets.ring.layouts and NAME in {case.layout for case in covering()}


def _in_labs() -> bool:
    from ringlab_course.lab.l2 import L2
    from ringlab_course.lab.l3 import L3
    from ringlab_course.lab.report import COLOURS

    return NAME in L2().layouts and NAME in COLOURS and L3("my.module:ring", layout=NAME).layout == NAME


def _drawn() -> bool:
    from ringlab_course.figures import ring_step
    from ringlab_course.figures.layout_tiles import LAYOUTS

    return NAME in LAYOUTS and NAME in ring_step.LAYOUTS


def _in_the_clinic() -> bool:
    from ringlab_course.clinic.case import Case

    return Case(2, 4, NAME).run.layout == NAME


def _off_limits() -> bool:
    from ringlab_course.checking.loading import load_exercise

    return all(f"{__name__}.in_pairs" in load_exercise(exercise).about for exercise in ("08", "21"))


PLACES = {
    "by name": lambda: layout.get_layout(NAME, 8, 2) == in_pairs(8, 2),
    "nn": _trains,
    "planner": _planned,
    "simulate": _simulated,
    "conformance": _in_conformance,
    "verify": _verified,
    "labs": _in_labs,
    "pictures": _drawn,
    "clinic": _in_the_clinic,
    "off limits where layouts are to be written": _off_limits,
}

if __name__ == "__main__":
    print(json.dumps(known()))
