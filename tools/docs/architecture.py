"""docs/architecture.md: how a call runs, the floors, and every module with its role."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ..website.docstrings import first_sentence, to_markdown
from ..website.links import table

HEAD = """\
# Architecture

How a call runs through the code, which modules may import which, and what each module is for.

**Read [ringlab/plain_ring.py](../ringlab/plain_ring.py) first**: the ring in one file, forward and backward, without layouts, plans
and schedules as objects.

Two packages: `ringlab` is the reference, `ringlab_course` the course. The course imports the reference, never the other
way round. Inside both, a module imports only from its own floor or from one with a lower number, and imports form no circle.
`make style` and `tests/floors` hold every module to that.

Four axes stay apart, so that nothing is written once per combination: the **transport** carries messages
(`ringlab/comm`), the **block** computes attention of one query block on one K/V block (`ringlab/blocks`), the **layout**
says which rank owns which tokens (`ringlab/layout.py`), and the **schedule** says in which order blocks and rows meet
(`ringlab/schedules`). Traces, faults and strict rules are wrappers around a transport; virtual time belongs to transports
(`ringlab/comm/virtual`, `ringlab/comm/clocked`).

Nothing imports `ringlab_course/lessons/`, the sources of the lessons' notebooks, so they are on no floor.

## How a call runs

| Forward, in call order | Where, in `ringlab/` |
| --- | --- |
| `ring_attention` runs the stages of a call | `attention.py` |
| `check_arguments` checks this rank's arguments and makes the `AttentionCall`, which stays the same while blocks travel | `arguments.py`, `schedules/call.py` |
| `agree_on` has the ranks compare their calls, each described in 512 bytes, if `validate`; `errors_told` tells them of an error | `attention.py`, `rank_agreement.py` |
| `_RingAttention.forward` calls the schedule's `forward`; `RingSchedule`, the default, inherits it from `BlockSchedule` | `attention.py`, `schedules/block_schedule.py` |
| `RingSchedule.arriving_blocks` yields K/V blocks one by one; before each but the last `circulate` posts the exchange that brings the next | `schedules/ring.py`, `schedules/route.py` |
| `Ring.post` sends to the next rank; the transport is a `VirtualCluster`'s, or `DistributedComm` among processes | `comm/ring.py`, `comm/virtual/cluster.py`, `comm/processes/distributed.py` |
| `attend_to_block` hands over the block with the tiles that this rank's rows see | `schedules/call.py`, `plan.py` |
| `TilewiseForward.attend` has the block backend compute each tile | `blocks/tilewise.py` |
| `Native.forward`, the default, returns (out, lse) of a tile | `blocks/native.py` |
| `RunningPartial.add` merges the tile's (out, lse) with those of earlier tiles by `merge_into` | `blocks/tilewise.py`, `merge.py` |

| Backward, with the saved out and lse | Where, in `ringlab/` |
| --- | --- |
| `_RingAttention.backward` compares the ranks' calls again, if `validate` | `attention.py` |
| `run_backward` calls the schedule's `backward`; `RingSchedule`, the default, inherits it from `BlockSchedule` | `attention.py`, `schedules/block_schedule.py` |
| `row_delta` computes delta = rowsum(dout·out) for all of this rank's rows | `schedules/block_schedule.py` |
| `RingSchedule.gradient_return` makes the `RingGradientReturn`, which holds the `Couriers` | `schedules/ring.py` |
| `RingSchedule.arriving_blocks` brings the K/V blocks again, in the same order | `schedules/ring.py` |
| `differentiate_block` hands over each block with its tiles | `schedules/call.py` |
| `TilewiseBackward.differentiate` sums dq, and returns dk and dv of each tile | `blocks/tilewise.py` |
| `Native.backward`, the default, computes dq, dk and dv of a tile | `blocks/native.py` |
| `RingGradientReturn.add_block` takes the sums that have arrived, has `sum_gradients` add dk and dv to them, and sends them on | `schedules/ring.py` |
| `Couriers.arrived` and `Couriers.send_on` receive and send the sums, one step behind their block; from the last stop they go home to the owner | `schedules/route.py` |
| `RingGradientReturn.own_gradients` returns the sums of this rank's own block, after P hops, or fewer if the mask hides all blocks at some distance | `schedules/ring.py` |
| `run_backward` gives each gradient its dtype, and `_RingAttention.backward` returns dk in the place of k | `attention.py` |

