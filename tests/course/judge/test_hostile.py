"""Hostile submissions, several for each known kind of attack, earn no undeserved points and do no harm."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Check, Exercise
from ringlab_course.checking.failures import Failure
from ringlab_course.checking.forbidden import PACKAGES
from ringlab_course.judge import process
from ringlab_course.judge.judge import GradeReport, grade
from ringlab_course.judge.process import WorkerProcess
from ringlab_course.judge.removal import HOME
from ringlab_course.judge.sandbox import Bounds
from ringlab_course.judge.session import SandboxedSubject, Session
from tests.course.judge.hostile import BY_KIND, HOSTILE, KIND_OF, kernels, measures, rings
from tests.course.judge.hostile.answers import HONEST
from tests.course.judge.hostile.files import FILES
from tests.course.judge.hostile.small import EXERCISE, SECRET, together
from tests.course.judge.small_contract import DOUBLE, RIGHT, marked, mine, notebook, processes, turn
from tests.course.judge.small_contract import EXERCISE as SMALL

pytestmark = pytest.mark.needs_bwrap
BOUNDS = Bounds(memory_bytes=1 << 29)
SECONDS = 1.0
LATE_S = 20.0
"""The seconds after its deadline in which a busy machine must end a submission that never ends."""
SEED = 271828182845904523
TOGETHER = (
    "evil array subclasses", "odd values", "reading tests, gradebook or other submissions", "writing anywhere", "network",
    "system calls", "tensors",
)  # fmt: skip
"""Kinds whose submissions do not disturb each other, so that all of a kind are handed in as one notebook."""
ALONE = [name for name in HOSTILE if KIND_OF[name] not in TOGETHER]
EARNED = {"is right for what a notebook shows": 2}
"""The points that hostile submissions may earn by right answers."""
NOT_CONDEMNED = {
    "drips its answer byte by byte", "sends half a frame and leaves", "closes the channel and goes on", "closes every descriptor",
}  # fmt: skip
WITHOUT_SANDBOX = (
    "reads the gradebook", "reads another's submission", "lists the class", "reads the tests", "reads the contracts",
    "reads the solutions", "reads everybody's environment", "finds the seed in somebody's arguments",
    "reads the accounts of this machine", "writes into the class", "plants a file beside its own",
    "connects to a server here", "sends a datagram", "asks for a name", "connects to a socket in the class", "listens",
    "asks the kernel by sockets", "locks the system's files",
)  # fmt: skip
"""Attacks that do no harm on this machine, so that a test can show that they succeed without a sandbox."""
_marks = itertools.count()


class Class:
    """A class to attack: its instructor's folder, servers, and a process with the seed in its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ada").mkdir()
        (folder / "ada" / "notebook.ipynb").write_text("hers")
        (folder / "gradebook.db").write_text("grades")
        for path in (folder, folder / "ada", folder / "ada" / "notebook.ipynb", folder / "gradebook.db"):
            path.chmod(0o777)
        self.abstract = f"ringlab-{os.getpid()}"
        self.servers = [
            socket.create_server(("127.0.0.1", 0)),
            *(socket.socket(socket.AF_UNIX) for _ in "ab"),
        ]
        self.servers[1].bind(f"{folder}/socket")
        self.servers[2].bind(f"\0{self.abstract}")
        (folder / "socket").chmod(0o777)
        for server in self.servers:
            server.listen()
            server.setblocking(False)
        wait = "import sys; sys.stdin.read()"
        self.other = subprocess.Popen([sys.executable, "-c", wait, str(SEED)], stdin=subprocess.PIPE)

    def close(self) -> None:
        for server in self.servers:
            server.close()
        self.other.communicate()

    def tree(self) -> dict[str, str]:
        """Return the text of every file in the folder, with its path as the key."""
        return {str(p): p.read_text() if p.is_file() else "" for p in self.folder.rglob("*")}

    def called(self) -> list[str]:
        """Return the addresses of the servers that received a connection."""
        found = []
        for server in self.servers:
            try:
                server.accept()[0].close()
                found.append(str(server.getsockname()))
            except BlockingIOError:
                pass
        return found

    def told(self, source: str, mark: str) -> str:
        """Return the submission with this class's folder, port and seed filled in."""
        places = {
            "FOLDER": self.folder,
            "PORT": self.servers[0].getsockname()[1],
            "SEED": SEED,
            "TESTS": __file__,
        }
        for name, place in {**places, "MARK": self.abstract if "\\0@MARK@" in source else mark}.items():
            source = source.replace(f"@{name}@", str(place))
        return source


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGLAB_SECRET", "the seed of the class")
        there = Class(tmp_path_factory.mktemp("class"))
        yield there
        there.close()


