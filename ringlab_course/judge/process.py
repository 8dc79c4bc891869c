"""One worker as the judge sees it: a socket, a deadline after which it is killed, and its peak of memory."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from dataclasses import dataclass
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
TIDYING_S = 0.05  # CPU seconds that may be used to free the arrays of a call
ROOM = 1 << 20  # bytes that sending arguments or an answer may need in addition to one copy of them
KEPT = 1 << 20
"""Bytes that a submission may keep from loading and from earlier calls before they count as memory of a call.
The reference solutions keep at most 0.3 MiB."""
FILES = 8 << 20
"""Bytes of libraries' files that calls may bring into memory; those of the reference solutions bring 4.6 MiB."""
OBJECTS = 64  # one byte of a frame's header becomes at most this many bytes of Python objects
GRACE_S = 1.0  # seconds for the rest of an answer that had begun to arrive at its deadline
START_SECONDS = 60.0  # importing torch takes 2 s of CPU, and the machine may be busy
FORK_TRIES = 3
"""Forking is given up after this many failures in a row, because a single failure may be accidental."""
_UNFORKED = dict[str, str]()
"""The arrays whose workers cannot be forked here, with the reason; each such worker is started separately."""


class WorkerDied(CourseError):
    """The worker ended, or closed its socket, before it answered."""


class Overdue(CourseError):
    """The worker did not answer in time."""


class Endless(Overdue):
    """A rank made more of something than any program needs, probably because of an endless loop."""


@dataclass(frozen=True)
class Held:
    """The bytes that a process has in memory: its own, and those of files such as libraries."""

    own: int = 0
    files: int = 0


class Growth:
    """Measures by how many bytes a worker's process grows in one call, as the operating system counts them.

    Create it while the worker waits for the arguments. Memory for the arguments does not count, but memory
    beyond that does, and so does the memory that the submission already holds (`WorkerProcess.beyond`). The
    code of libraries does not count, if the call is the first to use it.
    """

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        worker.reset_peak()
        self._base, self._code = worker.resident() - worker.beyond(), worker.code()
        self._early = 0

    def begin(self, arguments: int) -> None:
        """Begin the call, whose arguments have arrived and take `arguments` bytes."""
        most = self._base + arguments + ROOM
        self._early = max(0, self.worker.peak() - most)
        self.worker.reset_peak()
        self._base, self._code = min(self.worker.resident(), most), self.worker.code()

    def bytes(self) -> int:
        """Return the largest growth so far, in bytes."""
        return max(self._early, self._grown())

    def with_answer(self, nbytes: int) -> int:
        """Return the growth after an answer of `nbytes` bytes was sent.

        The copy that is needed to send an array that is not contiguous does not count.
        """
        return max(self._early, self._grown() - nbytes - ROOM)

    def _grown(self) -> int:
        return self.worker.peak() - self._base - max(0, self.worker.code() - self._code)


