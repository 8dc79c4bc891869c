"""What the README says can be done and found, can be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
README = (CHECKOUT / "README.md").read_text()
TREE = README.split("```text\n")[1].split("```")[0]


def tree_names(tree: str) -> list[str]:
    """Return the files and folders that the annotated tree names, one row may name several."""
    names = []
    for row in tree.splitlines():
        names += re.findall(
            r"[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|sh|lock|yml)|/)(?=[ ,]|$)",
            re.split(r"   +", row.strip("│├└─ "))[0],
        )
    return names


def in_checkout() -> Iterator[str]:
    """Yield all files and folders; one that vanishes meanwhile, as those of other tests may, is none."""
    for place, folders, files in os.walk(CHECKOUT):
        folders[:] = [name for name in folders if name not in (".git", ".venv")]
        yield from (Path(place, name).relative_to(CHECKOUT).as_posix() for name in (*folders, *files))


def test_the_first_screen_has_the_two_commands() -> None:
    first = "\n".join(README.splitlines()[:12])
    assert re.search(r"^make lab\b", first, re.MULTILINE)
    assert re.search(r"^make test\b", first, re.MULTILINE)


def test_what_the_tree_names_exists() -> None:
    names = tree_names(TREE)
    assert len(names) > 60
    there = set(in_checkout())
    missing = [
        name for name in names if not any(f"/{path}".endswith("/" + name.rstrip("/")) for path in there)
    ]
    assert missing == []


def test_every_module_of_the_package_is_in_the_tree() -> None:
    """Down to the files of each room; commands, benches, pictures, contracts and the judge stand as folders."""
    rooms = ("", "blocks", "comm", "course")
    files = [path for room in rooms for path in (CHECKOUT / "ringlab" / room).glob("*.py")]
    missing = [path.name for path in files if path.name != "__init__.py" and path.name not in TREE]
    missing += [
        path.name
        for path in (CHECKOUT / "ringlab").iterdir()
        if path.is_dir() and f"{path.name}/" not in TREE
    ]
    assert [name for name in missing if name != "__pycache__"] == []


def test_the_example_runs(tmp_path: Path) -> None:
    example = re.search(r"```python\n(import torch.*?)```", README, re.DOTALL)
    assert example is not None
    check = """
from ringlab import oracle
error = abs(out.double().numpy() - oracle.attention(q, k, v, causal=True).out).max()
assert error < 1e-5, error
"""
    code = example[1] + check
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sent, peak = map(int, done.stdout.split())
    assert sent == 3 * 2 * 250 * 2 * 64 * 4  # P − 1 hops of K and V: tokens × K/V heads × head dim × bytes
    assert peak > 0


def test_the_program_runs_under_torchrun(tmp_path: Path) -> None:
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "ring.py"
    script.write_text(
        first.split("outcome =")[0].replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1)
        + second
        + "print(tuple(shard.shape))\n"
    )
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


@pytest.mark.parametrize(
    "line", sorted(set(re.findall(r"^(?:ringlab) (\w+(?: \w+)?)", README, re.MULTILINE)))
)
def test_the_commands_exist(line: str) -> None:
    words = [word for word in line.split() if word not in ("exercises",)]
    code = f"import sys; sys.argv = ['ringlab', *{words!r}, '--help']; from ringlab.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    texts = README + (CHECKOUT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", texts, re.MULTILINE))
    assert named - targets == set()
    assert {"lab", "test", "build"} <= named
