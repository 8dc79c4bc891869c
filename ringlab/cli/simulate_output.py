"""The output of `ringlab simulate`: the timeline in characters, the figures, and the files.

Files are checked before the simulation and written after it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlab.cli.output import check_writable
from ringlab.errors import CostError, require_package

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ringlab.comm.clocked.timeline import Timeline
    from ringlab.cost.simulate import Simulation


COMPUTES, SOME, WAITS, ENDED = "█", "▒", "·", " "


def show(console: Console, done: Simulation, report: dict[str, Any]) -> None:
    """Print a row of characters per rank, and the figures."""
    from ringlab.cost.simulate import shown_ranks
    from ringlab.cost.units import short

    P, asked = done.P, report["simulated"]
    shown = shown_ranks(P)

    def say(text: str = "") -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(
        f"{asked['layout']} on {P} × {asked['hardware']}, {asked['schedule']}, {asked['passes']}: "
        f"B={asked['B']} H={asked['H']} K={asked['K']} D={asked['D']} {asked['dtype']}, "
        f"{'causal' if asked['causal'] else 'no mask'}"
        + (f", window {asked['window']:,}" if asked["window"] else "")
        + (f", {len(asked['documents'])} documents" if asked["documents"] else "")
    )
    say()
    wide = max(20, min(100, console.width - 12))
    if len(shown) < P:
        say(f"{len(shown)} of {P} ranks, evenly spread")
    for rank in shown:
        say(f"rank {rank:>5} {strip(done.timeline, rank, wide)}")
    say(
        f"{'':10} 0{short(done.makespan_s, 'seconds'):>{wide - 1}}   {COMPUTES} computes  {SOME} computes less than half of it  {WAITS} waits"
    )
    say()
    rows = [
        ("makespan", short(done.makespan_s, "seconds")),
        ("exposed communication", short(done.exposed_s, "seconds")),
        ("ranks compute", f"{done.busy_fraction:.1%} of the time"),
        (
            "least and most busy rank",
            f"{short(min(done.busy_s), 'seconds')}, {short(max(done.busy_s), 'seconds')}",
        ),
        ("longest waiting rank", short(max(done.waited_s), "seconds")),
        ("peak memory of a rank", short(int(done.peak_bytes.max()), "bytes")),
        ("bytes sent, all ranks", short(report["bytes_sent"], "bytes")),
        ("simulated in", f"{done.wall_s:.2f} s"),
    ]
    for name, value in rows:
        say(f"{name:>26}  {value}")
    say()
    for assumption in report["assumptions"]:
        say(f"  assumed: {assumption}")
    for kind, file in report["written"].items():
        say(f"  {kind}: {file}")


def strip(timeline: Timeline, rank: int, wide: int) -> str:
    """Return `wide` characters: the main activity of `rank` in each part of the makespan; SOME if it computes less."""
    import numpy as np

    from ringlab.comm.clocked.log import COMPUTE, WAIT

    starts, kinds, ends = timeline.strip(rank)
    edges = np.linspace(0.0, timeline.makespan_s, wide + 1)

    def seconds(kind: int) -> np.ndarray:
        """Seconds of this kind between successive edges."""
        chosen = kinds == kind
        begin, end = starts[chosen], ends[chosen]
        done = np.concatenate([[0.0], np.cumsum(end - begin)])
        full = np.searchsorted(end, edges, side="right")
        partial = np.zeros(len(edges))
        inside = full < len(begin)
        partial[inside] = np.maximum(0.0, edges[inside] - begin[full[inside]])
        return np.diff(done[full] + partial)

    busy, waiting = seconds(COMPUTE), seconds(WAIT)
    cell = timeline.makespan_s / wide
    idle = cell - busy - waiting
    choice = np.argmax([busy, waiting, idle], axis=0)
    # Many short computations in a cell are not idleness, though together they may fill less than half of it.
    choice[(choice > 0) & (busy > 0.05 * cell)] = 3
    return "".join((COMPUTES, WAITS, ENDED, SOME)[i] for i in choice)


@dataclass(frozen=True)
class Files:
    """Paths of pictures, events and the result; None for files that are not wanted."""

    png: Path | None = None
    svg: Path | None = None
    perfetto: Path | None = None
    output: Path | None = None

    def check(self) -> None:
        """Check the files first, so that no long simulation is lost.

        Raises: CostError for a file that cannot be written; MissingExtraError without matplotlib.
        """
        if self.png or self.svg:
            require_package("matplotlib", "figures", "--png and --svg")
        for name, path in vars(self).items():
            if path is not None:
                check_writable(f"--{name}", path, make_folder=name == "output")

    def write(self, done: Simulation) -> dict[str, Any]:
        """Write pictures and events; return the files, and the ranks that they show.

        Raises: CostError if one fails.
        """
        files = {"png": self.png, "svg": self.svg, "perfetto": self.perfetto}
        written: dict[str, Any] = {kind: str(path) for kind, path in files.items() if path}
        if not written:
            return {}
        from ringlab.cost.simulate import shown_ranks

        shown = shown_ranks(done.P)
        trace = done.timeline.trace(shown)
        try:
            if self.png or self.svg:
                from ringlab.viz import gantt

                figure = gantt.figure(trace, ranks=shown)
                for kind, path in (("png", self.png), ("svg", self.svg)):
                    if path:
                        figure.savefig(path, format=kind, bbox_inches="tight")
            if self.perfetto:
                trace.to_chrome(self.perfetto)
        except OSError as error:
            raise CostError(f"files that can be written: {', '.join(written.values())}", f"{error}") from None
        return {**written, "ranks": shown}

    def publish(self, report: dict[str, Any]) -> None:
        """Write the result with its cost and the machine. Raises: CostError if the file cannot be written."""
        if self.output is None:
            return
        import json
        import os
        import resource

        from ringlab.bench.device import machine

        usage = resource.getrusage(resource.RUSAGE_SELF)
        measured = {
            "process_cpu_s": time.process_time(),
            "load_average": os.getloadavg()[0],  # other processes lengthen wall_s, and cpu_s too
            "peak_rss_bytes": usage.ru_maxrss * 1024,
            "machine": machine(),
        }
        text = json.dumps({**report, "measured": measured}, indent=2, ensure_ascii=False) + "\n"
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CostError(f"a file that can be written at {self.output}", f"{error.strerror}") from None
