"""Processes seen from outside, through /proc: who descends from whom, what they hold, and an end to them all.

A process chooses its own name, and the files here hold it: any bytes, a carriage return too, which Python's
text files would take for the end of a line. So they are read as bytes, and a line ends where the kernel ends it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_HAS_MEMORY = re.compile(r"^VmRSS:", re.MULTILINE)


def children(pid: int) -> list[int]:
    """Return the processes that any thread of `pid` has started and that are there still."""
    found: list[int] = []
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            found += [int(child) for child in (thread / "children").read_bytes().split()]
    return found


def descendants(pid: int) -> list[int]:
    """Return the processes that descend from `pid`."""
    found, waiting = [], [pid]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def memory(pid: int, name: str) -> int:
    """Return the bytes that /proc tells of `pid` under `name`, as VmRSS; 0 where it is gone."""
    return _bytes(_status(pid), name)


def cpu_seconds(pid: int) -> float:
    """Return the seconds that `pid` and those of its children that have ended have computed; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def precise_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the seconds that these processes have computed, every thread's, to the nanosecond where the kernel says it.

    Two such figures of one process differ even where a clock tick, a hundredth of a second, is too coarse.
    """
    return sum(map(_precise, pids))


def _precise(pid: int) -> float:
    try:
        return time.clock_gettime(
            (~pid << 3) | 2
        )  # the clock of another process, as clock_getcpuclockid makes it
    except OSError:
        return cpu_seconds(pid)


def waited_seconds(threads: Iterable[Path]) -> float:
    """Return the seconds for which these threads were ready to compute and had no processor; 0 where the kernel does not say."""
    return sum(map(_waited, threads))


def _waited(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def held(pids: Iterable[int]) -> tuple[int, int]:
    """Return (bytes, tasks) of these processes together: their own and their shared memory; every thread is a task.

    Not the pages of files, of libraries above all, which processes have in common.
    """
    size = tasks = 0
    for pid in pids:
        status = _status(pid)
        size += _bytes(status, "RssAnon") + _bytes(status, "RssShmem")
        match = re.search(r"^Threads:\s*(\d+)", status, re.MULTILINE)
        tasks += int(match[1]) if match else 0
    return size, tasks


def end_all(root: int, mark: bytes, seconds: float = 10.0) -> None:
    """End what descends from `root` or has `mark` in its first environment, and `root`; return when all are gone.

    All are stopped before the first is killed, so that none starts another meanwhile. `root` is stopped first and
    killed last: orphans fall to it, and while it takes no notice of ends the kernel leaves none out of the list of
    its children. One look can miss whoever changes its parent or its program just then: two in a row have to find
    nobody. A process with neither mark nor descent is not found, nor is one of another user.
    """
    deadline, ended, quiet = time.monotonic() + seconds, set[int](), 0
    _signal([root], signal.SIGSTOP)
    while quiet < 2 and time.monotonic() < deadline:
        stopped: set[int] = set()
        while (found := _look(root, mark)) - stopped and time.monotonic() < deadline:
            _signal(found - stopped, signal.SIGSTOP)
            stopped |= found
        _signal(stopped, signal.SIGKILL)
        ended |= stopped
        quiet = 0 if stopped or _living(ended) else quiet + 1
        time.sleep(0.005)
    _signal([root], signal.SIGKILL)


def _look(root: int, mark: bytes) -> set[int]:
    return _living({*descendants(root), *_marked(mark)} - {root})


def _marked(mark: bytes) -> set[int]:
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes():
                found.add(int(environment.parts[2]))
    return found


def _living(pids: Iterable[int]) -> set[int]:
    """Those that are neither gone nor waiting for their parent to take notice."""
    return {pid for pid in pids if re.search(r"^State:\s*[^ZX\s]", _status(pid), re.MULTILINE)}


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def status_text(path: Path) -> str:
    """Return what the kernel says in a status file of /proc; "" where it is gone."""
    try:
        return path.read_bytes().decode("ascii", "replace")
    except OSError:
        return ""


def _status(pid: int) -> str:
    """The status of `pid`; once its first thread has ended, and with it all that its file says of memory, another's."""
    status = status_text(Path(f"/proc/{pid}/status"))
    if status and not _HAS_MEMORY.search(status):
        for thread in threads(pid):
            of_thread = status_text(thread / "status")
            if _HAS_MEMORY.search(of_thread):
                return of_thread
    return status


def threads(pid: int) -> list[Path]:
    """The folders of a process's threads; none where it is gone, even if it goes at this moment (glob would raise)."""
    folder = Path(f"/proc/{pid}/task")
    try:
        return [folder / thread for thread in os.listdir(folder)]
    except OSError:
        return []


def _bytes(status: str, name: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