Under torch.compile, the operator `ringlab::attention` (`_operator`, `attention.py`) takes the place of `_RingAttention`. It passes through the
same stages while the graph runs. Rings, layouts and masks reach it by number (`handles.py`), and `ringlab::attention_backward` finds what
forward kept by a ticket (`torch_modes.py`).

`block="auto"`, the default, is `native` (torch's flash attention) on a CPU, and on a GPU for float16 and bfloat16. It is
`blockwise` where `native` cannot compute a tensor, such as float32 on a GPU, and under a soft cap or dropout. `AUTO`
(`blocks/__init__.py`) is the list from which it chooses. `native`, `cudnn` and `flash` are one class, `LibraryBlock` (`blocks/library.py`),
with other limits and functions. `block="triton"` computes all tiles of a K/V block in one launch forward, two backward, and
`TritonForward` and `TritonBackward` (`blocks/triton/steps.py`) take the place of the two tilewise classes. `block="flex"` does the same in one
call of FlexAttention, by `FlexForward` and `FlexBackward` (`blocks/flex.py`). `block="flash"` computes all causal tiles of a
K/V block in one call and all others in another, by `FlashForward` and `FlashBackward` (`blocks/flash.py`).
"""
NAMES = (
    "words",
    "tokens and numbers",
    "one block, one message",
    "all ranks together",
    "the front door",
    "built on the ring",
    "models and pictures",
    "timings",
    "commands",
    "python -m ringlab",
    "the course: its list of lessons",
    "the course: checking answers",
    "the course: the judge",
    "the course: material",
    "the course: exercises",
    "the course: notebooks",
    "the course: classes",
    "the course: other programs",
    "the course: commands",
)
"""The name of each floor, from the bottom."""
BRIEF = {"ringlab_course/exercises"}
"""Packages whose subfolders are listed by their docstring or title only, not file by file."""


def page(root: Path) -> str:
    """Return the page for the checkout at `root`."""
    return "\n\n".join(part.strip("\n") for part in _parts(root)) + "\n"


def floors(root: Path) -> list[tuple[str, list[str]]]:
    """Return the name of each floor, from the bottom, with its packages and modules."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    rooms = [
        [f"{package}.{name}" for name in layer.split(" : ")]
        for contract in settings["contracts"]
        for package in contract.get("containers", ())
        if "." not in package  # an inner package describes its floors in its own docstring
        for layer in reversed(contract["layers"])
    ]
    return list(zip(NAMES, rooms, strict=True))


def _parts(root: Path) -> Iterator[str]:
    yield HEAD
    yield "## The floors"
    every = floors(root)
    rows = [
        (str(number), name, ", ".join(f"`{room}`" for room in rooms))
        for number, (name, rooms) in enumerate(every)
    ]
    yield table(("Floor", "", "Packages and modules"), rows)
    for number, (name, rooms) in enumerate(every):
        yield f"## Floor {number}: {name}"
        yield table(("Module", "Role"), [row for room in sorted(rooms) for row in _rows(root, room)])
        yield from (text for room in sorted(rooms) for text in _maps(root, room))


def _rows(root: Path, room: str) -> Iterator[tuple[str, str]]:
    """Yield (module, role) for a module, or for a package and all modules in it."""
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
        elif file.read_text(encoding="utf-8").strip():
            yield f"`{inside.as_posix()}`", _role(file)


def _maps(root: Path, room: str) -> Iterator[str]:
    """Yield the docstrings of a package, and of packages in it, without their first paragraphs."""
    path = root.joinpath(*room.split("."))
    for file in sorted(path.rglob("__init__.py"), key=lambda file: file.parent):
        _, _, rest = _docstring(file).partition("\n\n")
        if rest and room.replace(".", "/") not in BRIEF:
            yield f"In `{file.parent.relative_to(root).as_posix()}/`:\n\n{to_markdown(rest)}"


def _role(file: Path) -> str:
    """Return the first paragraph of a module's docstring. Raises: ValueError unless it is a sentence."""
    role = _docstring(file).partition("\n\n")[0]
    if not role.endswith((".", "?", "…")):
        raise ValueError(f"{file}: the docstring's first paragraph is not a whole sentence: {role!r}")
    return first_sentence(role)


def _docstring(file: Path) -> str:
    return ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
