"""The timeline of a simulation in characters, and its figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console

    from ringlab.comm.clocked.timeline import Timeline
    from ringlab.cost.simulate import Simulation

COMPUTES, SOME, WAITS, ENDED = "█", "▒", "·", " "


def show(console: Console, done: Simulation, told: dict[str, Any]) -> None:
    """Print a row of characters per rank, and the figures."""
    from ringlab.cli.simulate_files import shown_ranks
    from ringlab.cost.units import short

    P, asked = done.recording.P, told["simulated"]
    shown = shown_ranks(P)

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

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
        ("bytes sent, all ranks", short(told["bytes_sent"], "bytes")),
        ("simulated in", f"{done.wall_s:.2f} s"),
    ]
    for name, value in rows:
        say(f"{name:>26}  {value}")
    say()
    for assumption in told["assumptions"]:
        say(f"  assumed: {assumption}")
    for kind, file in told["written"].items():
        say(f"  {kind}: {file}")


def strip(timeline: Timeline, rank: int, wide: int) -> str:
    """Return `wide` characters: what `rank` does for most of each part of the makespan; SOME where it computes less."""
    starts, kinds, ends = timeline.strip(rank)
    edges = np.linspace(0.0, timeline.makespan_s, wide + 1)

    def seconds(kind: int) -> np.ndarray:
        """Seconds spent so on by each edge."""
        chosen = kinds == kind
        begin, end = starts[chosen], ends[chosen]
        done = np.concatenate([[0.0], np.cumsum(end - begin)])
        full = np.searchsorted(end, edges, side="right")
        partial = np.zeros(len(edges))
        inside = full < len(begin)
        partial[inside] = np.maximum(0.0, edges[inside] - begin[full[inside]])
        return np.diff(done[full] + partial)

    from ringlab.comm.clocked.log import COMPUTE, WAIT

    busy, waiting = seconds(COMPUTE), seconds(WAIT)
    cell = timeline.makespan_s / wide
    idle = cell - busy - waiting
    choice = np.argmax([busy, waiting, idle], axis=0)
    # Many short computations in a cell are no idleness, though none of them fills half of it.
    choice[(choice > 0) & (busy > 0.05 * cell)] = 3
    return "".join((COMPUTES, WAITS, ENDED, SOME)[i] for i in choice)
