"""The guide's programs print the output that is shown, its commands exist, and its index lists every page."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.packaging.test_instructors import parsed

CHECKOUT = Path(__file__).resolve().parents[2]
GUIDE = CHECKOUT / "docs/guide"
PAGES = sorted(GUIDE.glob("*.md"))
SHOWN = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
PROGRAMS = {path.stem: SHOWN.findall(path.read_text(encoding="utf-8")) for path in PAGES}
COMMANDS = sorted(
    {
        line.partition("#")[0].strip()
        for path in PAGES
        for block in re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("ringlab ")
    }
)


def test_every_program_is_followed_by_what_it_prints() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    assert texts.count("```python") == sum(map(len, PROGRAMS.values())) >= 6


@pytest.mark.thorough
@pytest.mark.parametrize("page", [page for page, shown in PROGRAMS.items() if shown])
def test_the_programs_of_a_page_print_what_stands_below_them(page: str, tmp_path: Path) -> None:
    """The programs of a page run one after the other in one process, each with names of its own."""
    end = "END OF A PROGRAM\n"
    forget = "for name in [each for each in globals() if each[0] != '_']: del globals()[name]"
    runs = [f"exec({source!r})\nprint({end!r}, end='')\n{forget}" for source, _ in PROGRAMS[page]]
    command = [sys.executable, "-c", "\n".join(runs)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.split(end)[:-1] == [printed for _, printed in PROGRAMS[page]], done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists(command: str) -> None:
    parsed(shlex.split(command))


@pytest.mark.thorough
def test_the_script_runs_under_torchrun(tmp_path: Path) -> None:
    found = re.search(
        r"```py\n(# ring\.py.*?)```", (GUIDE / "processes.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert found is not None
    script = tmp_path / "ring.py"
    script.write_text(found[1])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        str(script),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(1, 8, 250, 64)") == 4


def test_every_page_is_in_the_index() -> None:
    index = (GUIDE / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^- \[[^]]+\]\((\w+\.md)\)", index, re.MULTILINE)) == {
        path.name for path in PAGES if path.name != "index.md"
    }


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \|", (GUIDE / "install.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = [name for row in rows for name in re.findall(r"\w+", row)]
    assert sorted(named) == sorted(project["optional-dependencies"])


def test_every_link_of_the_documents_leads_somewhere() -> None:
    pages = [*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")]
    assert [line for page in pages for line in broken_links(page)] == []


def broken_links(page: Path) -> list[str]:
    """Return a line for each link of a page to a missing file, or to a missing heading of a page."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = []
    for target in re.findall(r"\]\((?!\w+:)([^)\s]*)\)", text):
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (
            anchor and path.suffix == ".md" and anchor not in anchors(path.read_text(encoding="utf-8"))
        ):
            found.append(f"{page.name}: {target}")
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors that a code host makes for the headings of a page."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    plain = [
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    return {f"{each}-{plain[:n].count(each)}" if each in plain[:n] else each for n, each in enumerate(plain)}
