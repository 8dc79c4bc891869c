"""Three ways to start a worker: forked by a server that has all imports, in its own sandbox, or unprotected.

Each way is a class. Its objects have the judge's end of the worker's socket, know the first process around
the worker, and can end both processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ringlab_course.checking.forbidden import OffLimits
from ringlab_course.judge.deadline import Deadline
from ringlab_course.judge.fork_server import FIRST
from ringlab_course.judge.processes import children, end_all, status_text
from ringlab_course.judge.removal import HOME, hidden_paths, rewritten_files
from ringlab_course.judge.sandbox import (
    Bounds,
    command,
    environment,
    launch,
    next_uid,
    server_command,
)
from ringlab_course.judge.seccomp import filter_program

ORDER_S = 5.0
"""Seconds to wait until the server's socket accepts an order. It can hold dozens of orders that are not read yet."""
END_S = 5.0
"""Seconds that the kernel may take to end all processes of a namespace."""


class Start(Protocol):
    """A worker that was started. `socket` is the judge's end; the worker's greeting arrives there."""

    socket: socket.socket

    def first(self, deadline: Deadline | None) -> int:
        """Return the first process of the sandbox, the worker's parent, or 0 if unknown by `deadline`."""

    def complaint(self) -> str:
        """Return the last line that was written to standard error before the worker's greeting."""

    def end_at_once(self) -> None:
        """Kill the worker and all processes that it has started, without waiting for their end."""

    def end(self) -> None:
        """Kill the worker and its processes, and return when they are gone. Call this only once."""


class _Launched:
    """A child process that becomes or starts the worker. Its standard error is a pipe to the judge."""

    def __init__(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> None:
        # A pipe and not a file, because without root a worker can open the files that bubblewrap has open.
        self._complaints, self._complain = os.pipe()
        os.set_blocking(self._complaints, False)
        self.socket, self._theirs = socket.socketpair(socket.AF_UNIX, kind)

    def _run(self, line: list[str], environ: dict[str, str], *descriptors: int) -> None:
        null = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                line, stdin=null, stdout=null, stderr=self._complain, pass_fds=(self._theirs.fileno(), *descriptors),
                cwd="/", env=environ, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self.socket.close()
            os.close(self._complaints)
            raise
        finally:
            self._theirs.close()
            os.close(self._complain)

    def complaint(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return last_line(self._complaints)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.socket.close()
        os.close(self._complaints)


def arguments(program: str, descriptor: int, arrays: str, limits: OffLimits | None) -> list[str]:
    """Return the Python arguments that run `program`, a module of the judge, in a sandbox."""
    start = f"import sys; sys.path.insert(0, sys.argv[1]); from ringlab_course.judge.{program} import main; main()"
    return ["-c", start, str(HOME), str(descriptor), arrays, limits.as_text() if limits else ""]


def filter_of(arrays: str) -> bytes | None:
    """Return the system-call filter of a worker with these arrays.

    It is None on a machine whose system calls are not listed.
    """
    return filter_program(alone=arrays == "jax")  # JAX runs in one worker, rings in several


def file_in_memory(name: str, content: bytes) -> int:
    """Return a descriptor of a file in memory with this content; the caller has to close it."""
    descriptor = os.memfd_create(name)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@contextlib.contextmanager
def rewritten(limits: OffLimits | None) -> Iterator[dict[str, int]]:
    """Yield a descriptor of the new text for each file that a worker with these limits sees rewritten."""
    descriptors: dict[str, int] = {}
    try:
        for name, text in (rewritten_files(limits) if limits else {}).items():
            descriptors[name] = file_in_memory(name, text.encode())
        yield descriptors
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


class Sandboxed(_Launched):
    """A worker that bubblewrap starts in a sandbox of its own.

    Start it from a thread that lives as long as the worker, because bubblewrap dies with that thread.
    """

    def __init__(self, bounds: Bounds, arrays: str, limits: OffLimits | None) -> None:
        super().__init__()
        self._info, info_fd = os.pipe()
        self._first = 0
        program = filter_of(arrays)
        seccomp_fd = None if program is None else file_in_memory("seccomp", program)
        passed = [info_fd, *(() if seccomp_fd is None else (seccomp_fd,))]
        try:
            worker = arguments("worker", self._theirs.fileno(), arrays, limits)
            hidden = hidden_paths(limits)
            with rewritten(limits) as files:
                line = command(
                    worker, bounds, info_fd=info_fd, seccomp_fd=seccomp_fd, hidden=hidden, rewritten=files,
                    arrays=arrays,
                )  # fmt: skip
                self._run(line, environment(arrays), *passed, *files.values())
        except BaseException:
            os.close(self._info)
            raise
        finally:
            for descriptor in passed:
                os.close(descriptor)

    def first(self, deadline: Deadline | None) -> int:
        if not self._first and select.select([self._info], [], [], deadline.left() if deadline else 0)[0]:
            found = re.search(rb'"child-pid": *(\d+)', os.read(self._info, 4096))
            self._first = int(found[1]) if found else 0
        return self._first

    def end_at_once(self) -> None:
        if self._first in children(self._process.pid):
            # When the first process of a pid namespace ends, the kernel kills all others.
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._first, signal.SIGKILL)

    def end(self) -> None:
        self.first(None)
        self.end_at_once()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)  # bubblewrap ends when its namespace has ended
        os.close(self._info)
        super().end()


