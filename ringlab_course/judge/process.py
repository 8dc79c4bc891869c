"""One worker as the judge sees it: a socket to talk through, a clock that kills, a peak of memory to read."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from ringlab.errors import CourseError, SandboxError
from ringlab_course.judge.offlimits import HOME, OffLimits
from ringlab_course.judge.processes import children, descendants, end_all, held, memory, precise_cpu_seconds
from ringlab_course.judge.protocol import Frame, FrameReader, ProtocolError, pack
from ringlab_course.judge.sandbox import HIDDEN, Bounds, command, environment, launch
from ringlab_course.judge.seccomp import filter_file

LOOK_S = 0.2
GRACE_S = 1.0  # for the rest of an answer that was on its way at its deadline
START_SECONDS = 60.0  # torch takes 2 s of CPU to import, on a machine that may be busy


class WorkerDied(CourseError):
    """The worker ended, or closed its socket, before it answered."""


class Overdue(CourseError):
    """The worker did not answer in time."""


class Endless(Overdue):
    """A rank made more of something than any program needs: a loop that does not end, and no forgery."""


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
        mesh: bool = False,
        unsafe: bool = False,
        limits: OffLimits | None = None,
    ) -> None:
        self.limits = limits
        self.unsafe = unsafe
        self.arrays = "triton" if kernels else "jax" if mesh else "torch" if torch else "numpy"
        self.bounds = bounds or Bounds()
        self.reader = FrameReader()
        self.frames: list[Frame] = []
        self.pid = self._init = 0
        self.settled = self._quiet = (
            0  # numbers of tasks: before the code is loaded, and when it was last found idle
        )
        self._mark = secrets.token_hex(16)  # by which a process that was started without a sandbox is known
        # The launcher may complain. Not into a file: without root a worker can open bubblewrap's open files.
        self._complaints, self._complain = os.pipe()
        os.set_blocking(self._complaints, False)
        self.socket, theirs = socket.socketpair()
        read_end, write_end = os.pipe()
        try:
            self._info: int | None = read_end
            self._process = self._spawn(theirs.fileno(), write_end)
        except BaseException:
            self.socket.close()
            os.close(self._complaints)
            os.close(read_end)
            self._info = None
            raise
        finally:
            theirs.close()
            os.close(self._complain)
            os.close(write_end)

    def _spawn(self, socket_fd: int, info_fd: int) -> subprocess.Popen[bytes]:
        start = "import sys; sys.path.insert(0, sys.argv[1]); from ringlab_course.judge.worker import main; main()"
        worker = ["-c", start, str(HOME), str(socket_fd), self.arrays]
        worker.append(self.limits.as_text() if self.limits else "")
        if self.unsafe:
            return self._run(launch(worker, self.bounds, unsafe=True), socket_fd)
        seccomp_fd = filter_file(alone=self.arrays == "jax")  # only rings have several workers
        try:
            hidden = self.limits.hidden_paths() if self.limits else HIDDEN
            line = command(
                worker,
                self.bounds,
                info_fd=info_fd,
                seccomp_fd=seccomp_fd,
                hidden=hidden,
                arrays=self.arrays,
            )
            return self._run(line, socket_fd, info_fd, *(() if seccomp_fd is None else (seccomp_fd,)))
        finally:
            if seccomp_fd is not None:
                os.close(seccomp_fd)

    def _run(self, line: list[str], *descriptors: int) -> subprocess.Popen[bytes]:
        null, environ = subprocess.DEVNULL, environment(self.arrays)
        if self.unsafe:
            environ["RINGLAB_WORKER"] = self._mark
        return subprocess.Popen(
            line, stdin=null, stdout=null, stderr=self._complain, pass_fds=descriptors, cwd="/",
            env=environ, start_new_session=True,
        )  # fmt: skip

    def ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the worker can take calls. Raises: SandboxError when it cannot start."""
        deadline = time.monotonic() + seconds
        try:
            frame = self.receive(deadline)
        except (WorkerDied, Overdue, ProtocolError) as error:
            said: list[str] = []
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            with contextlib.suppress(BlockingIOError):  # nothing was said, and something lives that could
                said = os.read(self._complaints, 10_000).decode(errors="replace").strip().splitlines()
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
        if self.unsafe:
            self._init = self._process.pid
        elif self._info is not None:
            self._init = _first_pid(self._info)
        found = children(self._init)
        if self.unsafe and not found:  # no supervisor, as there is no /proc here
            found = [self._process.pid]
        if len(found) != 1:
            self.kill()
            raise SandboxError("one worker in the sandbox", f"{len(found)} processes")
        self.pid = found[0]

    def send(self, frame: Frame, deadline: float) -> None:
        """Send `frame`. Raises: Overdue when the worker does not take it; WorkerDied."""
        try:
            for part in pack(frame):
                view = memoryview(part)
                while view:
                    if time.monotonic() > deadline:  # a worker that takes a byte now and then
                        raise TimeoutError
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
            if not readable or time.monotonic() > deadline + GRACE_S:  # a byte now and then is no answer
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
            raise Endless("one frame at a time", "it had sent thousands of messages at once")

    def kill(self) -> None:
        """End the worker and every process it started; returns when they are gone."""
        if self._info is None:
            return
        if not self.unsafe and not self._init:
            self._init = _first_pid(self._info)
        self.end_at_once()
        if not self.unsafe:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)  # it ends by itself when its namespace has
        self._process.kill()
        self._process.wait()
        self.socket.close()
        os.close(self._complaints)
        os.close(self._info)
        self._info = None

    def end_at_once(self) -> None:
        """Send the end to the worker and every process it started, without taking notice of it: `kill` does."""
        if not self.unsafe:
            if self._init in children(self._process.pid):
                # The first process of a pid namespace takes all others with it.
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(self._init, signal.SIGKILL)
            return
        end_all(self._process.pid, self._mark.encode())
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Return the worker's process and all that it, or what it started, has started."""
        return descendants(self._init) if self._init else []

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def resident(self) -> int:
        """Return the bytes the worker's process has in memory now."""
        return memory(self.pid, "VmRSS")

    def peak(self) -> int:
        """Return the most bytes it had in memory since `reset_peak`, or since it started."""
        return memory(self.pid, "VmHWM")

    def computed(self) -> float:
        """Return the seconds of processor time that the worker, and what it has started, has used."""
        return precise_cpu_seconds(self.processes())

    def clock(self) -> float:
        """Return the seconds of processor time that the worker's own process has used."""
        return precise_cpu_seconds([self.pid])

    def tasks(self) -> int:
        """Return the number of its threads, children's too."""
        return held(self.processes())[1]

    def goes_on(self) -> bool:
        """Whether it computes in a thread that it has started since before the code was loaded, although it should wait for a call.

        Threads that wait, as those of a pool, do not count; nor does what puts the call's arrays away at first.
        """
        tasks = self.tasks()
        if self.arrays == "jax" or tasks <= self.settled:  # JAX keeps threads of its own
            return False
        if tasks <= self._quiet and not self._computes_for(LOOK_S / 5):
            return False
        going = self._computes_for(LOOK_S)
        self._quiet = 0 if going else tasks
        return going

    def _computes_for(self, seconds: float) -> bool:
        time.sleep(seconds / 2)
        before = self.clock()
        time.sleep(seconds)
        return self.clock() - before > seconds / 100

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
