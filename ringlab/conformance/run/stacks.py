"""The places in the code at which the ranks of a run are, for a report on a rank that hangs."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringlab.conformance.run.folder import leave


def tell_stacks(folder: Path, rank: int | None = None) -> None:
    """Let SIGUSR1 write the stacks of all threads of this process to the folder.

    rank: the rank that this thread runs, if any.
    """
    if hasattr(signal, "SIGUSR1"):
        file = (folder / f"{os.getpid()}.stack").open("w")
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        _kept.append(file)
    if rank is not None:
        leave_place(folder, rank)


_kept: list[Any] = []  # the files that faulthandler writes to


def leave_place(folder: Path, rank: int) -> None:
    """Write the ids of a rank's process and thread to the folder."""
    leave(folder / f"{rank}.place", (os.getpid(), threading.get_ident()))


def stacks(folder: Path, ranks: Sequence[int]) -> str:
    """Return each of these ranks' place in the code, as the end of a sentence; "" if no process reports."""
    places = {rank: folder / f"{rank}.place" for rank in ranks}
    found = {rank: pickle.loads(path.read_bytes()) for rank, path in places.items() if path.exists()}
    told = {pid: _told(folder / f"{pid}.stack", pid) for pid in {pid for pid, _ in found.values()}}
    if not any(told.values()):
        return ""
    words = {rank: stands_in(told[pid], ident) for rank, (pid, ident) in found.items() if told[pid]}
    return "".join(f"; rank {rank} {words.get(rank, 'has not begun')}" for rank in ranks)


def _told(path: Path, pid: int) -> str:
    """Return the stacks of a process's threads, or "" if it writes nothing in time."""
    try:
        os.kill(pid, signal.SIGUSR1)
    except (OSError, AttributeError):
        return ""
    text, end = "", time.monotonic() + _STACK_SECONDS
    while time.monotonic() < end:
        time.sleep(0.2)
        before, text = text, path.read_text(errors="replace") if path.exists() else ""
        if text and text == before:
            return text
    return text


def stands_in(stack: str, ident: int) -> str:
    r"""Return the place of a thread, from faulthandler's stacks of all threads.

    It names up to three calls, the innermost first. Calls of torch, of Python's library and of ringlab are
    left out, unless there are no others.

    >>> stands_in('Thread 0x2a (most recent call first):\n  File "/a/torch/b.py", line 2 in c\n  File "/a/d.py", line 3 in e\n', 42)
    'waits in e (d.py, line 3)'
    """
    threads = re.split(r"(?m)^(?=Current thread|Thread)", stack)
    own = next((each for each in threads if re.match(rf"(Current t|T)hread 0x0*{ident:x} ", each)), None)
    return "has ended" if own is None else _in_words(re.findall(r'File "(.+)", line (\d+) in (\S+)', own))


def _in_words(frames: Sequence[tuple[str, Any, str]]) -> str:
    """Return the calls in words. frames: (file, line, function), the innermost first."""
    outside = [each for each in frames if not _is_of_library(each[0])]
    of_target = [each for each in outside if not each[0].startswith(_OWN)] or outside or frames
    calls = [f"{function} ({Path(file).name}, line {line})" for file, line, function in of_target[:3]]
    return f"waits in {', called by '.join(calls)}" if calls else "waits"


def _is_of_library(file: str) -> bool:
    return (
        file.startswith("<frozen")
        or f"{os.sep}torch{os.sep}" in file
        or (_LIBRARY in file and "site-packages" not in file)
    )


_STACK_SECONDS = 5.0
_LIBRARY = f"{os.sep}lib{os.sep}python{sys.version_info.major}.{sys.version_info.minor}{os.sep}"
_OWN = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("comm", "conformance"))
