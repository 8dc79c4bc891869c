"""A profiler's trace of one rank as two lanes, computations and copies, and their overlap."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ringlab.comm.trace import Trace
from ringlab.errors import CommError

Lane = Literal["compute", "copy"]
Interval = tuple[float, float]
MARK = "ringlab: all ranks are here"
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of events on a GPU. In a trace that has them, events on the CPU are only launches and waits."""
COPIES = ("nccl", "memcpy ptop", "gloo:")


@dataclass(frozen=True)
class Span:
    """One stretch of a rank's lane, in seconds since all ranks were ready."""

    rank: int
    lane: Lane
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Overlap:
    """The seconds in which one rank computes, in which it copies, and in which it copies without computing."""

    compute_s: float
    copy_s: float
    exposed_s: float

    @property
    def fraction(self) -> float:
        """Return the share of the copying during which the rank computes; 1 if nothing is copied."""
        return 1 - self.exposed_s / self.copy_s if self.copy_s else 1.0


def read(document: Mapping[str, Any], rank: int) -> list[Span]:
    """Return the spans of one rank's Chrome trace from `export_chrome_trace`, sorted by lane and time.

    Seconds count from the mark that `profiled` leaves, or from the first span if there is no mark. A span
    inside another span of the same lane is left out.
    Raises: CommError unless the document is such a trace.
    """
    events = document.get("traceEvents") if isinstance(document, Mapping) else None
    if not isinstance(events, list):
        raise CommError("a Chrome trace, with traceEvents", type(document).__name__)
    timed = [e for e in events if isinstance(e, Mapping) and e.get("ph") == "X" and "dur" in e]
    gpu = any(event.get("cat") in ON_GPU for event in timed)
    begin = next((float(e["ts"]) for e in timed if e["name"] == MARK), None)
    belongs = [(lane_of(str(e.get("cat")), str(e["name"]), gpu), e) for e in timed]
    kept = [(to, e) for to, e in belongs if to is not None and (begin is None or float(e["ts"]) >= begin)]
    origin = min((float(e["ts"]) for _, e in kept), default=0.0) if begin is None else begin
    spans = []
    for to, event in kept:
        # Subtract the origin first: microseconds since 1970 are so large that a sum would lose digits.
        start = float(event["ts"]) - origin
        end = start + float(event["dur"])
        spans.append(Span(rank, to, str(event["name"]), start / 1e6, end / 1e6))
    return [span for lane in ("compute", "copy") for span in outermost(spans, lane)]


def of_trace(trace: Trace) -> list[Span]:
    """Return the spans of a run traced by ringlab: computations, and messages from posting to completion."""
    spans = [Span(e.rank, "compute", e.label, e.start, e.end) for e in trace.computes()]
    return spans + [Span(e.rank, "copy", e.tag, e.posted, e.done) for e in trace.exchanges()]


def lane_of(category: str, name: str, gpu: bool) -> Lane | None:
    """Return the lane of an event of torch.profiler, or None if it belongs to no lane.

    gpu: whether the trace has GPU events. On a GPU the lanes contain kernels and copies. On a CPU they
    contain operators and gloo's messages, each from its posting to the return of its `wait`. Frames that
    contain other frames (autograd functions, c10d) belong to no lane.
    """
    copies = name.lower().startswith(COPIES) or "nccl" in name.lower()
    if gpu:
        return None if category not in ON_GPU else "copy" if copies else "compute"
    if copies:
        return "copy"
    return "compute" if category == "cpu_op" and name.startswith("aten::") else None


def outermost(spans: Iterable[Span], lane: Lane) -> list[Span]:
    """Return the spans of a lane that are not inside another span of that lane, sorted by time."""
    found: list[Span] = []
    for span in sorted((s for s in spans if s.lane == lane), key=lambda s: (s.start, -s.end)):
        if not found or span.end > found[-1].end:
            found.append(span)
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, as intervals that do not touch, in order.

    >>> union([(2, 3), (0, 1), (0.5, 2)])
    [(0, 3)]
    """
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Return the parts of `intervals` that `others` do not cover, in ascending order."""
    found = []
    taken = union(others)
    for start, end in union(intervals):
        for begin, until in taken:
            if until <= start or begin >= end:
                continue
            if begin > start:
                found.append((start, begin))
            start = until
            if start >= end:
                break
        if start < end:
            found.append((start, end))
    return found


def lane(spans: Iterable[Span], rank: int, name: Lane) -> list[Interval]:
    """Return the intervals that one lane of a rank covers, in order."""
    return union((span.start, span.end) for span in spans if span.rank == rank and span.lane == name)


def exposed(spans: Sequence[Span], rank: int) -> list[Interval]:
    """Return the intervals in which a rank copies and does not compute, in order."""
    return without(lane(spans, rank, "copy"), lane(spans, rank, "compute"))


def overlap(spans: Sequence[Span], rank: int) -> Overlap:
    """Return the overlap of a rank's copying with its computing."""
    parts = lane(spans, rank, "compute"), lane(spans, rank, "copy"), exposed(spans, rank)
    return Overlap(*(sum(end - start for start, end in part) for part in parts))


def duration(spans: Iterable[Span]) -> float:
    """Return the seconds until the last span has ended."""
    return max((span.end for span in spans), default=0.0)
