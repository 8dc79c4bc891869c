"""One worker as the judge sees it: a socket to talk through, a clock that kills, a peak of memory to read."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from pathlib import Path
from typing import Any

from ringlab.errors import CourseError, RinglabError, SandboxError
from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.checking.protocol import Frame, FrameReader, ProtocolError, pack
from ringlab_course.judge import servers
from ringlab_course.judge.deadline import Deadline
from ringlab_course.judge.processes import children, descendants, held, memory, precise_cpu_seconds
from ringlab_course.judge.sandbox import Bounds
from ringlab_course.judge.spawn import Forked, Sandboxed, Start, Unprotected

LOOK_S, LOOKS = 0.2, 5
TIDYING_S = 0.05  # of computing, in which every call's arrays are put away
ROOM = (
    1 << 20
)  # bytes that it may take a worker to receive arguments or to send an answer, beside a copy of it
OBJECTS = 64  # bytes of Python's objects that a byte of a frame's header may become
GRACE_S = 1.0  # for the rest of an answer that was on its way at its deadline
START_SECONDS = 60.0  # torch takes 2 s of CPU to import, on a machine that may be busy
FORK_TRIES = 3
"""Workers that may fail one after another before forking is given up: a single failure may be the machine's bad moment."""
_UNFORKED = dict[str, str]()
"""The arrays whose workers could not be forked here, with the reason: they are started one by one."""


class WorkerDied(CourseError):
    """The worker ended, or closed its socket, before it answered."""


class Overdue(CourseError):
    """The worker did not answer in time."""


class Endless(Overdue):
    """A rank made more of something than any program needs: a loop that does not end, and no forgery."""


class Growth:
    """Reads how many bytes a worker's process grows by in one call, as the operating system counts them.

    It is made while the worker listens for the arguments: what they need does not count, what is taken beside them does.
    """

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        worker.reset_peak()
        self._base = worker.resident()
        self._early = 0

    def begin(self, arguments: int) -> None:
        """Begin the call, whose arguments have arrived and take this many bytes."""
        most = self._base + arguments + ROOM
        self._early = max(0, self.worker.peak() - most)
        self.worker.reset_peak()
        self._base = min(self.worker.resident(), most)

    def bytes(self) -> int:
        """Return the most bytes by which it has grown so far."""
        return max(self._early, self.worker.peak() - self._base)

    def with_answer(self, nbytes: int) -> int:
        """Return the growth after an answer of `nbytes` was sent, without the copy that is sent of arrays that are not contiguous."""
        return max(self._early, self.worker.peak() - self._base - nbytes - ROOM)


