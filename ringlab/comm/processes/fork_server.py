"""A process that has imported torch and forks the ranks of launches, like `multiprocessing`'s fork server.

A new Python process takes more than a second to import torch, and eight processes on two cores take eight
seconds. A fork takes a few hundredths of a second. The first launch starts the server. When the launching
process ends, its socket closes, and the server kills the ranks that are still running and removes their folder. The
server runs only on Linux, because macOS has libraries that do not survive a fork. All ranks have the same
hash seed, so a set of strings has the same order on each rank, which torchrun does not guarantee.

`python -m ringlab.comm.processes.fork_server` is the server. Its standard input is the socket. A request
contains the arguments of a rank, the ends of two pipes for the rank's output, and the end of a socket. On
this socket the server answers "started" with the process number or "failed" with a reason, and at the end
"ended" with the exit status.
"""

from __future__ import annotations

import array
import atexit
import gc
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

from ringlab.comm.processes.rank_process import STARTUP, die_with
from ringlab.errors import CommError, TransportTimeout

AVAILABLE = sys.platform == "linux"
_LONGEST = 1 << 16  # largest number of bytes of a request or an answer
# pytest changes this variable before each test. A server that started with another value can still be used.
_CHANGING = "PYTEST_CURRENT_TEST"
_NEEDED = "the process that forks the ranks to keep running"


