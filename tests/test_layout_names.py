"""Layouts by name: one table, and a layout in it can be used everywhere."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ringlab.errors import LayoutError
from ringlab.layout import LAYOUTS, get_layout, layout_names
from tests.new_layout import PLACES


def places(*options: str) -> dict[str, bool]:
    """Return where a layout is known that a process of its own has registered before it imported anything else."""
    command = [sys.executable, "-m", "tests.new_layout", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_registered_layout_is_known_everywhere() -> None:
    assert places() == dict.fromkeys(PLACES, True)


def test_a_layout_in_another_table_is_known_nowhere() -> None:
    assert places("--in-a-copy") == dict.fromkeys(PLACES, False)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_made_by_its_name(name: str) -> None:
    made = get_layout(name, 11, 3)
    assert made == LAYOUTS[name](11, 3) and made.name == name and name in layout_names()


def test_an_unknown_layout_names_those_that_are_known() -> None:
    with pytest.raises(LayoutError, match="(?s)a layout among contiguous, striped, zigzag.*spiral"):
        get_layout("spiral", 8, 2)
