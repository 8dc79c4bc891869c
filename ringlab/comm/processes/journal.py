"""A small file in which a rank keeps what it is doing, readable from outside even when it hangs."""

from __future__ import annotations

import mmap
from pathlib import Path

_BYTES = 512
STARTING, FINISHED = "starting", "finished"


class Journal:
    """One line, overwritten in place; it survives the process that wrote it, however that died."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b"\0" * _BYTES)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)

    def write(self, line: str) -> None:
        self._map[:] = line.encode()[:_BYTES].ljust(_BYTES, b"\0")


def read_journal(path: Path) -> str:
    """Return the line written last, or '' if there is none yet."""
    try:
        return path.read_bytes().rstrip(b"\0").decode(errors="replace")
    except FileNotFoundError:
        return ""