def test_a_worker_that_is_left_would_be_seen() -> None:
    first = turn()
    with WorkerProcess(BOUNDS) as worker:
        worker.ready()
        assert processes(first)
    assert not mine(first)


def test_what_bears_a_mark_would_be_seen(tmp_path) -> None:
    mark = f"mark-{os.getpid()}-seen"
    (tmp_path / mark).touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{mark}")
        assert len(marked(mark, tmp_path)) == 2
    assert marked(mark) == []


def words(report: GradeReport) -> str:
    """Return the texts of a report, without the time, the path and the process number, whose digits vary."""
    checks = [check for stage in report.stages for check in stage.checks]
    said = [[check.title, check.message, check.counterexample, str(check.misconception)] for check in checks]
    told = "\n".join([report.reason, report.label, *report.notes, *itertools.chain(*said)])
    return told.replace(f"-{os.getpid()}", "")


def judged(tmp_path: Path, school: Class, names: Sequence[str], seconds: float = SECONDS) -> GradeReport:
    """Grade these submissions as one; check that nothing is left, harmed or revealed; return the report."""
    mark = f"mark-{os.getpid()}-{next(_marks)}"
    before, told = school.tree(), {name: school.told(HOSTILE[name], mark) for name in names}
    cells, exercise = together(told) if len(told) > 1 else ([*told.values()], EXERCISE)
    first, begin = turn(), time.monotonic()
    bounds = None if "import torch" in cells[0] else BOUNDS
    report = grade(notebook(tmp_path, *cells), exercise, bounds=bounds, timeout=seconds, seed=SEED)
    took = time.monotonic() - begin
    checks = [check for stage in report.stages for check in stage.checks]
    assert took < len(checks) * (seconds + LATE_S), "every check ends soon after its deadline"
    assert all(check.message for check in checks if not check.ok)
    assert not any(check.broken for check in checks), "no check breaks, whatever the answer is"
    written = [stage for stage in report.stages if stage.status != "not written"]
    hidden = [check for stage in written for check in stage.checks if check.tier == "held-out"]
    assert all(check.counterexample == "" and "[" not in check.message for check in hidden)
    assert not any(digits in words(report) for digits in (f"{SECRET:.0f}", f"{SECRET:.4e}".partition("e")[0]))
    assert not mine(first)
    assert school.tree() == before and school.called() == []
    assert marked(mark, school.folder, *(HOME / package for package in PACKAGES), tmp_path) == []
    return report


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALONE)
def test_hostile_submissions_earn_nothing_and_leave_nothing(tmp_path, school, name) -> None:
    forges = KIND_OF[name] == "forging replies on the pipe"
    soon = name in EARNED or (forges and name not in NOT_CONDEMNED)  # ends without a deadline
    report = judged(tmp_path, school, [name], 20 if soon else SECONDS)
    assert report.earned == EARNED.get(name, 0) and not report.ok
    if forges:
        assert ("interfered" in report.reason) == (name not in NOT_CONDEMNED)


@pytest.mark.parametrize("kind", TOGETHER)
def test_those_that_leave_each_other_alone_earn_nothing_and_leave_nothing(tmp_path, school, kind) -> None:
    names = list(BY_KIND[kind])
    report = judged(tmp_path, school, names, 20)
    assert not report.reason and not report.notes, "every submission is loaded, and none disturbs another"
    earned = {name: stage.earned for name, stage in zip(names, report.stages, strict=True)}
    assert earned == dict.fromkeys(names, 0)


