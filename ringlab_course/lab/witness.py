"""The witness of a rank under torchrun: it reports which rank failed first and how, and all ranks' stacks.

A rank that is killed or stuck cannot report anything itself. So each rank has a thread that watches the
processes of all ranks on its machine from before they connect, and sends the stack of its own rank when
another rank requests all stacks. If its own rank is stuck in a call that no signal interrupts, the thread
itself writes the report and ends the process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringlab.comm.processes.connect import torchrun_store
from ringlab.comm.processes.distributed import DistributedComm
from ringlab.comm.processes.failure_board import Board, Failure
from ringlab.comm.ring import Ring
from ringlab.errors import CommError, RinglabError

SIGNALLED = "a signal to end, while no rank had failed: the job was cancelled, or its time was over"
_TICK = 0.2  # seconds between two looks for a request for stacks
_SETTLE = 3.0  # seconds until all ranks know of a failure
_ANSWERS = 3.0  # seconds for the stacks of all ranks
_PATIENCE = 5.0  # seconds for a rank to end by itself after a signal
LONGEST = 12_000  # characters of a stack

Report = Callable[[Path, str, dict[str, str]], None]
"""Writes the cause that ended a run, and the stacks by rank, into a result file."""


class Ended(BaseException):
    """A signal to end arrived.

    It may arrive anywhere, so this is not an Exception that the program might catch.
    """


class Witness:
    """Reports the end of a run from inside each rank.

    `file` is the result file, on rank 0; `report` writes to it.
    """

    def __init__(self, file: Path | None, timeout: float, report: Report) -> None:
        self.file, self.report, self.reported = file, report, False
        self.board = Board(None)
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._deadline = time.monotonic() + timeout
        self._store: dist.Store | None = None
        self._comm: DistributedComm | None = None
        self._hosts: dict[int, str] = {}  # the host of each rank that has said who it is
        self._meeting = threading.Lock()
        self._processes: dict[int, tuple[int, int]] = {}  # rank and pid of each watched process, by its pidfd
        self._stack, self._answered, self._ending, self._over = "", False, False, False
        self._signalled = 0.0
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)

    def end(self, *_: Any) -> None:
        """Raise Ended when torchrun or SLURM signals this rank to end, unless the rank is already ending."""
        if not self._ending:
            self._ending = True
            raise Ended

    def why(self) -> str:
        """Return the first failure or, if there is none, the ranks that had not begun, or else SIGNALLED."""
        return self._in_words(self.first())

    def first(self) -> Failure | None:
        """Return the run's first failure, or None; it may reach the board shortly after the signal."""
        deadline = time.monotonic() + _SETTLE
        while (found := self.board.first_failure()) is None and time.monotonic() < deadline:
            if self.board.store is None:
                break
            time.sleep(_TICK / 4)
        return found

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Make a signal to end raise Ended in the program, and wake the thread even if the program hangs."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self.end)
        woken = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def watching(self, startup: float) -> Iterator[None]:
        """Watch the ranks while the block connects them and runs their program.

        startup: the seconds in which torchrun's store must answer. If the block raises, report the first
        failure and all stacks. Raises: TransportTimeout if the store does not answer.
        """
        with self._signals():
            torchrun_store(startup)
            self._store = _own_store()
            # The thread has its own connection. On the program's connection it would have to wait whenever
            # the program waits.
            self.board = Board(self._store)
            self._say("who", json.dumps([socket.gethostname(), os.getpid()]))
            if self.file is not None:
                self._say("file", str(self.file.resolve()))
            thread = threading.Thread(target=self._run, name="witness", daemon=True)
            thread.start()
            try:
                with self._reporting():
                    yield
            finally:
                self._over = True
                thread.join(_PATIENCE)

    @contextmanager
    def connected(self, ring: Ring) -> Iterator[None]:
        """Watch the exchanges of `ring` too; report the block's error before the ring is closed."""
        assert isinstance(ring.comm, DistributedComm)
        self._comm = ring.comm
        ring.comm.board = self.board
        with self._reporting():
            yield

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._ending = True
            if not self._stack:
                if not isinstance(error, Ended):
                    self.board.fail(self.rank, error)
                elif self.first() is None:
                    self.board.record(self.rank, SIGNALLED)
                self._stack = "".join(traceback.format_exception(error))
                self._tell(error)
            raise

    def _tell(self, error: BaseException | None) -> None:
        """Write the first failure and all stacks into the results, if this rank is the one that writes."""
        first, stacks = self.first(), self._stacks()
        file = self._file(first)
        refused = isinstance(error, RinglabError) and not isinstance(error, CommError)
        if file is None or self.reported or (refused and not file.stat().st_size):
            return  # a lab that was refused before it began has no result
        self.reported = True
        own = not isinstance(error, Ended | None) and (first is None or first.rank == self.rank)
        cause = (
            f"rank {self.rank} failed first: {type(error).__name__}: {error}"
            if own
            else self._in_words(first)
        )
        self.report(file, cause, stacks)

    def _file(self, first: Failure | None) -> Path | None:
        """Return the result file on the rank that writes, and None on all others.

        The rank that writes is rank 0 or, if rank 0 failed first, the next rank on the same machine.
        """
        if self.rank == 0:
            return self.file
        mates = [rank for rank, host in self._hosts.items() if rank and host == self._hosts.get(0)]
        next_one = first is not None and first.rank == 0 and self.rank == min(mates, default=0)
        return Path(self._read("file", 0)) if next_one and self._knows("file", 0) else None

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, because the process that hosts it is gone
            while not self._over:
                self._meet()
                ready, _, _ = select.select([self._awake, *self._processes], [], [], _TICK)
                for each in ready:
                    if each == self._awake:
                        if signal.SIGTERM in os.read(self._awake, 64) and not self._signalled:
                            self._signalled = time.monotonic()
                    else:
                        self._gone(each)
                if self._asked():
                    self._answer()
                self._keep_time()

    def _meet(self) -> None:
        """Read which ranks have announced themselves since the last call, and watch those on this machine.

        A rank is watched by a file descriptor of its process, which tells when the process ends.
        """
        with self._meeting:
            for rank in self._unknown():
                if not self._knows("who", rank):
                    continue
                host, pid = json.loads(self._read("who", rank))
                self._hosts[rank] = host
                if rank != self.rank and host == socket.gethostname() and hasattr(os, "pidfd_open"):
                    try:
                        self._processes[os.pidfd_open(pid)] = rank, pid
                    except OSError:
                        self._lost(rank, f"its process {pid} on {host} is gone, and it left no reason")

    def _unknown(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._hosts]

    def _gone(self, descriptor: int) -> None:
        rank, pid = self._processes.pop(descriptor)
        how = _how_it_ended(pid)
        os.close(descriptor)
        self._lost(rank, f"its process {pid} on {socket.gethostname()} {how}, and it left no reason")

    def _lost(self, rank: int, reason: str) -> None:
        if not self.board.ended([rank]):
            self.board.record(rank, reason)
            self._say("stack", f"no stack: {reason}", rank)
            self._say("asked", "1", 0)

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self.rank == 0 and now > self._deadline and not self._signalled:
            self.board.record(self.rank, "the lab took longer than --timeout")
            os.kill(os.getpid(), signal.SIGTERM)
        if self._signalled and now > self._signalled + _PATIENCE and not self._stack:
            self.board.end(self.rank)
            self._tell(None)  # the program is in a call that no signal interrupts
            os._exit(128 + signal.SIGTERM)

    def _stacks(self) -> dict[str, str]:
        """Return the stack of every rank, by its number."""
        self._say("asked", "1", 0)
        self._answer()
        self._meet()
        deadline = time.monotonic() + _ANSWERS
        while not all(self._knows("stack", rank) for rank in self._hosts):
            if time.monotonic() > deadline or self._store is None:
                break
            time.sleep(_TICK / 4)
        silent = dict.fromkeys(self._hosts, "no answer") | dict.fromkeys(self._unknown(), "not begun")
        return {
            str(rank): self._read("stack", rank) if self._knows("stack", rank) else silent[rank]
            for rank in range(self.world_size)
        }

    def _in_words(self, first: Failure | None) -> str:
        """Return the first failure in words. A rank that only received a signal has not failed."""
        if first is not None and SIGNALLED not in str(first):
            return str(first)
        absent = self._unknown() if self._store is not None else []
        if not absent:
            return SIGNALLED
        which = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        return f"a signal to end, before {which} had begun: see torchrun's output for how they ended"

    def _answer(self) -> None:
        if not self._answered:
            self._answered = True
            where = self._stack or _stack_of(threading.main_thread().ident or 0)
            doing = self._comm.doing if self._comm is not None else ""
            self._say("stack", f"{doing}\n{where[-LONGEST:]}")

    def _asked(self) -> bool:
        return not self._answered and self._knows("asked", 0)

    def _say(self, what: str, text: str, rank: int | None = None) -> None:
        with suppress(RuntimeError):
            if self._store is not None:
                self._store.set(_key(what, self.rank if rank is None else rank), text)

    def _knows(self, what: str, rank: int) -> bool:
        try:
            return self._store is not None and bool(self._store.check([_key(what, rank)]))
        except RuntimeError:
            return False

    def _read(self, what: str, rank: int) -> str:
        """Return a text from the store when it is there.

        Raises: RuntimeError if it does not come, or if there is no store.
        """
        if self._store is None:
            raise RuntimeError("no store")
        return self._store.get(_key(what, rank)).decode(errors="replace")


def _key(what: str, rank: int) -> str:
    return f"witness/{what}/{rank}"


def _stack_of(thread: int) -> str:
    """Return the stack of a thread, and the exception that it is handling.

    The exception contains the frames that the thread has already left.
    """
    found: Any = sys._current_exceptions().get(thread)
    error = found[1] if isinstance(found, tuple) else found  # before Python 3.12, a tuple
    stack = traceback.format_stack(sys._current_frames().get(thread))
    return "".join([*stack, *(traceback.format_exception(error) if error is not None else ())])


def _own_store() -> dist.Store | None:
    """Return a new connection to torchrun's store, or None if there is no store."""
    try:
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=60))
    except (KeyError, ValueError, RuntimeError):
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may start all ranks again
    return dist.PrefixStore(f"ringlab/lab/{attempt}", store)


def _how_it_ended(pid: int) -> str:
    """Return how a process ended. Linux keeps this until the process's parent asks for it."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().rsplit(" ", 1)[-1])
    except (OSError, ValueError):
        return "is gone"
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with status {os.WEXITSTATUS(status)}"
