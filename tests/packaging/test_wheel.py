"""The wheel has the whole package and works without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[2]

RING = """
import sys
import numpy as np, torch
import ringlab
assert not any("ringlab" in name for name in sys.modules if name.startswith("__editable__"))
from ringlab import VirtualCluster, oracle, ring_attention, zigzag

S, P = 13, 3
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, heads, S, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
layout = zigzag(S, P)

def program(ring):
    shards = (layout.shard(x, ring.rank) for x in (q, k, v))
    return ring_attention(*shards, ring=ring, layout=layout)

out = layout.unshard(VirtualCluster(P).run(program).results)
print(ringlab.__file__)
print(float(np.abs(out.numpy() - oracle.attention(q, k, v, causal=True).out).max()) < 1e-12)
"""


@pytest.fixture(scope="module")
def target(wheel: Path) -> Path:
    """Install the wheel, and nothing else, into an empty folder."""
    folder = wheel.parent / "target"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(folder),
    ]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True, text=True)
    return folder


def run_outside(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python far from the checkout, with the installed wheel before the editable install."""
    elsewhere = target.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("package", ["ringlab", "ringlab_course"])
def test_the_wheel_holds_every_file_of_the_package(wheel: Path, package: str) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = (path for path in (CHECKOUT / package).rglob("*") if path.is_file())
    wanted = {path.relative_to(CHECKOUT).as_posix() for path in files if "__pycache__" not in path.parts}
    assert {name for name in names if name.startswith(f"{package}/")} == wanted
    assert "ringlab/py.typed" in names


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = archive.read(name).decode()
    assert "License-Expression: Apache-2.0 AND CC-BY-4.0" in metadata
    assert "Requires-Python: <3.14,>=3.11" in metadata
    folder = name.removesuffix("METADATA")
    assert "ringlab = ringlab.cli:main" in archive.read(folder + "entry_points.txt").decode()
    assert {folder + "licenses/LICENSE", folder + "licenses/LICENSE-text"} <= set(archive.namelist())


def test_ring_attention_runs_outside_the_checkout(target: Path) -> None:
    place, right = run_outside(target, "-c", RING).stdout.splitlines()
    assert Path(place).parent == target / "ringlab"
    assert right == "True"


def test_the_course_is_found_outside_the_checkout(target: Path) -> None:
    code = "from ringlab_course.checking import loading as l; print(l.__file__, *l.exercise_ids(), sep='\\n')"
    place, *ids = run_outside(target, "-c", code).stdout.splitlines()
    assert Path(place).is_relative_to(target) and "05" in ids


def test_the_command_runs_outside_the_checkout(target: Path) -> None:
    done = run_outside(
        target, "-c", "import sys; sys.argv = ['ringlab', '--help']; from ringlab.cli import main; main()"
    )
    assert "verify" in done.stdout
