"""The output of `ringlab train`: a line of log.jsonl for each step, progress on stderr, and the summary."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from rich.table import Table
from rich.text import Text

from ringlab.cli.output import people, progress_bar, stderr

if TYPE_CHECKING:
    from ringlab.nn import Step

BARS = "▁▂▃▄▅▆▇█"
_LINES = 10  # of progress in a log that is no terminal


class Journal:
    """The `report` of a training: it writes each step to a JSONL file, and shows progress.

    The file is opened at the first step. Of an earlier run it keeps the steps before that one: a run may have been
    killed after its last checkpoint, and its later steps are done again.
    """

    def __init__(self, path: Path, done: int, last: int, steps: int) -> None:
        self.path, self.done, self.last, self.steps = path, done, last, steps
        self.begin = time.perf_counter()
        self.file: TextIO | None = None
        self.bar = progress_bar()

    def __enter__(self) -> Journal:
        return self

    def __call__(self, step: Step) -> None:
        """Record a step that is done."""
        if self.file is None:
            self._open(step.number)
        assert self.file is not None
        line = {**asdict(step), "seconds": round(time.perf_counter() - self.begin, 3)}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        said = f"step {step.number} of {self.steps}, loss {step.loss:.3f}"
        self.bar.update(self.task, completed=step.number, description=said)
        every = max(1, self.last // _LINES)
        if not stderr.is_terminal and (step.number % every == 0 or step.number == self.last):
            stderr.print(said, highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.bar.stop()
            self.file.close()

    def _open(self, first: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        old = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in old if _number(line) < first]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self.file = self.path.open("a", encoding="utf-8")
        self.bar.start()
        self.task = self.bar.add_task("train", total=self.last, completed=self.done)


def _number(line: str) -> float:
    """Return the step of a line; infinity for one that a killed run did not finish."""
    try:
        return float(json.loads(line)["number"])
    except (KeyError, TypeError, ValueError):
        return float("inf")


def sparkline(losses: list[float], width: int = 60) -> str:
    """Return the curve as a row of bars, each the mean of equally many steps.

    >>> sparkline([5.5, 4.0, 3.0, 2.8], width=4)
    '█▄▁▁'
    """
    count = min(width, len(losses))
    edges = [round(part * len(losses) / count) for part in range(count + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((mean - low) * scale)] for mean in means)


def show(report: dict[str, Any]) -> None:
    """Print the summary for people."""
    table = Table.grid(padding=(0, 2))
    ranks, degrees = report["ranks"], report["degrees"]
    where = (
        "one process, without a ring" if report["transport"] == "none" else f"{ranks} rank{'s' * (ranks > 1)}"
    )
    split = "" if degrees is None else ": " + " × ".join(f"{name} {size}" for name, size in degrees.items())
    resumed = f", resumed after step {report['resumed_from']}" if report["resumed_from"] else ""
    rows = {
        "steps": f"{report['steps']} of {report['of']}{resumed}",
        "ranks": where + split,
        "text": report["text"],
        "recipe": ", ".join(f"{name} {value}" for name, value in report["recipe"].items()),
        "loss": f"{report['first_loss']:.3f} → {report['last_loss']:.3f} nats per byte",
        "": sparkline(report["losses"]),
        "time": f"{report['seconds']:.1f} s, {report['bytes_per_second']:,.0f} bytes of text a second",
        "files": ", ".join(report["files"].values()),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    people.print(table, highlight=False)
