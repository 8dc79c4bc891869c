"""Runs in a child process, each with a deadline; its output is captured and bounded.

If a child hangs, dies, or prints endlessly, its current run is lost, and a new child makes the runs after it.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle

from ringlab.comm.processes.children import Clock
from ringlab.comm.processes.launch import environment
from ringlab.conformance.run.folder import any_left, joined, leave, ran_path, ranks_left
from ringlab.conformance.run.loading import VIRTUAL, TargetSpec, transport_of
from ringlab.conformance.run.run import Ran, Run, Trouble, gave
from ringlab.conformance.run.stacks import Standing, standing
from ringlab.conformance.run.troubles import over_the_limit
from ringlab.conformance.target.claims import Claims
from ringlab.temporary import TemporaryFolder

START_SECONDS = 120.0
"""The seconds that a child may take to start Python and torch and to connect its ranks on a busy machine."""
MOST_OUTPUT = 4 << 20
"""The most bytes that a run may print."""
_TAIL = 2000
_POLL = 0.02
_GRACE = 3.0
_LATE = 10.0
"""The seconds by which a run's limit is extended once a rank has ended, so that the others can end or be
stopped."""


class Isolated:
    """A target in child processes; `limit` is the number of seconds for its import, and for each run."""

    def __init__(self, spec: TargetSpec, limit: float) -> None:
        self.spec, self.limit = spec, limit
        self._skipped: set[Run] = set()
        self._child: _Child | None = None

    def __enter__(self) -> Isolated:
        self._living()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._child is not None:
            self._child.close()

    def claims(self) -> Claims | Trouble:
        """Return the target's claims, or the reason why it cannot be imported."""
        return self._living().claims()

    def skip(self, run: Run) -> None:
        """Skip a run that no check needs any more."""
        self._skipped.add(run)
        if self._child is not None:
            self._child.skip(run)

    def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run that was not skipped, in order."""
        return self._made(runs, self._skipped, "")

    def made_as(self, axes: str, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run in order, with these axes of the target."""
        return self._made(runs, set(), axes)

    def _made(self, runs: Sequence[Run], skipped: set[Run], axes: str) -> Iterator[Ran]:
        left = [run for run in runs if run not in skipped]
        while left:
            child = self._living()
            try:
                yield from child.results(left, axes)
            except GeneratorExit:
                # No check needs the remaining runs. A launch of real processes would still make them, so end
                # it.
                if child.on_processes(self.spec.transport):
                    child.kill()
                raise
            left = left[child.over :] if not child.alive else []
            left = [run for run in left if run not in skipped]

    def _living(self) -> _Child:
        if self._child is not None and not self._child.alive:
            self._child.close()
            self._child = None
        self._child = self._child or _Child(self.spec, self.limit)
        return self._child


