"""What a submission left: processes of its workers, and things that bear its mark."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ringlab_course.judge import sandbox
from ringlab_course.judge.processes import status_text

PLACES = (
    "/", "/dev/mqueue", "/dev/shm", "/etc", "/home", "/root", "/run", "/run/lock", "/tmp", "/usr", "/usr/lib", "/var", "/var/tmp",
)  # fmt: skip


def turn() -> int:
    """How many uids this process has given to workers, counted from where it began."""
    return next(copy.copy(sandbox._turn))


def processes(first: int) -> set[int]:
    """The processes of workers begun since `first`, by their uids; without root, our descendants."""
    ours = sandbox._uids()[0]
    uids = {ours[number % len(ours)] for number in range(first, turn())}
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        # A process chooses its name: other tests' have names that are no text.
        fields = dict(line.split(":\t", 1) for line in status_text(status).split("\n") if ":\t" in line)
        if not fields:  # it has ended
            continue
        worker = int(fields["Uid"].split()[0]) in uids
        if worker or (fields["Name"] == "bwrap" and int(fields["PPid"]) == os.getpid()):
            found.add(int(fields["Pid"]))
    return found


def mine(first: int) -> set[int]:
    """What is left of this test's processes; other tests have workers of their own meanwhile."""
    deadline = time.monotonic() + 30
    while (left := processes(first)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def marked(mark: str, *folders: Path) -> list[str]:
    """Return the files, sockets and pieces of shared memory of this machine that bear `mark`."""
    return sorted(_marked(mark, [*map(Path, PLACES), Path(sys.prefix), *map(Path, sys.path), *folders]))


def _marked(mark: str, folders: list[Path]) -> Iterator[str]:
    for folder in {folder for folder in folders if folder.is_dir()}:
        yield from (f"{folder}/{name}" for name in os.listdir(folder) if mark in name)
    sockets = Path("/proc/net/unix").read_text(errors="replace")  # names that others choose
    yield from (line for line in sockets.splitlines() if mark in line)
    for kind in ("shm", "sem", "msg"):
        lines = Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
        yield from (line for line in lines if int(line.split()[0]) == KEY)


KEY = 0x70776E
"""Of the pieces of System V that submissions try to leave."""