def test_what_the_sandbox_stops_succeeds_without_it(tmp_path, school) -> None:
    mark = f"mark-{os.getpid()}-{next(_marks)}"
    cells, exercise = together({name: school.told(HOSTILE[name], mark) for name in WITHOUT_SANDBOX})
    report = grade(notebook(tmp_path, *cells), exercise, timeout=20, seed=SEED, unsafe=True)
    assert [name for name, stage in zip(WITHOUT_SANDBOX, report.stages, strict=True) if not stage.ok] == []
    (school.folder / "gradebook.db").write_text("grades")
    (school.folder / mark).unlink()
    school.called()


def test_the_next_submission_is_unaffected(tmp_path) -> None:
    for name in ("is a fork bomb", "kills everybody", "fills the disk", "writes garbage to the judge"):
        grade(notebook(tmp_path, HOSTILE[name]), EXERCISE, bounds=BOUNDS, timeout=SECONDS)
        assert grade(notebook(tmp_path, RIGHT), SMALL, timeout=60).ok


@pytest.mark.parametrize("kind", HONEST)
def test_strange_submissions_that_are_right_earn_everything(tmp_path, kind) -> None:
    cells, exercise = together(HONEST[kind])
    report = grade(notebook(tmp_path, *cells), exercise, timeout=60)
    names = [name for name, stage in zip(HONEST[kind], report.stages, strict=True) if not stage.ok]
    assert names == [] and report.ok


ALL_FILES = {name: file for group in FILES.values() for name, file in group.items()}
"""Files that are not honest notebooks."""


def _double(subject, rng) -> None:
    x = rng.standard_normal(5)
    compare_with(subject.call(x), 2 * x, bound=1e-12)


DOUBLED = Check("values", 5, "visible", "values", _double)
ONE_CHECK = Exercise(id="90", slug="90_small", title="small", stages=(replace(DOUBLE, checks=(DOUBLED,)),))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_file_earns_exactly_this_and_the_reason_is_told(tmp_path, monkeypatch, name) -> None:
    mark = f"file-{os.getpid()}-mark"
    monkeypatch.chdir(tmp_path)
    path, file = tmp_path / "handed_in.ipynb", ALL_FILES[name]
    file.make(path)
    if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
        path.write_bytes(path.read_bytes().replace(b"@MARK@", mark.encode()))
    report = grade(path, ONE_CHECK, timeout=60)
    checks = [check for stage in report.stages for check in stage.checks]
    told = "\n".join([report.reason, *(f"{check.message}\n{check.counterexample}" for check in checks)])
    assert (report.earned, report.points) == (file.earned, 5), told
    assert file.told in told and bool(told.strip()) == (file.earned < 5)
    assert not any(check.broken for check in checks)
    assert told.isprintable() or told.replace("\n", "").isprintable()
    assert marked(mark, tmp_path) == []


@pytest.mark.parametrize("name", measures.SUBMISSIONS)
def test_memory_that_is_hidden_is_seen_or_the_answer_is_not_taken(name) -> None:
    x = np.arange(5.0)
    with Session([measures.SUBMISSIONS[name]], ["double"], torch=False, bounds=Bounds(), seconds=20) as ours:
        for _ in range(2 if name in measures.KEEPING else 1):
            try:
                measured = SandboxedSubject(ours, "double").measure(x)
            except Failure:
                assert name != "hides nothing"
                return
            assert np.array_equal(measured.answer, 2 * x)
            assert measured.peak_bytes > 56 << 20


@pytest.mark.parametrize("name", measures.KEEPING)
def test_memory_that_is_kept_would_be_hidden_if_the_call_began_with_it(monkeypatch, name) -> None:
    monkeypatch.setattr(WorkerProcess, "beyond", lambda worker: 0)
    with Session([measures.SUBMISSIONS[name]], ["double"], torch=False, seconds=20) as ours:
        peaks = [SandboxedSubject(ours, "double").measure(np.arange(5.0)).peak_bytes for _ in range(2)]
    assert min(peaks) < 16 << 20