class ChildProcess:
    """A Python process whose output this process reads, and the shared folder that contains its `job`.

    module: the module that the process runs by `python -m`, with the folder and this process's id as
    arguments.
    """

    def __init__(self, module: str, job: dict[str, Any], surroundings: dict[str, str]) -> None:
        self.alive = True
        self._temporary = TemporaryFolder(prefix="ringlab-check-")
        self.folder = Path(self._temporary.name)
        (self.folder / "job.pickle").write_bytes(cloudpickle.dumps(job))
        (self.folder / "path.json").write_text(json.dumps([entry or os.getcwd() for entry in sys.path]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(self.folder), str(os.getpid())],
            env=surroundings, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.output = _Output(self.process)
        self.clock = Clock()  # pauses of the whole machine do not count towards a run's time limit

    def close(self) -> None:
        """End the child and remove its folder."""
        self.kill()
        self.output.close()
        self._temporary.cleanup()

    def standing(self) -> Standing:
        """Return where the ranks stand, as far as that is known."""
        return Standing()

    def ended(self, deadline: float, limit: float, what: str) -> Trouble | None:
        """End the child if it will return nothing more, and return the reason; None if it still runs."""
        code = self._code()
        trouble = None
        if self.output.count > MOST_OUTPUT:
            trouble = Trouble("printed without end", f"more than {MOST_OUTPUT >> 20} MiB in {what}")
        elif code is not None:
            self.output.pump(0.0)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            trouble = Trouble("crashed", f"the process ended with {how}{self.output.last_words()}")
        elif self.clock.tick() > deadline:
            trouble = over_the_limit(limit, what, self.standing(), self.output.last_words())
        if trouble is not None:
            self.kill()
        return trouble

    def kill(self) -> None:
        """End the child and its processes, first with SIGTERM, then with SIGKILL."""
        self.alive = False
        if self._code() is not None:
            return
        self.process.terminate()
        end = time.monotonic() + _GRACE
        while self._code() is None:
            self.output.pump(_POLL)  # a child that prints could not end if its output were not read
            if time.monotonic() > end:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _code(self) -> int | None:
        """Return the exit status of a child that has ended, and end its processes; else return None."""
        if self.process.returncode is None and _is_over(self.process):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return self.process.returncode


class _Child(ChildProcess):
    """One child process and the results in its folder; `over` counts the finished runs of its last batch."""

    def __init__(self, spec: TargetSpec, limit: float) -> None:
        super().__init__("ringlab.conformance.run.child_process", {"spec": spec}, environment(1))
        self.limit = limit
        self.runs: list[Run] = []
        self.batches = self.over = 0

    def skip(self, run: Run) -> None:
        if run in self.runs:
            (self.folder / f"{self.runs.index(run)}.skip").touch()

    def claims(self) -> Claims | Trouble:
        """Return the child's report on its target; the time limit applies to the import too."""
        deadline = self.clock.tick() + START_SECONDS / 2 + self.limit
        while True:
            self.output.pump(_POLL)
            if (self.folder / "claims").exists():
                found: Claims | Trouble = pickle.loads((self.folder / "claims").read_bytes())
                return found
            trouble = self.ended(deadline, START_SECONDS / 2 + self.limit, "its import")
            if trouble is not None:
                return trouble

    def on_processes(self, transport: str) -> bool:
        """Return whether the target's ranks are processes if `transport` is requested."""
        claims = self.claims()
        return isinstance(claims, Claims) and transport_of(claims.over, transport) != VIRTUAL

    def standing(self) -> Standing:
        """Return where each rank of the current run stands, as far as that is known."""
        now = self._now()
        known = now is not None and 0 <= now < len(self.runs) and self._code() is None
        return standing(self.folder, range(self.runs[now].P)) if known and now is not None else Standing()

    def results(self, runs: Sequence[Run], axes: str = "") -> Iterator[Ran]:
        """Yield the outcomes of these runs in order, without skipped ones, until a run ends the child.

        axes: the axes of the target, or "" for those that it claims.
        """
        start = len(self.runs)
        self.runs += runs
        numbered = list(enumerate(self.runs))[start:]
        leave(self.folder / f"{self.batches}.batch", (axes, numbered))
        self.batches, self.over = self.batches + 1, 0
        for index, run in numbered:
            ran = self._wait_for(index, run)
            self.over += 1
            if ran is not None:
                yield ran
            if not self.alive:
                return

    def _wait_for(self, index: int, run: Run) -> Ran | None:
        """Return the outcome of the run, or None if it was skipped."""
        now, since, limit = self._now(), self.clock.tick(), START_SECONDS
        while True:
            if ran_path(self.folder, index).exists():
                ran: Ran | None = pickle.loads(ran_path(self.folder, index).read_bytes())
                return ran
            if (ran := joined(self.folder, index, run)) is not None:
                return ran  # the launch continues with other runs, to which later errors belong
            self.output.pump(_POLL)
            if self._now() != now:
                now, since = self._now(), self.clock.tick()
                self.output.begin()
            limit = self.limit if now is not None and now >= 0 else START_SECONDS
            late = _LATE if any_left(self.folder, index, run) else 0.0
            trouble = self.ended(since + limit + late, limit, "one run")
            if trouble is not None and not ran_path(self.folder, index).exists():
                parts = ranks_left(self.folder, index, run.P)
                return Ran(run, trouble=trouble, seconds=self.clock.tick() - since, returned=gave(parts))

    def _now(self) -> int | None:
        path = self.folder / "now"
        return int(pickle.loads(path.read_bytes())) if path.exists() else None


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process has ended.

    If the system allows it, the process is not reaped yet, so its number still identifies its process group.
    """
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Output:
    """Reads the output of the child, counts its bytes, and keeps the last of them for a report."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.pipe = process.stdout
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.pipe, selectors.EVENT_READ)
        self.count, self.tail = 0, b""

    def begin(self) -> None:
        """Count from 0 for another run; some of its output may already have been read."""
        self.count = 0

    def pump(self, timeout: float) -> None:
        """Read the available output; wait up to `timeout` seconds for it."""
        if not self.selector.get_map():
            time.sleep(timeout)
            return
        if self.selector.select(timeout):
            content = os.read(self.pipe.fileno(), 1 << 16)
            self.count += len(content)
            self.tail = (self.tail + content)[-_TAIL:]
            if not content:
                self.selector.unregister(self.pipe)

    def last_words(self) -> str:
        """Return the end of the output, for a report."""
        text = self.tail.decode(errors="replace").strip()
        return f"; its last words: …{text[-300:]}" if text else ""

    def close(self) -> None:
        self.selector.close()
        self.pipe.close()
