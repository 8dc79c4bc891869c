"""A Dask cluster gives the same gradebook as this machine. It reports whatever it lacks before a run begins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from ringlab.errors import CourseError
from ringlab_course.gradebook.cluster import ClusterPool
from ringlab_course.gradebook.pool import Here
from ringlab_course.gradebook.runner import grade_class
from ringlab_course.gradebook.store import Gradebook
from ringlab_course.judge.judge import GradeReport
from tests.course.gradebook.stub import judge, report, submissions, write

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None, host="127.0.0.1") as cluster:
        yield cluster.scheduler_address


def compared(book: Gradebook) -> list[tuple]:
    return [(e.learner, e.exercise, e.path, e.digest, e.contract, e.seed, e.report) for e in book.entries()]


def zero_for_links(path: Path, exercise: str | None, **options: Any) -> GradeReport:
    """Judge as the stub does, but give no points to a notebook that is a symbolic link."""
    if path.is_symlink():
        return report(str(path), exercise or "", 0, options["seed"] or 0, "a symbolic link")
    return judge(path, exercise, **options)


def test_a_cluster_grades_as_this_machine_does(cluster: str, tmp_path: Path) -> None:
    """A cluster's book equals this machine's, although a symbolic link cannot travel and is judged here."""
    folder = tmp_path / "class"
    for number in range(20):
        write(folder, f"learner {number}", {7: "sandbox", 8: "bug"}.get(number, str(number % 11)))
    link = folder / "learner 9" / "05_emulated_ring.ipynb"
    link.unlink()
    link.symlink_to("/etc/hostname")
    handed_in = submissions(folder)
    with Gradebook(tmp_path / "book") as book, Gradebook(None) as alone:
        alone.use_class_seed(book.class_seed)
        run = grade_class(book, handed_in, ClusterPool(cluster, zero_for_links))
        grade_class(alone, handed_in, Here(zero_for_links))
        assert compared(book) == compared(alone) and len(book.entries()) == 18
        assert [u.reason for u in run.ungraded] != [] and book.ungraded()[0].reason == alone.ungraded()[
            0
        ].reason
        assert grade_class(book, handed_in, ClusterPool(cluster, zero_for_links)).graded == []


def test_nobody_at_that_address() -> None:
    for address in ("tcp://127.0.0.1:9", "nonsense://x", "tcp://127.0.0.1:99999"):
        with pytest.raises(CourseError, match="the address of a Dask scheduler"):
            ClusterPool(address, timeout_s=1)


def test_without_the_extra_the_error_names_it() -> None:
    code = (
        "import sys; sys.modules['distributed'] = None\n"
        "from ringlab_course.gradebook.cluster import ClusterPool\n"
        "ClusterPool('tcp://127.0.0.1:9')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingExtraError" in done.stderr and "pip install 'ringlab[cluster]'" in done.stderr
