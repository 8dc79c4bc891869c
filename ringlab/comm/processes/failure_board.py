"""The reports that ranks in real processes make to each other and to their parent.

`Board` records which rank failed first, and which ranks have ended. `Journal` is a small file in which a rank
writes its current action, so that other processes can read the action even if the rank hangs. `Told` and
`Watch` send the events of a rank to the parent of a `launch` while the ranks still run.
"""

from __future__ import annotations

import json
import mmap
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ringlab.comm.trace import Exchange, Trace

T = TypeVar("T")

_FAILURE = "ringlab/failure"
_SETTLE = 3.0  # the most seconds to wait until the board contains the reason of a closed connection
_POLL = 0.02


@dataclass(frozen=True)
class Failure:
    """The first failure of a run: the rank that failed, and the reason."""

    rank: int
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.reason}"


class Board:
    """A view of a key-value store that never raises an error. If the store is gone, the board is empty."""

    def __init__(self, store: dist.Store | None) -> None:
        self.store = store

    def record(self, rank: int, reason: str) -> Failure | None:
        """Record a failure if none is recorded yet, and return the first failure of the run."""
        mine = Failure(rank, reason)
        content = json.dumps(asdict(mine))
        self._ask(lambda store: store.compare_set(_FAILURE, "", content))
        return self.first_failure() or mine

    def fail(self, rank: int, error: BaseException) -> Failure | None:
        """Record the class and first line of `error`, as `record` does, and return the first failure."""
        return self.record(
            rank, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )

    def first_failure(self) -> Failure | None:
        """Return the failure that was recorded first, or None."""
        content = self._ask(lambda store: store.get(_FAILURE) if store.check([_FAILURE]) else None)
        return Failure(**json.loads(content)) if content else None

    def end(self, rank: int) -> None:
        """Record that the program of `rank` has ended, with or without an error."""
        self._ask(lambda store: store.set(_ended(rank), "1"))

    def ended(self, ranks: list[int]) -> bool:
        """Return whether the programs of all `ranks` have ended."""
        return bool(self._ask(lambda store: store.check([_ended(r) for r in ranks])))

    def why_gone(self, peer: int) -> Failure | None:
        """Return the failure behind a closed connection to `peer`, or None if none is found.

        The reason may be recorded after the connection closes, so this method waits for up to 3 seconds.
        """
        deadline = time.monotonic() + _SETTLE
        while self.store is not None and time.monotonic() < deadline:
            if failure := self.first_failure():
                return failure
            if self.ended([peer]):
                return None
            time.sleep(_POLL)
        return None

    def linger(self, ranks: list[int], seconds: float) -> None:
        """Wait until all of `ranks` have ended, but at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while self.store is not None and not self.ended(ranks) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        if self.store is None:
            return None
        try:
            return question(self.store)
        except RuntimeError:  # the process that hosts the store is gone
            self.store = None
            return None


def _ended(rank: int) -> str:
    return f"ringlab/ended/{rank}"


def common_start(store: dist.Store, rank: int, host: str, timeout: float) -> float:
    """Return rank 0's clock value at the start, so that all ranks of one machine count from the same time.

    On another machine rank 0's clock has no meaning. There the start is the time of this call.
    """
    key = "ringlab/start"
    if rank == 0:
        store.set(key, json.dumps([host, time.perf_counter()]))
    store.wait([key], timedelta(seconds=timeout))
    first_host, start = json.loads(store.get(key))
    return start if first_host == host else time.perf_counter()


_BYTES = 512
STARTING, FINISHED = "starting", "finished"


class Journal:
    """A file of one line that is overwritten in place. It survives its process, however the process ends."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"\0" * _BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)

    def write(self, line: str) -> None:
        """Replace the line. At most 512 bytes of it are kept."""
        self._map[:] = line.encode()[:_BYTES].ljust(_BYTES, b"\0")


def read_journal(path: Path) -> str:
    """Return the line that was written last, or an empty text if there is no line yet."""
    try:
        return path.read_bytes().rstrip(b"\0").decode(errors="replace")
    except FileNotFoundError:
        return ""


_PAUSE = 0.25  # seconds between two reads of the events; reading them more often would slow down the ranks


def events_path(folder: Path, rank: int) -> Path:
    """Return the file in which `rank` records its events."""
    return folder / f"rank-{rank}.events"


class Told(list[Any]):
    """A rank's list of events. Each event is also written to a file as soon as it is complete."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("ab", buffering=0)

    def append(self, event: Any) -> None:
        """Append an event to the list and to the file."""
        super().append(event)
        if isinstance(event, Exchange):  # reading a stall would wait for the GPU
            event = replace(event, stall=None)
        self._file.write(pickle.dumps(event))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class Watch:
    """Calls `tell` with the trace so far whenever the trace has grown, at most four times a second."""

    def __init__(self, folder: Path, world_size: int, tell: Callable[[Trace], None]) -> None:
        self.files = [events_path(folder, rank) for rank in range(world_size)]
        self.read = [0] * world_size
        self.trace, self.tell = Trace(world_size), tell
        self.next = 0.0

    def look(self) -> None:
        """Read new events, unless the last look was less than `_PAUSE` seconds ago."""
        if time.monotonic() >= self.next:
            self.look_now()

    def look_now(self) -> None:
        """Read new events, and call `tell` if there are any."""
        before = len(self.trace.events)
        for rank, path in enumerate(self.files):
            if path.exists():
                self._read(rank, path)
        if len(self.trace.events) > before:
            self.tell(self.trace)
        self.next = time.monotonic() + _PAUSE

    def _read(self, rank: int, path: Path) -> None:
        content = path.read_bytes()
        new = BytesIO(content[self.read[rank] :])
        begin = self.read[rank]
        while new.tell() < len(content) - begin:
            try:
                event = pickle.load(new)
            except (EOFError, pickle.UnpicklingError):  # being written, or its rank died while writing
                return
            self.trace.events.append(event)
            self.read[rank] = begin + new.tell()