class WorkerProcess:
    """A worker in its sandbox. Starting returns at once; `ready` waits until it can take calls.

    arrays: what it has imported: "numpy", "torch", "triton" (with its interpreter on) or "jax".
    It is forked by a server that is kept for later workers. Where the system forbids that, it is started in a sandbox of its own:
    then from a thread that lives as long as the worker does, since bubblewrap dies with that thread.
    """

    def __init__(
        self,
        bounds: Bounds | None = None,
        *,
        arrays: str = "numpy",
        unsafe: bool = False,
        limits: OffLimits | None = None,
    ) -> None:
        self.arrays, self.unsafe, self.limits = arrays, unsafe, limits
        self.bounds = bounds or Bounds()
        self.reader = FrameReader()
        self.frames: list[Frame] = []
        self.pid = self._init = 0
        self.settled = self._quiet = (
            0  # numbers of tasks: before the code is loaded, and when it was last found idle
        )
        self._start: Start | None = self._started()

    def _started(self, *, alone: bool = False) -> Start:
        if self.unsafe:
            return Unprotected(self.bounds, self.arrays, self.limits)
        if alone or self.arrays in _UNFORKED:
            return Sandboxed(self.bounds, self.arrays, self.limits)
        return servers.fork(self.bounds, self.arrays, self.limits)

    @property
    def socket(self) -> socket.socket:
        """The judge's end of the socket to the worker. Raises: WorkerDied after its end."""
        if self._start is None:
            raise WorkerDied("a running worker", "one that was ended")
        return self._start.socket

    @property
    def ended(self) -> bool:
        """Whether `kill` was called."""
        return self._start is None

    @property
    def forked(self) -> bool:
        """Whether a server has forked it."""
        return isinstance(self._start, Forked)

    @property
    def unforked(self) -> str:
        """Why workers with its arrays cannot be forked on this machine; "" where they can."""
        return _UNFORKED.get(self.arrays, "")

    def ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the worker can take calls, for so many seconds each time it is started. Raises: SandboxError when it cannot start."""
        failures: list[str] = []
        while True:
            deadline = Deadline(seconds)
            try:
                self._greet(deadline)
                break
            except SandboxError as error:
                server = self._start.server if isinstance(self._start, Forked) else None
                self.kill()
                if server is None:
                    raise
                failures.append(error.got)
                if deadline.over:
                    servers.give_up(server)
                self._start = self._started(alone=len(failures) == FORK_TRIES)
        if failures and not self.forked:
            _UNFORKED[self.arrays] = failures[-1]

    def _greet(self, deadline: Deadline) -> None:
        assert self._start is not None
        try:
            self._init = self._start.first(deadline)
            frame = self.receive(deadline)
        except (WorkerDied, Overdue, ProtocolError) as error:
            raise SandboxError(
                "a worker that starts in the sandbox",
                self._start.complaint() or error.got,
                "run `ringlab doctor` for what is missing on this machine",
            ) from error
        if frame.kind != "hello":
            raise SandboxError("a greeting from the worker", f"a frame {frame.kind!r}")
        # No student code has run yet, so what is found here can be trusted.
        found = children(self._init)
        if self.unsafe and not found:  # no supervisor, as there is no /proc here
            found = [self._init]
        if len(found) != 1:
            raise SandboxError("one worker in the sandbox", f"{len(found)} processes")
        self.pid = found[0]
        if isinstance(self._start, Forked) and (wrong := self._start.openings(self.pid)):
            raise SandboxError("a worker shut off from all others", "; ".join(wrong))

    def send(self, frame: Frame, deadline: Deadline) -> int:
        """Send `frame` and return about how many bytes it takes where it was read. Raises: Overdue when the worker does not take it; WorkerDied; SandboxError when its server has ended."""
        try:
            parts = pack(frame)
            for part in parts:
                view = memoryview(part)
                while view:
                    if not (left := deadline.left()):  # a worker that takes a byte now and then
                        raise TimeoutError
                    self.socket.settimeout(left)
                    view = view[self.socket.send(view) :]
        except TimeoutError:
            raise Overdue("a worker that reads in time", "one that did not read") from None
        except OSError as error:
            raise self._died("a worker that reads", type(error).__name__) from None
        return OBJECTS * len(parts[0]) + sum(len(memoryview(part)) for part in parts[1:])

    def _died(self, needed: str, got: str) -> RinglabError:
        """Return the error for its end: that of its server is no learner's fault."""
        if isinstance(self._start, Forked) and not self._start.server.alive():
            remedy = "grade it again; is there memory enough?"
            return SandboxError("a server that lives as long as its workers", "its end", remedy)
        return WorkerDied(needed, got)

    def receive(self, deadline: Deadline) -> Frame:
        """Return the next frame.

        Raises: Overdue, WorkerDied, ProtocolError; SandboxError if the server that started the worker has ended.
        """
        grace: Deadline | None = None
        while not self.frames:
            left = deadline.left()
            grace = None if left else grace or Deadline(GRACE_S)
            readable, _, _ = select.select([self.socket], [], [], left)
            if grace and (not readable or grace.over):  # a byte now and then is no answer
                raise Overdue("an answer in time", "none")
            if readable:
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
            raise self._died("an answer", type(error).__name__) from None
        if not data:
            raise self._died("an answer", "a worker that closed its socket")
        self.frames += self.reader.feed(data)
        if len(self.frames) > 4096:
            raise Endless("one frame at a time", "it had sent thousands of messages at once")

    def kill(self) -> None:
        """End the worker and every process it started; returns when they are gone."""
        if self._start is not None:
            start, self._start = self._start, None
            start.end()

    def end_at_once(self) -> None:
        """Kill the worker and every process that it started, without waiting; `kill` waits."""
        if self._start is not None:
            self._start.end_at_once()

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
        """Return whether a thread started by the submission is still computing although no call is running.

        Waiting threads, such as those of a pool, do not count. Freeing a call's arrays, which may be late on a busy
        machine, does not count either.
        """
        tasks = self.tasks()
        if self.arrays == "jax" or tasks <= self.settled:  # JAX keeps threads of its own
            return False
        if tasks <= self._quiet and not self._computes_for(LOOK_S / 5):
            return False
        before, looks = self.clock(), 0
        while going := self._computes_for(LOOK_S):
            looks += 1
            if looks == LOOKS or self.clock() - before > TIDYING_S:
                break
        self._quiet = 0 if going else tasks
        return going

    def _computes_for(self, seconds: float) -> bool:
        time.sleep(seconds / 2)
        before = self.clock()
        time.sleep(seconds)
        return self.clock() - before > seconds / 100

    def reset_peak(self) -> None:
        """Let the peak begin anew, where the system allows it."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