class WorkerProcess:
    """A worker in its sandbox.

    The constructor returns at once; `ready` waits until the worker can take calls.
    arrays: the package that it has imported: "numpy", "torch", "triton" (with its interpreter on) or "jax".
    The worker is forked by a server that is kept for later workers. If the system forbids that, it is started
    in a sandbox of its own. In this case, start it from a thread that lives as long as the worker, because
    bubblewrap dies with that thread.
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
        # The number of tasks before the code was loaded, and the number when the worker was last found idle.
        self.settled = self._quiet = 0
        # The memory that it held at its greeting, the memory that the submission's imports add, and the
        # value of `beyond` after loading.
        self._own = self.imported = Held()
        self.loaded = 0
        self._start: Start | None = self._started()

    def _started(self, *, alone: bool = False) -> Start:
        if self.unsafe:
            return Unprotected(self.bounds, self.arrays, self.limits)
        if alone or self.arrays in _UNFORKED:
            return Sandboxed(self.bounds, self.arrays, self.limits)
        return servers.fork(self.bounds, self.arrays, self.limits)

    @property
    def socket(self) -> socket.socket:
        """The judge's end of the socket to the worker. Raises: WorkerDied if the worker was ended."""
        if self._start is None:
            raise WorkerDied("a running worker", "one that was ended")
        return self._start.socket

    @property
    def ended(self) -> bool:
        """Whether `kill` was called."""
        return self._start is None

    @property
    def forked(self) -> bool:
        """Whether a server has forked the worker."""
        return isinstance(self._start, Forked)

    @property
    def unforked(self) -> str:
        """The reason why workers with these arrays cannot be forked on this machine, or "" if they can."""
        return _UNFORKED.get(self.arrays, "")

    def ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the worker can take calls, for at most `seconds` per attempt to start it.

        Raises: SandboxError if the worker cannot start.
        """
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
        # No learner's code has run yet, so the list of processes can be trusted.
        found = children(self._init)
        if self.unsafe and not found:  # without /proc the worker has no parent
            found = [self._init]
        if len(found) != 1:
            raise SandboxError("one worker in the sandbox", f"{len(found)} processes")
        self.pid = found[0]
        if isinstance(self._start, Forked) and (wrong := self._start.openings(self.pid)):
            raise SandboxError("a worker that is isolated from all other processes", "; ".join(wrong))
        self._own = self._held()

    def send(self, frame: Frame, deadline: Deadline) -> int:
        """Send `frame` and return about how many bytes it takes in the worker's memory.

        Raises: Overdue if the worker does not read it in time; WorkerDied; SandboxError if the worker's
        server has ended.
        """
        try:
            parts = pack(frame)
            for part in parts:
                view = memoryview(part)
                while view:
                    # The deadline also ends a send to a worker that reads only a byte now and then.
                    if not (left := deadline.left()):
                        raise TimeoutError
                    self.socket.settimeout(left)
                    view = view[self.socket.send(view) :]
        except TimeoutError:
            raise Overdue("a worker that reads in time", "one that did not read") from None
        except OSError as error:
            raise self._died("a worker that reads", type(error).__name__) from None
        return OBJECTS * len(parts[0]) + sum(len(memoryview(part)) for part in parts[1:])

    def _died(self, needed: str, got: str) -> RinglabError:
        """Return the error for the worker's end. If its server has ended, the learner is not to blame."""
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
            if grace and (not readable or grace.over):  # a byte now and then does not count as an answer
                raise Overdue("an answer in time", "none")
            if readable:
                self.read_available()
        return self.frames.pop(0)

    def read_available(self) -> None:
        """Move what has arrived into `frames`, without waiting. Raises: WorkerDied, ProtocolError."""
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
        """End the worker and every process that it started, and return when they are gone."""
        if self._start is not None:
            start, self._start = self._start, None
            start.end()

    def end_at_once(self) -> None:
        """Kill the worker and every process that it started, without waiting for their end."""
        if self._start is not None:
            self._start.end_at_once()

    def processes(self) -> list[int]:
        """Return the worker's process and all its descendants."""
        return descendants(self._init) if self._init else []

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def resident(self) -> int:
        """Return the bytes that the worker's process has in memory now."""
        return memory(self.pid, "VmRSS")

    def added(self) -> Held:
        """Return the memory that the worker has taken since it greeted the judge."""
        now = self._held()
        return Held(now.own - self._own.own, now.files - self._own.files)

    def beyond(self) -> int:
        """Return the bytes that the submission holds in excess of KEPT, FILES and the memory of its imports."""
        added = self.added()
        return max(0, added.own - self.imported.own - KEPT) + max(0, added.files - self._files())

    def code(self) -> int:
        """Return the bytes of libraries' files loaded since its greeting that `beyond` does not count."""
        return min(self.added().files, self._files())

    def _files(self) -> int:
        return self.imported.files + FILES

    def _held(self) -> Held:
        own = memory(self.pid, "RssAnon") + memory(self.pid, "RssShmem")
        return Held(own, memory(self.pid, "RssFile"))

    def peak(self) -> int:
        """Return the most bytes that it had in memory since `reset_peak`, or since it started."""
        return memory(self.pid, "VmHWM")

    def computed(self) -> float:
        """Return the seconds of processor time that the worker and its descendants have used."""
        return precise_cpu_seconds(self.processes())

    def clock(self) -> float:
        """Return the seconds of processor time that the worker's own process has used."""
        return precise_cpu_seconds([self.pid])

    def tasks(self) -> int:
        """Return the number of threads of the worker and its descendants."""
        return held(self.processes())[1]

    def goes_on(self) -> bool:
        """Return whether a thread started by the submission is still computing although no call is running.

        Waiting threads, such as those of a pool, do not count. Freeing a call's arrays, which may be late on
        a busy machine, does not count either.
        """
        tasks = self.tasks()
        if self.arrays == "jax" or tasks <= self.settled:  # JAX keeps its own threads running
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
        """Reset the peak of memory, if the system allows it."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
