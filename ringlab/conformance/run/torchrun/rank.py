"""One rank's process under torchrun: `python -m ringlab.conformance.run.torchrun.rank FOLDER PARENT`.

Its parent is one of the processes that torchrun started (see `ringlab.conformance.run.torchrun`). It joins
the process group of its generation, makes its part of each run that it finds in the folder, and writes the
result there. It ends after the first error, because a group in which a call has failed cannot be used again.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

_POLL = 0.005


@dataclass(frozen=True)
class Seat:
    """A rank's place in one generation of processes: the number of ranks, and the address where they meet.

    first: the number of the generation's first run. startup: seconds for all ranks to import the target and
    connect.
    """

    rank: int
    world_size: int
    transport: str
    device: str
    prefix: str
    first: int
    startup: float


def main(folder: Path, parent: int) -> int:
    """Make this rank's part of runs as they arrive; return the exit status."""
    from ringlab.comm.processes.rank_process import die_with

    die_with(parent)
    sys.path[:] = json.loads((folder / "path.json").read_text())
    import cloudpickle
    import torch

    from ringlab.comm.processes.connect import closing
    from ringlab.comm.ring import Ring
    from ringlab.conformance.run.folder import begins, leave, rank_path
    from ringlab.conformance.run.processes import on_this_rank
    from ringlab.conformance.run.stacks import tell_stacks

    torch.set_num_threads(1)
    job = cloudpickle.loads((folder / "job.pickle").read_bytes())
    seat: Seat = job["seat"]
    tell_stacks(folder, seat.rank)
    try:
        target, comm = job["spec"].target(), _joined(seat)
    except BaseException as error:
        _leave_trouble(folder, seat.first, seat.rank, error)
        return 1
    number = seat.first
    with closing(comm):
        while os.getppid() == parent:
            asked = folder / f"{number}.run"
            if asked.exists():
                begins(folder, number)
                try:
                    made = on_this_rank(target, pickle.loads(asked.read_bytes()), Ring(comm), seat.device)
                except BaseException as error:
                    # before anything else, because torchrun's process ends this one as soon as it has read
                    # the trouble
                    comm.fail(error)
                    _leave_trouble(folder, number, seat.rank, error)
                    raise
                leave(rank_path(folder, number, seat.rank), made)
                number += 1
            time.sleep(_POLL)
    return 0


def _joined(seat: Seat) -> Any:
    """Return this rank's end of the transport."""
    import torch.distributed as dist

    from ringlab.comm.processes.connect import join

    limit = timedelta(seconds=seat.startup)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit
    )
    # Messages have no shorter time limit than a run, because the parent measures the time.
    local_rank = int(os.environ.get("LOCAL_RANK", seat.rank))
    return join(
        seat.transport, seat.startup, seat.startup, dist.PrefixStore(seat.prefix, store),
        seat.rank, seat.world_size, local_rank,
    )  # fmt: skip


def _leave_trouble(folder: Path, number: int, rank: int, error: BaseException) -> None:
    from ringlab.conformance.run.folder import leave, rank_path
    from ringlab.conformance.run.run import RankResult
    from ringlab.conformance.run.troubles import described

    leave(rank_path(folder, number, rank), RankResult(trouble=described(error)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
