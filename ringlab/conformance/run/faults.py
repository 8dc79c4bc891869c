"""The faults that a run may cause on purpose: rank 1 dies, or is late."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringlab.comm.wrappers.faulty import Fault
from ringlab.conformance.run.run import Run

STALL = 0.3
"""The seconds by which a stalling rank delays its message."""


def faults_of(run: Run) -> tuple[Fault, ...]:
    """Return the faults of this run's messages over ringlab's Comm."""
    exchange = {"dies at once": 0, "dies": min(1, run.P - 2), "dies in backward": run.P}.get(run.fault)
    if exchange is not None:
        return (Fault("kill", rank=1, exchange=exchange),)
    if run.fault == "stalls":
        return (Fault("delay", rank=1, exchange=0, seconds=STALL), Fault("delay", 1, 1, seconds=STALL))
    return ()


class SendFault:
    """A hook before each send over torch.distributed: the rank dies at one send, or stalls at each send.

    Send number 2 P is in backward, whether K and V are sent in one message or in two.
    """

    def __init__(self, kind: str, world_size: int, die: Callable[[], None]) -> None:
        self.kind, self.die, self.count = kind, die, 0
        dies_at = {"dies at once": 1, "dies": min(2, world_size - 1), "dies in backward": 2 * world_size}
        self.last = dies_at.get(kind, 0)

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.last:
            self.die()
        if self.kind == "stalls":
            time.sleep(STALL)
