"""The places in the code at which the ranks of a run are, for a report on a run that does not end."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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


@dataclass(frozen=True)
class Standing:
    """The places of the ranks of a run.

    words: each rank's place in the code, as the end of a sentence; "" if no process reports.
    stuck: whether every rank that has begun and not ended waits for another one, and stays where it is.
    """

    words: str = ""
    stuck: bool = False


def standing(folder: Path, ranks: Sequence[int]) -> Standing:
    """Return where these ranks stand. It takes a second, because one look cannot show whether they move."""
    places = {rank: folder / f"{rank}.place" for rank in ranks}
    found = {rank: pickle.loads(path.read_bytes()) for rank, path in places.items() if path.exists()}
    pids = {pid for pid, _ in found.values()}
    before, spent = _told(folder, pids), _spent(pids)
    if not any(before.values()):
        return Standing()
    time.sleep(_BETWEEN)
    busy = _spent(pids) - spent > _BUSY * _BETWEEN
    after = {pid: text or before[pid] for pid, text in _told(folder, pids).items()}
    words = {rank: stands_in(after[pid], ident) for rank, (pid, ident) in found.items() if after[pid]}
    said = "".join(f"; rank {rank} {words.get(rank, 'has not begun')}" for rank in ranks)
    own = [[_threads(text[pid]).get(ident, ()) for pid, ident in found.values()] for text in (before, after)]
    # A process with several ranks computes for them in a thread that belongs to none.
    shared = len(pids) < len(found)
    looked = [frames for text in after.values() for frames in _threads(text).values()] if shared else own[1]
    return Standing(said, not (busy or own[0] != own[1] or any(map(_runs, looked))))


def _told(folder: Path, pids: Collection[int]) -> dict[int, str]:
    """Return the stacks of each process's threads, or "" if it writes nothing in time."""
    files = {pid: folder / f"{pid}.stack" for pid in pids}
    begun = {pid: len(_read(file)) for pid, file in files.items()}
    for pid in pids:
        with suppress(OSError, AttributeError):
            os.kill(pid, signal.SIGUSR1)
    texts, end = dict.fromkeys(pids, ""), time.monotonic() + _STACK_SECONDS
    while time.monotonic() < end:
        time.sleep(0.2)
        before, texts = texts, {pid: _read(file)[begun[pid] :] for pid, file in files.items()}
        if texts == before and all(texts.values()):
            break
    return texts


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _spent(pids: Collection[int]) -> float:
    """Return the seconds of CPU time that these processes have used, or 0 where the system does not say."""
    total = 0.0
    for pid in pids:
        with suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


Frames: TypeAlias = Sequence[tuple[str, str, str]]
"""The calls of a thread as (file, line, function), the innermost first."""


def _threads(stack: str) -> dict[int, Frames]:
    """Return the calls of each thread by its id, from faulthandler's stacks of all threads."""
    found = re.findall(r"(?m)^(?:Current t|T)hread 0x([0-9a-f]+) .*\n((?:  .*\n?)*)", stack)
    return {int(ident, 16): re.findall(r'File "(.+)", line (\d+) in (\S+)', calls) for ident, calls in found}


def stands_in(stack: str, ident: int) -> str:
    r"""Return the place of a thread, from faulthandler's stacks of all threads.

    It names up to three calls, the innermost first. Calls of torch, of Python's library and of ringlab are
    left out, unless there are no others. The verb says whether the rank computes or waits for another one.

    >>> stands_in('Thread 0x2a (most recent call first):\n  File "/a/torch/b.py", line 2 in c\n  File "/a/d.py", line 3 in e\n', 42)
    'is in e (d.py, line 3)'
    """
    frames = _threads(stack).get(ident)
    if frames is None:
        return "has ended"
    outside = [each for each in frames if not _is_of_library(each[0])]
    of_target = [each for each in outside if not each[0].startswith(_OWN)] or outside or frames
    calls = [f"{function} ({Path(file).name}, line {line})" for file, line, function in of_target[:3]]
    verb = "is" if _runs(frames) else "waits"
    return f"{verb} in {', called by '.join(calls)}" if calls else verb


def _runs(frames: Frames) -> bool:
    """Return whether a thread is in code other than that of messages between ranks."""
    for file, _, _ in frames:
        if file.startswith(_COMM) or f"{os.sep}torch{os.sep}distributed{os.sep}" in file:
            return False
        if not _is_of_library(file):
            return True
    return False


def _is_of_library(file: str) -> bool:
    return (
        file.startswith("<frozen")
        or f"{os.sep}torch{os.sep}" in file
        or (_LIBRARY in file and "site-packages" not in file)
    )


_STACK_SECONDS = 5.0
_BETWEEN, _BUSY = 0.5, 0.2
"""The seconds between two looks, and the share of this time for which processes compute if some of them do more
than wait."""
_LIBRARY = f"{os.sep}lib{os.sep}python{sys.version_info.major}.{sys.version_info.minor}{os.sep}"
_COMM = str(Path(__file__).parents[2] / "comm") + os.sep
_OWN = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("comm", "conformance"))
