"""What a run of a program on several ranks gives back, whatever the transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringlab.comm.memory import MemoryReport
from ringlab.comm.trace import Trace


@dataclass(frozen=True)
class Outcome:
    """The programs' return values in rank order, the trace, and each rank's memory."""

    results: list[Any]
    trace: Trace
    memory: list[MemoryReport]
