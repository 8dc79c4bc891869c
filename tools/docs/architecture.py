"""docs/architecture.md: the floors, and every module with the first line of its docstring."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ..house.floors import FLOORS
from ..website.docstrings import first_sentence
from ..website.links import table

HEAD = """\
# Architecture

`make docs` writes this page from the modules' docstrings and from the table of floors in `tools/house/floors.py`.

Two packages: `ringlab` is the reference, `ringlab_course` the course. The course imports the reference, never the other
way round. Inside both, imports point down the floors below and form no circle; `tests/floors` holds every module to that.

Four axes stay apart, so that nothing is written once per combination: the **transport** carries messages
(`ringlab/comm`), the **block** computes attention of one query block on one K/V block (`ringlab/blocks`), the **layout**
says which rank owns which tokens (`ringlab/layout.py`), and the **schedule** says in which order blocks and rows meet
(`ringlab/schedules`). Traces, faults and clocks are wrappers around a transport.

## How a call runs

`ring_attention` in `attention.py` names the stages → `arguments.py` checks the arguments → `agreement.py` compares them
between ranks → a `Call` (`schedules/call.py`) holds what stays the same → the schedule (`schedules/ring.py` on
`schedules/block_schedule.py`) brings one K/V block after the other → `plan.py` says which tiles of it the rows see → the
block computes the tiles →
`merge.py` adds each partial result (out, lse) to the running one.

Backward walks the same way with the saved out and lse: `_RingAttention.backward` calls `BlockSchedule.backward`. K/V blocks
arrive again; after each, the schedule's `GradientReturn` sends the block's dk and dv one hop behind it, so that they reach the
owner after the last hop (`RingGradientReturn.add_block` in `schedules/ring.py`).

The ring in one file, without layouts, plans and schedules as objects: `ringlab/plain_ring.py`.
"""
BRIEF = {"ringlab_course/exercises"}
"""Packages whose subfolders are listed by their docstring or title only, not file by file."""


def page(root: Path) -> str:
    """Return the page for the checkout at `root`."""
    return "\n\n".join(part.strip("\n") for part in _parts(root)) + "\n"


def _parts(root: Path) -> Iterator[str]:
    yield HEAD
    yield "## The floors"
    rows = [
        (str(number), name, ", ".join(f"`{room}`" for room in rooms))
        for number, (name, rooms) in enumerate(FLOORS)
    ]
    yield table(("Floor", "", "Packages and modules"), rows)
    for number, (name, rooms) in enumerate(FLOORS):
        yield f"## Floor {number}: {name}"
        yield table(("Module", "Role"), [row for room in sorted(rooms) for row in _rows(root, room)])


def _rows(root: Path, room: str) -> Iterator[tuple[str, str]]:
    """Yield (module, role) of a module, or of a package and all modules in it."""
    path = root.joinpath(*room.split("."))
    if not path.is_dir():
        yield f"`{room.replace('.', '/')}.py`", _role(path.with_suffix(".py"))
        return
    name = room.replace(".", "/")
    yield f"**`{name}/`**", _role(path / "__init__.py")
    brief = name in BRIEF
    for file in sorted(path.rglob("*.py"), key=lambda file: (file.parent, file.name)):
        inside = file.relative_to(path)
        if file.name == "__init__.py":
            if len(inside.parts) > 1 and not brief:
                yield f"**`{inside.parent.as_posix()}/`**", _role(file)
        elif brief:
            if file.name == "contract.py":
                yield f"`{inside.parent.as_posix()}/`", _role(file)
        elif _has_docstring(file):
            yield f"`{inside.as_posix()}`", _role(file)


def _has_docstring(file: Path) -> bool:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) is not None


def _role(file: Path) -> str:
    """The first line of a module's docstring; "" if it has none."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return first_sentence(docstring.partition("\n")[0])
