"""Options, worker pool, progress bar and interruption of `ringlab grade`, and lines for `ringlab doctor`."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ringlab.cli.doctor import Diagnosis, optional
from ringlab.cli.output import people, stderr

if TYPE_CHECKING:
    from rich.progress import Progress

    from ringlab_course.gradebook.pool import Job, Outcome, Pool


@dataclass(frozen=True)
class Request:
    """The options of `ringlab grade`."""

    paths: list[Path]
    only: str | None
    book: Path | None
    jobs: int | None
    regrade: frozenset[str]
    learner: str | None
    csv: Path | None
    json_file: Path | None
    html: Path | None
    seed: int | None
    unsafe: bool
    patience: float
    scheduler: str | None
    as_json: bool

    @property
    def of_a_class(self) -> bool:
        """Return whether the options name a gradebook, or include one that needs a gradebook."""
        wants = (self.book, self.csv, self.json_file, self.html, self.learner)
        return bool(self.regrade) or any(each is not None for each in wants)


class Stopped(KeyboardInterrupt):
    """SIGTERM asked this process to end."""


class PoolOfFittingSize:
    """A pool that is made when `run` gets the jobs, so that its size fits their number."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def run(self, jobs: Sequence[Job], started: Callable[[Job], None]) -> Generator[Outcome, None, None]:
        """Yield an outcome for every job."""
        return pool_for(self.request, len(jobs)).run(jobs, started)


def pool_for(request: Request, count: int) -> Pool:
    """Return the pool that grades `count` notebooks.

    Raises: SandboxError if no sandbox works; CourseError if no workers answer at the scheduler's address.
    """
    from ringlab_course.gradebook.pool import Here, cores

    if request.scheduler is not None:
        from ringlab_course.gradebook.cluster import ClusterPool

        return ClusterPool(request.scheduler)
    if count <= 1:
        return Here()
    if not request.unsafe:
        from ringlab_course.judge.probe import require

        require()  # check once before anything is graded, not for every submission
    from ringlab_course.gradebook.pool import LocalPool

    return LocalPool(request.jobs or cores())


class UnderWay:
    """Shows in the progress bar which notebooks are being graded."""

    def __init__(self, bar: Progress, task: Any) -> None:
        self.bar, self.task, self.names = bar, task, dict[int, str]()

    def begin(self, job: Job) -> None:
        self.names[job.number] = job.name
        self._show()

    def end(self, job: Job) -> None:
        self.names.pop(job.number, None)
        self.bar.advance(self.task)
        self._show()

    def _show(self) -> None:
        from ringlab_course.gradebook.readable import shown_name

        names = ", ".join(shown_name(name)[:24] for name in list(self.names.values())[:4])
        self.bar.update(self.task, description=f"grade {names}".rstrip())


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM stop a run as Ctrl-C does: finished results are kept, unfinished ones are dropped."""

    def stop(*_: Any) -> None:
        raise Stopped

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # only the main thread may handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_status(stop: KeyboardInterrupt) -> int:
    """Return the exit status of a command that this interruption ended."""
    return 128 + (signal.SIGTERM if isinstance(stop, Stopped) else signal.SIGINT)


def above(bar: Progress) -> Console:
    """Return the console for messages. If stdout is a terminal too, this is the console of the progress bar."""
    return bar.console if not bar.disable and sys.stdout.isatty() else people


def tell(notes: list[str]) -> None:
    """Print notes on stderr."""
    for note in notes:
        stderr.print(note, style="yellow", highlight=False, soft_wrap=True)


def _sandbox(name: str) -> Diagnosis:
    from ringlab_course.judge.probe import probe

    found = probe()
    if found.available:
        slower = f"each is started by itself, which is slower, as forking failed: {found.unforked}"
        how = slower if found.unforked else "one server forks them"
        return Diagnosis(name, "ok", f"bubblewrap {found.version} isolates workers; {how}")
    return Diagnosis(name, "missing", found.got or found.needed, found.remedy)


def _chromium(name: str) -> Diagnosis:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path:
        return Diagnosis(name, "ok", path)
    return Diagnosis(name, "missing", "not found", "for the browser tests only: apt-get install chromium")


PROBES: dict[str, Callable[[str], Diagnosis]] = {
    "jupyterlab": optional("lab", "the notebooks"),
    "nbclient": optional("instructor", "ringlab build"),
    "nbgrader": optional("nbgrader", "ringlab nbgrader"),
    "distributed": optional("cluster", "ringlab grade --scheduler"),
    "jax": optional("jax", "lesson and exercise 17"),
    "sandbox of the judge": _sandbox,
    "chromium": _chromium,
}
