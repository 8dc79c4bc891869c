"""A process that has imported torch and forks the ranks of this process's launches, like `multiprocessing`'s fork server.

A fresh Python needs more than a second to import torch, and eight of them on two cores need eight; a fork takes some
hundredths of a second. The server is started by the first launch and ends with the process that launches, whose death
it notices by its socket. On Linux only: elsewhere, code that torch loads does not survive a fork. All ranks have one
seed of hashes: a set of strings has the same order on each of them, which torchrun does not promise.

`python -m ringlab.comm.processes.fork_server` is the server; its standard input is the socket. A request holds the
arguments of a rank, and with them the ends of two pipes for its output and of a socket for its number and exit status.
"""

from __future__ import annotations

import array
import atexit
import gc
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, NoReturn

from ringlab.errors import CommError

AVAILABLE = sys.platform == "linux"
_LONGEST = 1 << 16  # bytes of a request: a folder, a rank, the working directory
_CHANGING = (
    "PYTEST_CURRENT_TEST"  # pytest writes another value before each test: no reason for another server
)
_NUMBER = struct.Struct("q")


class ForkedProcess:
    """A process forked by the server, with the attributes of `subprocess.Popen` that `Child` needs."""

    def __init__(self, server: ForkServer, folder: Path, rank: int) -> None:
        self.server = server  # which ends when nothing refers to it
        self.returncode: int | None = None
        out, theirs_out = os.pipe()
        err, theirs_err = os.pipe()
        self._status, theirs_status = socket.socketpair()
        self.stdout, self.stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
        request = {"folder": str(folder), "rank": rank, "directory": os.getcwd()}
        try:
            server.ask(request, [theirs_out, theirs_err, theirs_status.fileno()])
        finally:
            os.close(theirs_out)
            os.close(theirs_err)
            theirs_status.close()
        started = self._status.recv(_NUMBER.size)
        if not started:
            raise server.gone()
        self.pid = _NUMBER.unpack(started)[0]

    def poll(self) -> int | None:
        """Return the exit status if the process has ended, −n after signal n."""
        return self._ended(socket.MSG_DONTWAIT)

    def wait(self) -> int:
        """Return the exit status when the process has ended."""
        code = self._ended(0)
        assert code is not None
        return code

    def _ended(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                content = self._status.recv(_NUMBER.size, flags)
            except BlockingIOError:
                return None
            self.returncode = (
                _NUMBER.unpack(content)[0] if content else -signal.SIGKILL
            )  # as after the server
            self._status.close()
        return self.returncode


class ForkServer:
    """The parent's side of a server with this environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.owner = _lasting(environment), os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                env=environment,
                stdin=theirs.fileno(),
                start_new_session=True,
            )
        weakref.finalize(self, _end, self.owner, self._control, self.process)

    def serves(self, environment: dict[str, str]) -> bool:
        """Return whether this server runs, belongs to this process and has this environment."""
        own = self.owner == os.getpid() and self.environment == _lasting(environment)
        return own and self.process.poll() is None

    def ask(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Send a request and these descriptors. Raises: CommError if the server has ended."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        try:
            self._control.sendmsg([json.dumps(request).encode()], rights)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self.gone() from error

    def gone(self) -> CommError:
        """Return the error about a server that has ended."""
        code = self.process.wait()
        return CommError(
            "the process that starts the ranks", f"it ended with status {code}", "see its error on stderr"
        )


_lock = threading.Lock()
_server: ForkServer | None = None


def start(folder: Path, rank: int, environment: dict[str, str]) -> ForkedProcess:
    """Return rank `rank` of the launch in `folder`, a process with this environment that has just been forked.

    Raises: CommError if the server ends meanwhile.
    """
    global _server
    with _lock:
        if _server is None or not _server.serves(environment):
            _server = ForkServer(environment)
        server = _server
    return ForkedProcess(server, folder, rank)


def _lasting(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != _CHANGING}


def _end(owner: int, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() != owner:  # a fork of the parent
        return
    control.close()
    process.kill()
    process.wait()


def main() -> NoReturn:
    """Serve until the parent has gone; in each fork, run its rank and exit with its status."""
    from ringlab.comm.processes import rank_process

    _import_all()
    folder, rank = _serve()
    code = 1
    try:
        code = rank_process.main(folder, rank, os.getppid())
    finally:
        _exit(code)


def _exit(code: int) -> NoReturn:
    """End a fork, but do not take its modules apart, which would take longer than the fork."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _import_all() -> None:
    """Import the modules that every rank needs, without starting a thread, which would not survive a fork."""
    import cloudpickle  # noqa: F401
    import numpy.random  # noqa: F401
    import torch
    import torch.fx.experimental.symbolic_shapes  # half a second, which the first backward would take

    from ringlab.comm.memory import MemoryMeter
    from ringlab.comm.processes import connect  # noqa: F401

    with MemoryMeter(0).watch():  # the first time, torch imports some 900 modules
        torch.empty(0)
    gc.freeze()  # a collection in a fork would touch, and so copy, the pages of all these objects


def _serve() -> tuple[Path, int]:
    """Fork a process for each request; return in these processes only, with the folder and the rank of the request."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    ended, wakes = socket.socketpair()
    wakes.setblocking(False)
    ended.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if ended in ready:
                ended.recv(1 << 12)
                _reap(running)
            if control not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _LONGEST, 3)
            if not message:
                os._exit(0)  # the system kills the ranks that still run
            out, err, number = descriptors
            status = socket.socket(fileno=number)
            status.set_inheritable(False)
            pid = os.fork()
            if pid:
                running[pid] = status
                os.close(out)
                os.close(err)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for left in (control, ended, wakes, *running.values()):
                left.close()
            return _as_a_rank(json.loads(message), out, err, status)


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as connection:
            connection.send(_NUMBER.pack(os.waitstatus_to_exitcode(status)), socket.MSG_NOSIGNAL)


def _as_a_rank(request: dict[str, Any], out: int, err: int, status: socket.socket) -> tuple[Path, int]:
    """Give this process the surroundings of a rank, then report its number; return the folder and the rank."""
    import numpy.random

    os.setsid()  # so that a kill reaches every process that it starts
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(request["directory"])
    os.environ["LOCAL_RANK"] = str(request["rank"])
    numpy.random.seed()  # otherwise all forks would draw the same numbers
    with status:
        status.send(_NUMBER.pack(os.getpid()))
    return Path(request["folder"]), request["rank"]


if __name__ == "__main__":
    main()