class ForkedProcess:
    """A process forked by the server, with the attributes of `subprocess.Popen` that `Child` needs.

    If this object is deleted before the process has ended, the server kills the process.

    Raises: CommError if the system cannot start another process, or if the server ends; TransportTimeout if
    the server does not answer.
    """

    def __init__(self, server: ForkServer, folder: Path, rank: int) -> None:
        self.server = server  # the server ends when nothing refers to it
        self.returncode: int | None = None
        request = {"folder": str(folder), "rank": rank}
        with ExitStack() as ours, ExitStack() as theirs:
            self.stdout, out = _pipe(ours, theirs)
            self.stderr, err = _pipe(ours, theirs)
            self._status, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(self._status)
            theirs.enter_context(answers)
            server.ask(request, [out, err, answers.fileno()])
            theirs.close()
            self.pid = self._started()
            ours.pop_all()

    def _started(self) -> int:
        self._status.settimeout(STARTUP)
        try:
            kind, _, value = self._status.recv(_LONGEST).decode().partition(" ")
        except TimeoutError:
            raise self.server.late() from None
        if kind == "failed":
            raise CommError("a new process for a rank", value, "fewer ranks, or a higher limit of processes")
        if kind != "started":
            raise self.server.gone()
        self._status.settimeout(None)
        return int(value)

    def poll(self) -> int | None:
        """Return the exit status if the process has ended, which is −n after signal n, or else None."""
        return self._ended(socket.MSG_DONTWAIT)

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit status."""
        code = self._ended(0)
        assert code is not None
        return code

    def _ended(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                kind, _, value = self._status.recv(_LONGEST, flags).decode().partition(" ")
            except BlockingIOError:
                return None
            # If the server is gone, it has killed the rank.
            self.returncode = int(value) if kind == "ended" else -signal.SIGKILL
            self._status.close()
        return self.returncode


class ForkServer:
    """The parent's connection to a server.

    The server has the given environment, and the directory, limits, umask and processors of this process.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._inherited, self.owner = _inherited(environment), os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                env=environment, stdin=theirs.fileno(), start_new_session=True,
            )  # fmt: skip
        weakref.finalize(self, _end, self.owner, self._control, self.process)

    def serves(self, environment: dict[str, str]) -> bool:
        """Return whether this server runs and its forks would equal new processes with this environment."""
        own = self.owner == os.getpid() and self._inherited == _inherited(environment)
        return own and self.process.poll() is None

    def ask(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Send a request and file descriptors to the server. Raises: CommError if the server has ended."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            self._control.sendmsg([json.dumps(request).encode()], rights)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self.gone() from error

    def gone(self) -> CommError:
        """Return the error for a server that has ended."""
        return CommError(_NEEDED, f"it ended with status {self._stop()}", "see its error on stderr")

    def late(self) -> TransportTimeout:
        """End a server that does not answer, and return the error for it."""
        self._stop()
        return TransportTimeout(f"an answer from the process that forks ranks within {STARTUP:g} s", "none")

    def forget(self) -> None:
        """Close this fork's copy of the socket, so that the server ends when its parent process ends."""
        self._control.close()

    def _stop(self) -> int:
        self.process.kill()
        return self.process.wait()


_lock = threading.Lock()
_server: ForkServer | None = None


def running(environment: dict[str, str]) -> ForkServer:
    """Return a server whose forks have this environment: the last server if it fits, otherwise a new one."""
    global _server
    with _lock:
        if _server is None or not _server.serves(environment):
            _server = ForkServer(environment)
        return _server


def _in_a_fork() -> None:
    """Forget the server in a fork of this process, so that the fork starts a separate server."""
    global _lock, _server
    if _server is not None:
        _server.forget()
    _lock, _server = threading.Lock(), None


if AVAILABLE:
    os.register_at_fork(after_in_child=_in_a_fork)


def _inherited(environment: dict[str, str]) -> tuple[Any, ...]:
    """Return the settings that a new process would inherit from this process. A fork inherits the server's."""
    lasting = {name: value for name, value in environment.items() if name != _CHANGING}
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    limits = [resource.getrlimit(getattr(resource, name)) for name in names]
    status = Path("/proc/self/status").read_text().splitlines()
    umask = [line for line in status if line.startswith("Umask:")]
    return lasting, _directory(), limits, umask, os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[Any, int]:
    read, write = os.pipe()
    theirs.callback(os.close, write)
    return ours.enter_context(os.fdopen(read, "rb", 0)), write


def _end(owner: int, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()


def main() -> NoReturn:
    """Serve until the parent has ended. In each fork, run its rank and exit with the status of the rank."""
    from ringlab.comm.processes import rank_process

    _import_all()
    server = os.getpid()
    folder, rank = _Server().serve()
    code = 1
    try:
        code = rank_process.main(folder, rank, server)
    finally:
        _exit(code)


def _exit(code: int) -> NoReturn:
    """End a fork without clearing its modules, because that would take longer than the fork."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins all threads but daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _import_all() -> None:
    """Import the modules that every rank needs.

    No thread may be started, because it would not survive a fork.
    """
    import cloudpickle  # noqa: F401
    import numpy.random  # noqa: F401
    import torch
    import torch.fx.experimental.symbolic_shapes  # otherwise the first backward would import it, in 0.5 s

    from ringlab.comm.memory import MemoryMeter
    from ringlab.comm.processes import connect  # noqa: F401

    with MemoryMeter(0).watch():  # torch imports some 900 modules at the first use
        torch.empty(0)
    gc.freeze()  # a garbage collection in a fork would touch all these objects and copy their pages


class _Server:
    """The state of the server: its sockets, and the processes that run."""

    def __init__(self) -> None:
        self.control = socket.socket(fileno=os.dup(0))
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        self.deaths, self.wakes = socket.socketpair()
        self.running: dict[int, socket.socket] = {}
        self.folders: set[str] = set()
        self.selector = selectors.DefaultSelector()

    def serve(self) -> tuple[Path, int]:
        """Fork a process for each request.

        Return only in the forks, with the folder and rank of the request.
        """
        for each in (self.deaths, self.wakes):
            each.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakes.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.control, selectors.EVENT_READ)
        self.selector.register(self.deaths, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in self.selector.select()]
            if self.deaths in ready:
                self.deaths.recv(1 << 12)
                self._reap()
            for pid, status in self.running.items():
                if status in ready:  # readable, though nothing is ever sent: the parent has closed its end
                    self.selector.unregister(status)
                    with suppress(OSError):
                        os.killpg(pid, signal.SIGKILL)
            if self.control in ready and (rank := self._answer()) is not None:
                return rank

    def _answer(self) -> tuple[Path, int] | None:
        """Fork a process for a request. Return the folder and rank in the fork."""
        message, descriptors, _, _ = socket.recv_fds(self.control, _LONGEST, 3)
        if not message:
            self._end_as_the_parent_did()
        if len(descriptors) < 3:  # too many files are open; closing the socket tells the parent
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        out, err, number = descriptors
        request = json.loads(message)
        self.folders = {folder for folder in self.folders if os.path.exists(folder)} | {request["folder"]}
        status = socket.socket(fileno=number)
        status.set_inheritable(False)
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _tell(status, f"failed {error.strerror}")
            status.close()
            pid = -1
        if pid == 0:
            return self._become_a_rank(request, server, out, err, status)
        os.close(out)
        os.close(err)
        if pid > 0:
            with suppress(OSError):
                # The rank makes this call too. Here it ensures that the group exists before the parent gets
                # its answer.
                os.setpgid(pid, pid)
            self.running[pid] = status
            self.selector.register(status, selectors.EVENT_READ)
            _tell(status, f"started {pid}")
        return None

    def _end_as_the_parent_did(self) -> NoReturn:
        """Kill the ranks, and remove the folders that a killed parent could not remove."""
        for pid in self.running:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _reap(self) -> None:
        while self.running:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with self.running.pop(pid) as status:
                with suppress(KeyError):
                    self.selector.unregister(status)
                _tell(status, f"ended {os.waitstatus_to_exitcode(code)}")

    def _become_a_rank(
        self, request: dict[str, Any], server: int, out: int, err: int, status: socket.socket
    ) -> tuple[Path, int]:
        """Turn this fork into the process of a rank, and return the folder and the rank."""
        import numpy.random

        die_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        os.setpgid(0, 0)  # a process group, so that a kill also ends processes that the rank starts
        self.selector.close()
        for left in (status, self.control, self.deaths, self.wakes, *self.running.values()):
            left.close()
        os.environ["LOCAL_RANK"] = str(request["rank"])
        numpy.random.seed()  # otherwise all forks would draw the same numbers
        return Path(request["folder"]), request["rank"]


def _tell(status: socket.socket, answer: str) -> None:
    with suppress(OSError):  # the parent may have closed its end already
        status.send(answer.encode())


if __name__ == "__main__":
    main()
