"""The process in which a target is imported and run: `python -m ringlab.conformance.child_process FOLDER PARENT`.

The parent reads what is left in the folder, and kills this process when a time limit is hit.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

_POLL = 0.01


def main(folder: Path, parent: int) -> int:
    """Import the target, state its claims, make runs as they arrive; return the exit status."""
    from ringlab.comm.processes.rank_process import die_with

    die_with(parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes started from here end too
    sys.path[:] = json.loads((folder / "path.json").read_text())
    import cloudpickle

    from ringlab.conformance import perform
    from ringlab.conformance.target.claims import as_target

    perform.one_thread()
    perform.tell_stacks(folder)
    job = cloudpickle.loads((folder / "job.pickle").read_bytes())
    try:
        target = job["spec"].target()
        perform.leave(folder / "claims", target.claims())
    except BaseException as error:
        perform.leave(folder / "claims", perform.described(error))
        return 1
    number = 0
    while True:  # until the parent ends this process
        batch = folder / f"{number}.batch"
        if batch.exists():
            axes, numbered = pickle.loads(batch.read_bytes())
            claims = {"axes": axes} if axes else {}
            _make(folder, job["spec"].claiming(**claims), as_target(target, **claims), numbered)
            number += 1
        time.sleep(_POLL)


def _make(folder: Path, spec: Any, target: Any, numbered: list[tuple[int, Any]]) -> None:
    from ringlab.conformance import perform

    transport = perform.transport_of(target.over, spec.transport)
    if transport == perform.VIRTUAL:
        for index, run in _wanted(folder, numbered):
            perform.begins(folder, index)
            ran = perform.on_virtual_ranks(target, run, spec.device, folder)
            perform.leave(perform.ran_path(folder, index), ran)
        return
    # Runs with these faults end their processes, so each has a launch of its own.
    for _, group in groupby(numbered, lambda each: (each[1].P, each[0] if each[1].ends else -1)):
        left = list(_wanted(folder, group))
        while left:
            left = list(_wanted(folder, _launched(folder, spec, transport, left)))


def _launched(
    folder: Path, spec: Any, transport: str, numbered: list[tuple[int, Any]]
) -> list[tuple[int, Any]]:
    """Make runs in one launch; return those after a failed one."""
    from ringlab.conformance import perform
    from ringlab.conformance.runs import Ran

    perform.leave(folder / "now", -1)
    failure = None
    try:
        perform.on_processes(spec, transport, numbered, folder)
    except Exception as error:
        failure = error
    for place, (index, run) in enumerate(numbered):
        ran = perform.joined(folder, index, run)
        if ran is not None:
            perform.leave(perform.ran_path(folder, index), ran)
            continue
        parts = perform.ranks_left(folder, index, run.P)
        reported = perform.first_trouble(failure, parts)
        crash = None if run.ends else perform.crash_in(failure)  # a rank that its fault ended is expected
        trouble = crash or reported or perform.described(failure or RuntimeError("a rank left no result"))
        returned = perform.returned_in(run, parts)
        ran = Ran(run, trouble=trouble, returned=returned, stopped=perform.stopped_in(failure, parts))
        ran.failed = getattr(failure, "rank", -1)
        perform.leave(perform.ran_path(folder, index), ran)
        return numbered[place + 1 :]
    return []


def _wanted(folder: Path, numbered: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """The runs that were not skipped meanwhile; the others are only marked as done."""
    from ringlab.conformance import perform

    for index, run in numbered:
        if (folder / f"{index}.skip").exists():
            perform.leave(perform.ran_path(folder, index), None)
        else:
            yield index, run


if __name__ == "__main__":
    try:
        status = main(Path(sys.argv[1]), int(sys.argv[2]))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without taking torch down, which takes the parent's time
