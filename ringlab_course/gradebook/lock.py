"""One writer at a time: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ringlab.errors import CourseError


@contextlib.contextmanager
def sole(book: Path) -> Iterator[None]:
    """Hold the lock beside `book`. Raises: CourseError where another process has it."""
    try:
        import fcntl
    except ImportError:  # no such lock on Windows: the database's own still keeps each result whole
        yield
        return
    descriptor = os.open(f"{book}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        remedy = "wait for it, or give this one a book of its own"
        raise CourseError(
            "a gradebook that no other run writes", f"{book}: a run is under way", remedy
        ) from None
    finally:
        os.close(descriptor)
