"""`ringlab` with a rank that is killed while a lab starts: python -m tests.course.lab.killed_early RANK STAGE …"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ringlab.cli import main
from ringlab.comm.processes import connect
from ringlab_course.lab.witness import Witness

STAGES = {"unannounced": (Witness, "watching"), "connecting": (connect, "join")}


def die(*_: Any, **__: Any) -> None:
    """Die one second after rank 0 has reserved the result file, when it watches the other ranks."""
    while not Path(sys.argv[-1]).exists():
        time.sleep(0.1)
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    rank, stage = sys.argv[1:3]
    del sys.argv[1:3]
    if os.environ["RANK"] == rank:
        setattr(*STAGES[stage], die)
    main()
