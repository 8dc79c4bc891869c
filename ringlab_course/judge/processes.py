"""Processes seen from outside, through /proc: read their descendants and memory, and end them all.

A process chooses its own name, which appears in these files. It may contain any bytes, even a carriage
return, which Python's text files would read as the end of a line. So the files are read as bytes, and only
the kernel's line ends count.
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
    """Return the living processes that any thread of `pid` has started."""
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
    """Return the bytes that /proc reports for `pid` under `name`, such as VmRSS, or 0 if it has ended."""
    return _bytes(_status(pid), name)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of `pid` and of its children that have ended, or 0 if the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def precise_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of all threads of these processes, to the nanosecond if the kernel can.

    The difference of two such figures is useful even if it is shorter than a clock tick, a hundredth of a
    second.
    """
    return sum(map(_precise, pids))


def _precise(pid: int) -> float:
    try:
        # the clock id of another process, computed as in clock_getcpuclockid
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return cpu_seconds(pid)


def waited_seconds(threads: Iterable[Path]) -> float:
    """Return the seconds for which these threads were ready to run but had no processor.

    The result is 0 if the kernel does not report it.
    """
    return sum(map(_waited, threads))


def _waited(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def held(pids: Iterable[int]) -> tuple[int, int]:
    """Return the bytes and the tasks of these processes together; every thread is a task.

    Memory means the processes' own pages and shared memory. Pages of files, such as libraries, are left out,
    because processes share them.
    """
    size = tasks = 0
    for pid in pids:
        status = _status(pid)
        size += _bytes(status, "RssAnon") + _bytes(status, "RssShmem")
        match = re.search(r"^Threads:\s*(\d+)", status, re.MULTILINE)
        tasks += int(match[1]) if match else 0
    return size, tasks


def end_all(root: int, mark: bytes, seconds: float = 10.0) -> None:
    """End the descendants of `root`, all processes with `mark` in their first environment, and `root`.

    All are stopped before the first is killed, so that none starts another one meanwhile. `root` is stopped
    first and killed last. Orphans become children of `root`, and while `root` is stopped, the kernel keeps its
    list of children complete. A search can miss a process that is just changing its parent or its program, so
    two searches in a row have to find nothing. Processes of other users are not found, and neither are processes
    that have no mark and are no descendants.
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
    """Return the processes that exist and are not zombies."""
    return {pid for pid in pids if re.search(r"^State:\s*[^ZX\s]", _status(pid), re.MULTILINE)}


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def status_text(path: Path) -> str:
    """Return the text of a status file in /proc, or "" if the process is gone."""
    try:
        return path.read_bytes().decode("ascii", "replace")
    except OSError:
        return ""


def _status(pid: int) -> str:
    """Return the status of `pid`.

    Once its first thread has ended, that thread's file has no memory figures, so another thread's status is
    returned.
    """
    status = status_text(Path(f"/proc/{pid}/status"))
    if status and not _HAS_MEMORY.search(status):
        for thread in threads(pid):
            of_thread = status_text(thread / "status")
            if _HAS_MEMORY.search(of_thread):
                return of_thread
    return status


def threads(pid: int) -> list[Path]:
    """Return the folders of a process's threads, or none if the process is gone.

    os.listdir is used because glob would raise if the process ends during the call.
    """
    folder = Path(f"/proc/{pid}/task")
    try:
        return [folder / thread for thread in os.listdir(folder)]
    except OSError:
        return []


def _bytes(status: str, name: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
