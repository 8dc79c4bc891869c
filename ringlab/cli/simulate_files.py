"""The files that `ringlab simulate` writes: checked before the simulation, written after it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlab.cli.output import check_writable
from ringlab.errors import CostError
from ringlab.extras import require_package

if TYPE_CHECKING:
    from ringlab.cost.simulate import Simulation


@dataclass(frozen=True)
class Files:
    """Where to write pictures, events and the result; None where not asked for."""

    png: Path | None = None
    svg: Path | None = None
    perfetto: Path | None = None
    output: Path | None = None

    def check(self) -> None:
        """Raise CostError or MissingExtraError for a file that cannot be written, so that no long simulation is lost."""
        if self.png or self.svg:
            require_package("matplotlib", "figures", "--png and --svg")
        for name, path in vars(self).items():
            if path is not None:
                check_writable(f"--{name}", path, make_folder=name == "output")

    def write(self, done: Simulation) -> dict[str, Any]:
        """Write pictures and events; return the files, and which ranks they show."""
        files = {"png": self.png, "svg": self.svg, "perfetto": self.perfetto}
        written: dict[str, Any] = {kind: str(path) for kind, path in files.items() if path}
        if not written:
            return {}
        shown = shown_ranks(done.recording.P)
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

    def publish(self, told: dict[str, Any]) -> None:
        """Write the result with what it took on which machine."""
        if self.output is None:
            return
        import json
        import os
        import resource

        from ringlab.bench.machine import machine

        usage = resource.getrusage(resource.RUSAGE_SELF)
        measured = {
            "process_cpu_s": time.process_time(),
            "load_average": os.getloadavg()[0],  # others' work makes wall_s longer, and cpu_s too
            "peak_rss_bytes": usage.ru_maxrss * 1024,
            "machine": machine(),
        }
        text = json.dumps({**told, "measured": measured}, indent=2, ensure_ascii=False) + "\n"
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise CostError(f"a file that can be written at {self.output}", f"{error.strerror}") from None


def shown_ranks(P: int, most: int = 16) -> list[int]:
    """Return the ranks that are drawn: all, or `most` of them evenly spread, the first and the last too."""
    if P <= most:
        return list(range(P))
    return [round(i * (P - 1) / (most - 1)) for i in range(most)]