class Unprotected(_Launched):
    """A worker without a sandbox, used only with --unsafe."""

    def __init__(self, bounds: Bounds, arrays: str, limits: OffLimits | None) -> None:
        super().__init__()
        self._mark = secrets.token_hex(16)  # marks the processes that this worker has started
        worker = arguments("worker", self._theirs.fileno(), arrays, limits)
        self._run(launch(worker, bounds, unsafe=True), {**environment(arrays), "RINGLAB_WORKER": self._mark})

    def first(self, deadline: Deadline | None) -> int:
        return self._process.pid

    def end_at_once(self) -> None:
        end_all(self._process.pid, self._mark.encode())
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.end_at_once()
        super().end()


class ForkServer(_Launched):
    """A process in a sandbox that has imported all that workers with these arrays and limits need, and forks them.

    Start it from a thread that lives as long as the server is needed, because bubblewrap dies with that
    thread.
    """

    def __init__(self, arrays: str, limits: OffLimits | None) -> None:
        super().__init__(socket.SOCK_SEQPACKET)
        self.arrays, self.workers = arrays, 0
        server = arguments("fork_server", self._theirs.fileno(), arrays, limits)
        with rewritten(limits) as files:
            line = server_command(server, hidden=hidden_paths(limits), rewritten=files, arrays=arrays)
            self._run(line, environment(arrays), *files.values())

    def alive(self) -> bool:
        """Return whether the server can still fork."""
        if self.socket.fileno() < 0:
            return False
        look = select.poll()
        look.register(self.socket, 0)
        # the server closes its end of the socket before its process ends
        return not look.poll(0) and self._process.poll() is None

    def namespaces(self) -> dict[str, str]:
        """Return the server's namespaces by name. Raises: OSError if it has none yet or has ended."""
        (first,) = children(self._process.pid)
        return namespaces(first)

    def fork(self, bounds: Bounds) -> Forked:
        """Return a new worker. If the server has ended, the worker's greeting never comes."""
        ours, theirs = socket.socketpair()
        limits = bounds.rlimits()
        limits["RLIMIT_NPROC"] += 1  # one more for the worker's parent, which has the same uid
        program = filter_of(self.arrays)
        uid = next_uid()
        order = {"uid": uid, "limits": limits, "scratch": bounds.scratch_bytes}
        text = json.dumps({**order, "filter": None if program is None else program.hex()})
        # Read and discard messages about earlier workers that were ended while they started.
        last_line(self._complaints)
        self.socket.settimeout(ORDER_S)
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self.socket, [text.encode()], [theirs.fileno()])
        self.workers += 1
        return Forked(ours, self, uid, filtered=program is not None)


