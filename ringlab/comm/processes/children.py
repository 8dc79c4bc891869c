"""Starts, watches and ends the processes of one `launch`, and leaves none of them behind."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ringlab.comm.processes import fork_server
from ringlab.comm.processes.failure_board import FINISHED, STARTING, Board, read_journal
from ringlab.comm.processes.fork_server import ForkedProcess
from ringlab.comm.processes.rank_process import journal_path, report_path
from ringlab.errors import TransportTimeout

GRACE = 5.0
"""Seconds in which other ranks may report errors after one has failed. After that, they are stopped.

The time begins again with each rank that fails, because distant ranks notice a failure only after some
seconds: the news travels one rank per step, and a failed rank stays for a while.
"""
_POLL = 0.05
_STRIDE = 1.0
"""The most seconds that count between two polls. A suspended machine suspends also its ranks."""
_FAILED = 1  # the exit status of a rank that has reported an error


class Child:
    """One rank's process."""

    def __init__(self, folder: Path, rank: int, environment: dict[str, str]) -> None:
        self.folder, self.rank = folder, rank
        self.killed_because = ""
        self.reported_at: float | None = None
        self.process = _started(folder, rank, environment)

    def doing(self) -> str:
        """Return the last line of the rank's journal."""
        return read_journal(journal_path(self.folder, self.rank)) or STARTING

    def reported(self) -> bool:
        """Return whether the rank has written its report."""
        return report_path(self.folder, self.rank).exists()

    def overdue(self) -> bool:
        """Return whether the rank's process still runs long after the rank wrote its report."""
        if self.reported_at is None and self.reported():
            self.reported_at = time.monotonic()
        return self.reported_at is not None and time.monotonic() > self.reported_at + GRACE

    def ending(self) -> str:
        """Return how the process ended, in words."""
        code = self.process.returncode
        if self.killed_because:
            return f"stopped by launch {self.killed_because}"
        if code is not None and code < 0:
            return f"killed by signal {signal.Signals(-code).name}"
        return f"its process ended with status {code} and no result"

    def kill(self, because: str = "") -> None:
        """Kill the process and all processes that it started."""
        if self.process.returncode is None and self.process.poll() is None:
            self.killed_because = because
        with suppress(ProcessLookupError, PermissionError):  # macOS raises PermissionError for a dead group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _started(folder: Path, rank: int, environment: dict[str, str]) -> ForkedProcess | subprocess.Popen[bytes]:
    """Return the rank's process, which leads a new session.

    Ctrl-C then reaches only the parent, and killing the session ends all processes that the rank started.
    """
    if fork_server.AVAILABLE:
        return ForkedProcess(fork_server.running(environment), folder, rank)
    module = "ringlab.comm.processes.rank_process"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(folder), str(rank), str(os.getpid())],
        env=dict(environment, LOCAL_RANK=str(rank)), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


class Clock:
    """Counts the seconds for which this process has watched the ranks.

    A pause longer than `_STRIDE`, for example of a suspended machine, counts as `_STRIDE`.
    """

    def __init__(self) -> None:
        self.seconds, self._read = 0.0, time.monotonic()

    def tick(self) -> float:
        """Return the seconds counted until now."""
        now = time.monotonic()
        self.seconds += min(now - self._read, _STRIDE)
        self._read = now
        return self.seconds


class Children:
    """The processes of all ranks. Leaving the `with` block kills those that still run."""

    def __init__(self, folder: Path, world_size: int, board: Board, environment: dict[str, str]) -> None:
        self.folder, self.board = folder, board
        self.all: list[Child] = []
        self.running: list[Child] = []
        self.world_size, self.environment = world_size, environment
        self.output = _Output()
        self.clock = Clock()
        self.failed_at: float | None = None

    def __enter__(self) -> Children:
        try:
            for rank in range(self.world_size):
                child = Child(self.folder, rank, self.environment)
                self.all.append(child)
                self.output.add(child)
        except BaseException:
            self.__exit__()
            raise
        self.running = list(self.all)
        return self

    def __exit__(self, *_: Any) -> None:
        for child in self.all:
            child.kill("at the end")
        self.output.close()

    def supervise(self, startup: float, timeout: float, look: Callable[[], None] = lambda: None) -> None:
        """Wait until every process has ended. Processes that wait in vain for a failed rank are killed.

        look: a function that is called repeatedly while waiting.

        Raises: TransportTimeout if not all ranks connect within `startup` seconds, or do not end within
        `timeout` seconds after that.
        """
        deadline, connected = self.clock.tick() + startup, False
        while self.running:
            self.output.pump(_POLL)
            look()
            now = self.clock.tick()
            self._reap()
            if not connected and all(child.doing() != STARTING for child in self.all):
                deadline, connected = now + timeout, True
            if self.failed_at is not None and now > self.failed_at + GRACE:
                self._stop_leftovers()
            elif self.failed_at is None and now > deadline:
                if self.board.first_failure() is None:
                    raise self._timed_out(timeout if connected else startup, connected)
                # Do not raise an error here: the failed rank will soon end with a better one.
                self.failed_at = now

    def _reap(self) -> None:
        for child in list(self.running):
            code = child.process.poll()
            if code is None and not child.overdue():
                continue
            self.running.remove(child)
            child.kill()  # also ends processes that the rank started and that still run
            if not child.reported():
                self.board.record(child.rank, f"{child.ending()}; last: {child.doing()}")
            if not child.reported() or code == _FAILED:
                self.failed_at = self.clock.seconds

    def _stop_leftovers(self) -> None:
        failure = self.board.first_failure()
        for child in list(self.running):
            child.kill(f"{GRACE:g} s after a failure ({failure})")
            self.running.remove(child)

    def _timed_out(self, limit: float, connected: bool) -> TransportTimeout:
        late = [child for child in self.running if child.doing() != FINISHED] or self.running
        unfinished = [f"rank {child.rank} has not finished; last: {child.doing()}" for child in late]
        what = "the program to end" if connected else "the processes to start and connect"
        return TransportTimeout(
            f"{what} on all {self.world_size} ranks within {limit:g} s",
            "\n        ".join(unfinished),
            "see where those ranks wait for each other, or raise timeout=",
        )


class _Output:
    """Prints the lines that children write, each after the number of the rank that wrote it."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.rest: dict[int, bytes] = {}

    def add(self, child: Child) -> None:
        for pipe, error in ((child.process.stdout, False), (child.process.stderr, True)):
            assert pipe is not None
            self.rest[pipe.fileno()] = b""
            self.selector.register(pipe, selectors.EVENT_READ, (child.rank, error))

    def pump(self, timeout: float) -> bool:
        """Print the output that arrives within `timeout` seconds, and return whether there was any."""
        if not self.selector.get_map():
            time.sleep(timeout)
            return False
        ready = self.selector.select(timeout)
        for key, _ in ready:
            self._read(key.fileobj, *key.data)  # type: ignore[arg-type]
        return bool(ready)

    def _read(self, pipe: IO[bytes], rank: int, error: bool) -> None:
        content = os.read(pipe.fileno(), 1 << 16)
        number = pipe.fileno()
        *lines, self.rest[number] = (self.rest[number] + content).split(b"\n")
        if not content:  # the end
            lines = [self.rest.pop(number)] if self.rest[number] else []
            self.selector.unregister(pipe)
            pipe.close()
        stream = sys.stderr if error else sys.stdout
        for line in lines:
            stream.write(f"[rank {rank}] {line.decode(errors='replace')}\n")
        stream.flush()

    def close(self) -> None:
        """Print the last lines and close all pipes."""
        while self.pump(0.0):
            pass
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