IMPORTS = {
    "at the top": "import torch\ndef double(x):\n    return torch.asarray(2 * x).numpy()",
    "in the function": "def double(x):\n    import torch\n    return 2 * x",
}


@pytest.mark.parametrize("place", IMPORTS)
def test_what_imports_need_is_not_the_submissions(place) -> None:
    with Session([IMPORTS[place]], ["double"], torch=False, seconds=60) as ours:
        peaks = [SandboxedSubject(ours, "double").measure(np.arange(5.0)).peak_bytes for _ in range(2)]
        assert peaks[1] < 1 << 20 and ours._loaded[0].added().own > 16 << 20, (
            "the import of torch counts apart, and is large"
        )
        assert not ours.notes and ours._imports().own > 16 << 20


def test_a_worker_is_replaced_only_if_the_submission_keeps_much_in_it() -> None:
    code = "KEPT = []\ndef keep(n):\n    KEPT.append(b'x' * n)\n    return len(KEPT)"
    with Session([code], ["keep"], torch=False, seconds=20) as ours:
        keep = SandboxedSubject(ours, "keep")
        assert [keep.call(n) for n in (1 << 16, 1 << 16, 1 << 23, 1)] == [1, 2, 3, 1]


def test_the_report_notes_what_the_code_holds_once_it_is_loaded() -> None:
    with Session([measures.SUBMISSIONS["takes it while it is loaded"]], ["double"], torch=False) as ours:
        ours.workers(1)
        assert any("63 MiB more" in note for note in ours.notes), ours.notes


def test_what_an_answer_itself_takes_is_not_counted_twice() -> None:
    code = "import numpy as np\ndef double(x):\n    return np.ones((2, 1 << 21)).T"
    with Session([code], ["double"], torch=False, seconds=20) as ours:
        measured = SandboxedSubject(ours, "double").measure(1)
    assert 31 << 20 < measured.peak_bytes < 36 << 20


def test_a_peak_that_is_read_once_would_be_hidden_from(monkeypatch) -> None:
    monkeypatch.setattr(process, "ROOM", 1 << 40)  # so that the peak is not read again with the answer
    with Session([measures.SUBMISSIONS["computes after it is done"]], ["double"], torch=False) as ours:
        measured = SandboxedSubject(ours, "double").measure(np.arange(5.0))
    assert np.array_equal(measured.answer, 2 * np.arange(5.0)) and measured.peak_bytes < 1 << 20


def test_no_name_is_used_twice() -> None:
    assert len(KIND_OF) == sum(map(len, BY_KIND.values())) == len(HOSTILE)
    assert len(ALL_FILES) == sum(map(len, FILES.values()))


KINDS = (
    "overwriting check functions and NumPy", "forging replies on the pipe", "evil array subclasses",
    "walking stacks, frames and memory", "reading tests, gradebook or other submissions", "writing anywhere", "network",
    "kill(-1)", "fork bombs", "setsid orphans", "memory bombs", "disk bombs", "1 GB of output",
    "infinite loops with signals ignored", "os._exit and other ends", "import hooks", "ctypes", "pickles",
    "threads left behind", "time bombs at import", "symlinked or enormous notebooks", "broken JSON", "non-UTF-8",
    "duplicated, renamed, retyped or missing cells", "output-only edits", "magic and shell cells",
)  # fmt: skip
TABLE = {
    **BY_KIND,
    **FILES,
    "frames forged in a ring": rings.FORGING,
    "rings that stay": rings.STAYING,
    "wires beside the ring": rings.WIRES,
    "meters dodged": rings.DODGING,
    "kernels": kernels.SUBMISSIONS,
    "memory hidden from its measure": measures.SUBMISSIONS,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_several_submissions(kind) -> None:
    assert len(TABLE[kind]) >= 2


def test_there_are_many_and_no_two_are_the_same() -> None:
    assert set(KINDS) <= set(TABLE)
    handed_in = [
        repr(each) for group in {**BY_KIND, "rings": rings.SUBMISSIONS}.values() for each in group.values()
    ]
    assert len(set(handed_in)) == len(handed_in) >= 200
    assert sum(map(len, TABLE.values())) >= 280