class Forked:
    """A worker that a fork server has forked."""

    def __init__(self, ours: socket.socket, server: ForkServer, uid: int | None, *, filtered: bool) -> None:
        self.socket, self.server, self.uid, self.filtered = ours, server, uid, filtered
        self._pidfd: int | None = None
        self._first = 0

    def first(self, deadline: Deadline | None) -> int:
        if (
            self._pidfd is None
            and select.select([self.socket], [], [], deadline.left() if deadline else 0)[0]
        ):
            self.socket.settimeout(None)
            with contextlib.suppress(OSError):
                said, descriptors, _, _ = socket.recv_fds(self.socket, len(FIRST), 1)
                if said == FIRST and descriptors:
                    (self._pidfd,) = descriptors
                    self._first = _pid_of(self._pidfd)
        return self._first

    def openings(self, pid: int) -> list[str]:
        """Return the faults in the isolation of the worker `pid`: things that it shares, or may still do.

        It must not have run any code of the submission yet.
        """
        status = status_text(Path(f"/proc/{pid}/status"))
        wanted = {f"Cap{kind}": "0" * 16 for kind in ("Inh", "Prm", "Eff", "Amb")} | {"NoNewPrivs": "1"}
        said = dict(re.findall(r"^(\w+):\s*(\S+)", status, re.MULTILINE))
        if self.uid is not None:
            wanted["Uid"] = wanted["Gid"] = str(self.uid)
        if self.filtered:
            wanted["Seccomp"] = "2"
            if "Seccomp_filters" in said:
                # The worker inherits this process's filters, and adds that of forbid_programs and its own.
                wanted["Seccomp_filters"] = str(2 + filters_of("self"))
        wrong = [
            f"{name} is {said.get(name)}, not {value}"
            for name, value in wanted.items()
            if said.get(name) != value
        ]
        try:
            theirs, own = self.server.namespaces(), namespaces(pid)
        except (OSError, ValueError) as error:
            return [*wrong, f"its namespaces cannot be read: {error}"]
        return wrong + [f"it shares the namespace {name}" for name in own if own[name] == theirs[name]]

    def complaint(self) -> str:
        return self.server.complaint()

    def end_at_once(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self) -> None:
        self.first(None)
        self.end_at_once()
        self.socket.close()  # a worker that is still starting then ends at once
        self.server.workers -= 1
        if self._pidfd is not None:
            select.select([self._pidfd], [], [], END_S)
            os.close(self._pidfd)


def _pid_of(pidfd: int) -> int:
    """Return a process's number in this process's namespace, or 0 if it has ended."""
    found = re.search(r"^Pid:\s*(\d+)", status_text(Path(f"/proc/self/fdinfo/{pidfd}")), re.MULTILINE)
    return int(found[1]) if found else 0


def last_line(descriptor: int) -> str:
    """Return the last line of the text that can be read from a pipe now."""
    said: list[str] = []
    with contextlib.suppress(BlockingIOError):  # the pipe is empty but still open at its other end
        said = os.read(descriptor, 10_000).decode(errors="replace").strip().splitlines()
    return said[-1] if said else ""


def filters_of(pid: int | str) -> int:
    """Return the number of system-call filters of a process, or 0 if the kernel does not report it."""
    found = re.search(r"^Seccomp_filters:\s*(\d+)", status_text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return int(found[1]) if found else 0


def namespaces(pid: int) -> dict[str, str]:
    """Return a process's namespaces by name. Raises: OSError if it has ended."""
    names = ("cgroup", "ipc", "mnt", "net", "pid", "uts", *(() if os.getuid() == 0 else ("user",)))
    return {name: os.readlink(f"/proc/{pid}/ns/{name}") for name in names}
