"""A Dask cluster gives the book that this machine alone gives; what is missing is said before anything runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import LocalCluster

from ringlab.errors import CourseError
from ringlab_course.gradebook.cluster import ClusterPool
from ringlab_course.gradebook.pool import Here
from ringlab_course.gradebook.runner import grade_class
from ringlab_course.gradebook.store import Gradebook
from tests.course.gradebook.stub import judge, submissions, write

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None, host="127.0.0.1") as cluster:
        yield cluster.scheduler_address


def compared(book: Gradebook) -> list[tuple]:
    return [(e.learner, e.exercise, e.path, e.digest, e.contract, e.seed, e.report) for e in book.entries()]


def test_a_cluster_grades_as_this_machine_does(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "class"
    for number in range(20):
        write(folder, f"learner {number}", {7: "sandbox", 8: "bug"}.get(number, str(number % 11)))
    (folder / "learner 9" / "05_emulated_ring.ipynb").unlink()
    (folder / "learner 9" / "05_emulated_ring.ipynb").symlink_to("/etc/hostname")
    os.remove(folder / "learner 10" / "05_emulated_ring.ipynb")
    os.mkfifo(folder / "learner 10" / "05_emulated_ring.ipynb")
    with Gradebook(tmp_path / "book") as book, Gradebook(None) as alone:
        alone.use_class_seed(book.class_seed)
        handed_in = [each for each in submissions(folder) if each.learner not in ("learner 9", "learner 10")]
        run = grade_class(book, handed_in, ClusterPool(cluster, judge))
        grade_class(alone, handed_in, Here(judge))
        assert compared(book) == compared(alone) and len(book.entries()) == 16
        assert [u.reason for u in run.ungraded] != [] and book.ungraded()[0].reason == alone.ungraded()[
            0
        ].reason
        assert grade_class(book, handed_in, ClusterPool(cluster, judge)).graded == []


def test_what_cannot_travel_is_judged_here(cluster: str, tmp_path: Path) -> None:
    path = tmp_path / "class" / "ada" / "05_emulated_ring.ipynb"
    path.parent.mkdir(parents=True)
    path.symlink_to("/etc/hostname")
    from tests.course.gradebook.stub import report

    def zero(path: Path, exercise: str | None, **options):
        return report(str(path), exercise or "", 0, options["seed"], "a symbolic link")

    with Gradebook(None) as book:
        run = grade_class(book, submissions(tmp_path / "class"), ClusterPool(cluster, zero))
        assert len(run.graded) == 1 and [e.report["reason"] for e in book.entries()] == ["a symbolic link"]


@pytest.mark.slow
@pytest.mark.needs_bwrap
def test_the_real_judge_on_a_cluster(cluster: str, tmp_path: Path) -> None:
    folder = tmp_path / "class"
    for learner, source in (("ada", "solutions"), ("bob", "exercises"), ("cy", "solutions")):
        (folder / learner).mkdir(parents=True)
        shutil.copy(CHECKOUT / source / "01_naive_attention.ipynb", folder / learner)
    with Gradebook(None) as book:
        run = grade_class(book, submissions(folder), ClusterPool(cluster))
        assert run.ungraded == []
        assert [(e.learner, e.score == e.maximum) for e in book.entries()] == [
            ("ada", True),
            ("bob", False),
            ("cy", True),
        ]


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


def test_nothing_but_a_cluster_loads_dask() -> None:
    code = "import sys, ringlab.cli, ringlab_course.gradebook.runner; print('distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
