"""The process that imports and runs a target: `-m ringlab.conformance.run.child_process FOLDER PARENT`.

The parent reads the results in the folder, and kills this process when a time limit is hit.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

_POLL = 0.01


def main(folder: Path, parent: int) -> int:
    """Import the target, write its claims, and make runs as they arrive; return the exit status."""
    from ringlab.comm.processes.rank_process import die_with

    die_with(parent)
    # also end the processes that this process has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.path[:] = json.loads((folder / "path.json").read_text())
    import cloudpickle
    import torch

    from ringlab.conformance.run.folder import leave
    from ringlab.conformance.run.processes import make
    from ringlab.conformance.run.stacks import tell_stacks
    from ringlab.conformance.run.troubles import described
    from ringlab.conformance.target.claims import as_target

    torch.set_num_threads(1)
    tell_stacks(folder)
    job = cloudpickle.loads((folder / "job.pickle").read_bytes())
    try:
        target = job["spec"].target()
        leave(folder / "claims", target.claims())
    except BaseException as error:
        leave(folder / "claims", described(error))
        return 1
    number = 0
    while True:  # until the parent ends this process
        batch = folder / f"{number}.batch"
        if batch.exists():
            axes, numbered = pickle.loads(batch.read_bytes())
            claims = {"axes": axes} if axes else {}
            make(folder, job["spec"].claiming(**claims), as_target(target, **claims), numbered)
            number += 1
        time.sleep(_POLL)


if __name__ == "__main__":
    try:
        status = main(Path(sys.argv[1]), int(sys.argv[2]))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips torch's shutdown, for which the parent would have to wait
