"""One worker as the judge sees it: a socket to talk through, a clock that kills, a peak of memory to read."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from ringlab.course.judge.protocol import Frame, FrameReader, ProtocolError, pack
from ringlab.course.judge.sandbox import PACKAGE, Bounds, command, environment, launch
from ringlab.course.judge.seccomp import filter_file
from ringlab.errors import CourseError, SandboxError

START_SECONDS = 60.0  # torch takes 2 s of CPU to import, on a machine that may be busy


class WorkerDied(CourseError):
    """The worker ended, or closed its socket, before it answered."""


class Overdue(CourseError):
    """The worker did not answer in time."""


class WorkerProcess:
    """A worker in its sandbox. Starting returns at once; `ready` waits until it can take calls.

    Start it from a thread that lives as long as the worker does: bubblewrap dies with that thread.
    """

    def __init__(
        self,
        bounds: Bounds | None = None,
        *,
        torch: bool = False,
        kernels: bool = False,
        unsafe: bool = False,
    ) -> None:
        self.unsafe, self.kernels = unsafe, kernels
        self.arrays = "triton" if kernels else "torch" if torch else "numpy"
        self.bounds = bounds or Bounds()
        self.reader = FrameReader()
        self.frames: list[Frame] = []
        self.pid = self._init = 0
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill): of what starts the worker; the worker itself closes it
        self.socket, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            self._info: int | None = read_end
            self._process = self._spawn(theirs.fileno(), write_end)
        except BaseException:
            self.socket.close()
            self._complaints.close()
            os.close(read_end)
            self._info = None
            raise
        finally:
            theirs.close()
            os.close(write_end)

    def _spawn(self, socket_fd: int, info_fd: int) -> subprocess.Popen[bytes]:
        start = "import sys; sys.path.insert(0, sys.argv[1]); from ringlab.course.judge.worker import main; main()"
        worker = ["-c", start, str(PACKAGE.parent), str(socket_fd), self.arrays]
        if self.unsafe:
            return self._run(launch(worker, self.bounds), socket_fd, info_fd)
        seccomp_fd = filter_file()
        try:
            line = command(worker, self.bounds, info_fd=info_fd, seccomp_fd=seccomp_fd, kernels=self.kernels)
            return self._run(line, socket_fd, info_fd, *(() if seccomp_fd is None else (seccomp_fd,)))
        finally:
            if seccomp_fd is not None:
                os.close(seccomp_fd)

    def _run(self, line: list[str], *descriptors: int) -> subprocess.Popen[bytes]:
        null = subprocess.DEVNULL
        return subprocess.Popen(
            line, stdin=null, stdout=null, stderr=self._complaints, pass_fds=descriptors, cwd="/",
            env=environment(self.kernels), start_new_session=True,
        )  # fmt: skip

    def ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the worker can take calls. Raises: SandboxError when it cannot start."""
        deadline = time.monotonic() + seconds
        try:
            frame = self.receive(deadline)
        except (WorkerDied, Overdue, ProtocolError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            self._complaints.seek(0)
            said = self._complaints.read(10_000).decode(errors="replace").strip().splitlines()
            self.kill()
            raise SandboxError(
                "a worker that starts in the sandbox",
                said[-1] if said else error.got,
                "run `ringlab doctor` for what is missing on this machine",
            ) from error
        if frame.kind != "hello":
            self.kill()
            raise SandboxError("a greeting from the worker", f"a frame {frame.kind!r}")
        self._find_pid()

    def _find_pid(self) -> None:
        # No student code has run yet, so what is found here can be trusted.
        self._init = self._process.pid
        self.pid = self._process.pid
        if self.unsafe:
            return
        self._init = _first_pid(self._info) if self._info is not None else 0
        children = _children(self._init)
        if len(children) != 1:
            self.kill()
            raise SandboxError("one worker in the sandbox", f"{len(children)} processes")
        self.pid = children[0]

    def send(self, frame: Frame, deadline: float) -> None:
        """Send `frame`. Raises: Overdue when the worker does not take it; WorkerDied."""
        try:
            for part in pack(frame):
                view = memoryview(part)
                while view:
                    self.socket.settimeout(_left(deadline))
                    view = view[self.socket.send(view) :]
        except TimeoutError:
            raise Overdue("a worker that reads", "the deadline") from None
        except OSError as error:
            raise WorkerDied("a worker that reads", type(error).__name__) from None

    def receive(self, deadline: float) -> Frame:
        """Return the next frame. Raises: Overdue, WorkerDied, ProtocolError."""
        while not self.frames:
            readable, _, _ = select.select([self.socket], [], [], _left(deadline))
            if not readable:
                raise Overdue("an answer", "the deadline")
            self.read_available()
        return self.frames.pop(0)

    def read_available(self) -> None:
        """Take what has arrived into `frames`, without waiting. Raises: WorkerDied, ProtocolError."""
        self.socket.settimeout(0)
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError as error:
            raise WorkerDied("an answer", type(error).__name__) from None
        if not data:
            raise WorkerDied("an answer", "the end of the worker")
        self.frames += self.reader.feed(data)
        if len(self.frames) > 4096:
            raise ProtocolError("one frame at a time", "thousands")

    def kill(self) -> None:
        """End the worker and every process it started; returns when they are gone."""
        if self._info is None:
            return
        if not self.unsafe and not self._init:
            self._init = _first_pid(self._info)
        if not self.unsafe and self._init in _children(self._process.pid):
            # The first process of a pid namespace takes all others with it.
            os.kill(self._init, signal.SIGKILL)
        if self.unsafe:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)  # it ends by itself when its namespace has
        self._process.kill()
        self._process.wait()
        self.socket.close()
        self._complaints.close()
        os.close(self._info)
        self._info = None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def resident(self) -> int:
        """Return the bytes the worker's process has in memory now."""
        return _status(self.pid, "VmRSS")

    def peak(self) -> int:
        """Return the most bytes it had in memory since `reset_peak`, or since it started."""
        return _status(self.pid, "VmHWM")

    def reset_peak(self) -> None:
        """Begin a new peak, where the system lets us."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _first_pid(info: int) -> int:
    """The first process of the sandbox, as bubblewrap reports it; 0 where it has not got so far."""
    readable, _, _ = select.select([info], [], [], 0)
    match = re.search(rb'"child-pid": *(\d+)', os.read(info, 4096)) if readable else None
    return int(match[1]) if match else 0


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _status(pid: int, name: str) -> int:
    try:
        match = re.search(rf"^{name}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
