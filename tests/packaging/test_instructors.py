"""The command line accepts the commands in the instructor's manual, whose numbers agree with the code."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from ringlab.cli import app
from ringlab_course.judge import grade, sandbox, submission

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]
MANUAL = (CHECKOUT / "docs/instructors.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", MANUAL, re.MULTILINE | re.DOTALL)
NEVER_RUN = ("--unsafe", "--scheduler", "systemd-run", "nbgrader")
"""Words in commands that are parsed but not run here, because they need more than a folder of notebooks."""


def commands(block: str) -> list[list[str]]:
    """Return the commands of a block as words, without here-documents, redirections and shell keywords."""
    text = re.sub(r"<<'(\w+)'\n.*?\n\1$", "", block, flags=re.DOTALL | re.MULTILINE).replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        words = shlex.split(re.sub(r"\|\| true|[<>] *\S+$", "", line.replace("$(", " ").replace(")", " ")))
        if words and words[0] not in ("for", "done", "cd"):
            found.append(words[1:] if re.fullmatch(r"\w+=", words[0]) else words)
    return [words for words in found if words]


OURS = [words for block in BLOCKS for words in commands(block) if "ringlab" in words]


def parsed(words: list[str]) -> None:
    """Parse `words` without running them. Raises: LookupError, or the error of the command line."""
    command: Any = typer.main.get_command(app)
    arguments = words[words.index("ringlab") + 1 :]
    while hasattr(command, "get_command"):
        name, *arguments = arguments
        found = command.get_command(None, name)
        if found is None:
            raise LookupError(f"no command {name}")
        command = found
    command.make_context(command.name, arguments)


@pytest.fixture
def a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the manual's folders: Ada submits the solution, Bilal the skeleton, and Chen a broken file."""
    slug = "01_naive_attention"
    for learner, kind in (("ada", "solutions"), ("bilal", "exercises"), ("chen", "exercises")):
        path = tmp_path / "submitted" / learner / slug / f"{slug}.ipynb"
        path.parent.mkdir(parents=True)
        shutil.copy(CHECKOUT / kind / f"{slug}.ipynb", path)
    path.write_text("{")
    (tmp_path / "exercises").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_every_command_of_ours_is_one(words: list[str], a_class: Path) -> None:
    parsed(words)


@pytest.mark.needs_bwrap
@pytest.mark.slow
def test_the_manual_can_be_followed(a_class: Path) -> None:
    """The commands that need only a folder of notebooks run in the manual's order."""
    lines = [words for words in OURS if not set(words) & set(NEVER_RUN)]
    assert len(lines) > 15
    for words in lines:
        program = "import sys; from ringlab.cli import main; sys.argv[0] = 'ringlab'; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, *words[1:]],
            cwd=a_class,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == (1 if "1234" in words and "points are missing" in said else 0), said
    names = {path.relative_to(a_class / "pages").as_posix() for path in (a_class / "pages").rglob("*.html")}
    assert len(names) == 4 and "index.html" in names
    assert "34" not in (a_class / "scores.csv").read_text().split("\n")[1].split(",")[2]  # taken back again
    assert "broken JSON" in (a_class / "grades.json").read_text()


def test_the_numbers_are_those_of_the_code() -> None:
    bounds, defaults = sandbox.Bounds(), inspect.signature(grade).parameters
    manual = " ".join(MANUAL.split())
    for said in (
        f"{bounds.memory_bytes >> 30} GiB of address space, {bounds.scratch_bytes >> 20} MiB of files, "
        f"{bounds.cpu_seconds} s of CPU, {bounds.tasks} threads",
        f"together: {bounds.total_memory_bytes >> 30} GiB of memory, {bounds.total_tasks} processes and threads",
        f"{defaults['timeout'].default:g} s for a call, {defaults['total_timeout'].default:g} s for the whole submission",
        f"more than {submission.FILE_BYTES >> 20} MiB",
        f"head -c {submission.FILE_BYTES + 1}",
    ):
        assert said in manual
    assert "version < (0, 5)" in inspect.getsource(sandbox) and "0.5 or newer" in MANUAL
