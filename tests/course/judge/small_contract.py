"""A contract of two stages, small enough to read at a glance, for tests of the judge itself.

This file also has functions that find what a submission has left behind: processes of its workers, and files
that bear its mark.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.failures import Failure
from ringlab_course.judge import sandbox
from ringlab_course.judge.processes import children, descendants, status_text

HINTS = ("What is doubled?", "Multiply.", "$y = 2x$")


def _double(subject, rng) -> None:
    x = rng.standard_normal(5)
    compare_with(subject.call(x), 2 * x, bound=1e-12)


def _double_hidden(subject, rng) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    answer = subject.call(x)
    if not isinstance(answer, np.ndarray) or answer.dtype != np.float32:
        raise Failure("The answer should keep the dtype.", f"probe {x.tolist()}")
    compare_with(answer, 2 * x, bound=1e-6, case=f"probe {x.tolist()}")


def _sum(P: int):
    def check(subject, rng) -> None:
        import torch

        shards = [torch.from_numpy(rng.standard_normal((1, 1, 4, 8))) for _ in range(P)]
        outcome = subject.run_ring(P, shards)
        for rank, answer in enumerate(outcome.results):
            compare_with(answer, sum(shards).numpy(), bound=1e-12, case=f"rank {rank} of {P}")
        if any(outcome.trace.rounds(rank) != P - 1 for rank in range(P)):
            raise Failure(f"{P - 1} exchanges are enough.", f"rank 0 made {outcome.trace.rounds(0)}")
        if any(outcome.trace.bytes_sent(rank) != (P - 1) * 4 * 8 * 8 for rank in range(P)):
            raise Failure("Every exchange sends one shard.")
        if any(outcome.trace.peers(rank) - {(rank + 1) % P} for rank in range(P)):
            raise Failure("Send to the next rank only.")

    return check


DOUBLE = Stage(
    id="90.double", function="double", title="double", hints=HINTS,
    checks=(
        Check("values", 2, "visible", "values", _double),
        Check("dtype", 3, "held-out", "dtype", _double_hidden),
    ),
)  # fmt: skip
RING = Stage(
    id="90.ring", function="ring_sum", title="ring sum", hints=HINTS, kind="ring",
    checks=(
        Check("one", 1, "visible", "one rank", _sum(1)),
        Check("two", 1, "visible", "two ranks", _sum(2)),
        Check("three", 3, "held-out", "three ranks", _sum(3)),
    ),
)  # fmt: skip
EXERCISE = Exercise(id="90", slug="90_small", title="small", stages=(DOUBLE,))
RING_EXERCISE = Exercise(id="90", slug="90_ring", title="ring", stages=(RING,))

RIGHT = "def double(x):\n    return x + x\n"
RIGHT_RING = """
def ring_sum(ring, x):
    total = x.clone()
    for step in range(ring.world_size - 1):
        x = ring.shift(x)
        total += x
    return total
"""


def notebook(folder: Path, *sources: str, grade: str = "90.double", name: str = "handed_in.ipynb") -> Path:
    """Write a notebook of code cells, the last of them marked as graded, and return its path."""
    cells = [
        {"cell_type": "code", "source": s, "metadata": {}, "outputs": [], "execution_count": None}
        for s in sources
    ]
    cells[-1]["metadata"] = {"grade": grade}
    path = folder / name
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    return path


def led_through() -> dict[Path, set[str]]:
    """Return the parents of all visible paths in a sandbox, each with the names of its visible entries."""
    led: dict[Path, set[str]] = {}
    for path in sandbox._visible():
        for inner, outer in itertools.pairwise((path, *path.parents)):
            led.setdefault(outer, set()).add(inner.name)
    return led


PLACES = (
    "/", "/dev/mqueue", "/dev/shm", "/etc", "/home", "/root", "/run", "/run/lock", "/tmp", "/usr", "/usr/lib", "/var", "/var/tmp",
)  # fmt: skip


def turn() -> int:
    """Return the number of the uid that the next worker of this process gets, without using it up."""
    return next(copy.copy(sandbox._turn))


def processes(first: int) -> set[int]:
    """Return the processes of all workers begun after `turn()` had returned `first`, without fork servers.

    Workers are found by their uids. The processes in sandboxes that this process started are included.
    """
    ours = sandbox._uids()[0]
    uids = {ours[number % len(ours)] for number in range(first, turn())}
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        # A process can choose its name. Some tests have processes whose names are no valid text.
        fields = dict(line.split(":\t", 1) for line in status_text(status).split("\n") if ":\t" in line)
        if not fields:  # it has ended
            continue
        pid, worker = int(fields["Pid"]), int(fields["Uid"].split()[0]) in uids
        if not worker and fields["Name"] == "bwrap" and int(fields["PPid"]) == os.getpid():
            forked = forked_processes(pid)
            found |= {pid} if forked is None else forked
        elif worker:
            found.add(pid)
    return found


def forked_processes(bwrap: int) -> set[int] | None:
    """Return the processes that this sandbox's fork server has made, or None if it has no fork server."""
    with contextlib.suppress(OSError):
        if b"fork_server" in Path(f"/proc/{bwrap}/cmdline").read_bytes():
            return {
                pid
                for first in children(bwrap)
                for server in children(first)[1:]
                for pid in (server, *descendants(server))
            }
    return None


def mine(first: int) -> set[int]:
    """Return the processes of workers begun since `first` that do not end within 30 s.

    Workers of other tests, which may run at the same time, are not included.
    """
    deadline = time.monotonic() + 30
    while (left := processes(first)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def marked(mark: str, *folders: Path) -> list[str]:
    """Return the files, sockets and pieces of shared memory of this machine that bear `mark`."""
    return sorted(_marked(mark, [*map(Path, PLACES), Path(sys.prefix), *map(Path, sys.path), *folders]))


def _marked(mark: str, folders: list[Path]) -> Iterator[str]:
    for folder in {folder for folder in folders if os.access(folder, os.R_OK) and folder.is_dir()}:
        yield from (f"{folder}/{name}" for name in os.listdir(folder) if mark in name)
    sockets = Path("/proc/net/unix").read_text(errors="replace")  # names may be no text
    yield from (line for line in sockets.splitlines() if mark in line)
    for kind in ("shm", "sem", "msg"):
        lines = Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
        yield from (line for line in lines if int(line.split()[0]) == KEY)


KEY = 0x70776E
"""The key of the System V objects that submissions try to leave behind."""
