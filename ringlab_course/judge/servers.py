"""The fork servers that this process has started.

A server is started when a worker first needs it, and kept for later submissions.
"""

from __future__ import annotations

import atexit
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.judge.sandbox import Bounds
from ringlab_course.judge.spawn import Forked, ForkServer

MOST = 2
"""The number of servers that are kept. A server with torch takes 250 MB.

A few are enough, because a class is graded exercise by exercise.
"""


def fork(bounds: Bounds, arrays: str, limits: OffLimits | None) -> Forked:
    """Return a new worker of the server for these arrays and limits. Raises: SandboxError without bubblewrap."""
    return _servers(os.getpid()).fork(bounds, arrays, limits)


def give_up(server: ForkServer) -> None:
    """Start no more workers from a server that does not answer."""
    _servers(os.getpid()).give_up(server)


@cache
def _servers(pid: int) -> _Servers:
    """Return the servers of the process `pid`; a forked child gets its own."""
    return _Servers()


class _Servers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, OffLimits | None], ForkServer] = {}
        # Servers end with the thread that started them, and this pool's thread lives as long as the process.
        self._starter = ThreadPoolExecutor(1)
        atexit.register(self._end)

    def fork(self, bounds: Bounds, arrays: str, limits: OffLimits | None) -> Forked:
        key = (arrays, limits)
        with self._lock:
            server = self._kept.pop(key, None)
            if server is not None and not server.alive():
                server.end()
                server = None
            if server is None:
                self._make_room()
                server = self._starter.submit(ForkServer, arrays, limits).result()
            self._kept[key] = server  # the most recently used server comes last
            return server.fork(bounds)

    def give_up(self, server: ForkServer) -> None:
        with self._lock:
            for key in [key for key, kept in self._kept.items() if kept is server]:
                del self._kept[key]
        if not server.workers:
            server.end()

    def _make_room(self) -> None:
        idle = [key for key, server in self._kept.items() if not server.workers]
        for key in idle[: max(0, len(self._kept) - MOST + 1)]:
            self._kept.pop(key).end()

    def _end(self) -> None:
        for server in self._kept.values():
            server.end()
        self._kept.clear()
