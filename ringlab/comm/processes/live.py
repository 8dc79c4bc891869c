"""What the ranks of a `launch` have done so far, told to the parent while they still run."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from ringlab.comm.trace import Exchange, Trace

_PAUSE = 0.25  # seconds between two looks: whoever looks may draw, on the processor that the ranks need


def events_path(folder: Path, rank: int) -> Path:
    """Return the file in which `rank` tells its events."""
    return folder / f"rank-{rank}.events"


class Told(list[Any]):
    """A rank's events; each is written to a file too, as soon as it is complete."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("ab", buffering=0)

    def append(self, event: Any) -> None:
        super().append(event)
        if isinstance(event, Exchange):  # to read a stall would wait for the GPU
            event = replace(event, stall=None)
        self._file.write(pickle.dumps(event))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class Watch:
    """Calls `tell` with the trace so far whenever there is more of it, four times a second at most."""

    def __init__(self, folder: Path, world_size: int, tell: Callable[[Trace], None]) -> None:
        self.files = [events_path(folder, rank) for rank in range(world_size)]
        self.read = [0] * world_size
        self.trace, self.tell = Trace(world_size), tell
        self.next = 0.0

    def look(self) -> None:
        """Read on, unless it is too early for that."""
        if time.monotonic() >= self.next:
            self.look_now()

    def look_now(self) -> None:
        """Read on, and tell of what is new."""
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
            except (EOFError, pickle.UnpicklingError):  # being written just now, or when its rank died
                return
            self.trace.events.append(event)
            self.read[rank] = begin + new.tell()
