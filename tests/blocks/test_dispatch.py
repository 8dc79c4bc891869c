"""For each head dim, Triton's own dispatch compiles seven kernels, whatever the lengths and strides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringlab.blocks.triton.offline import clean_environment

pytestmark = pytest.mark.needs_triton

CHECKOUT = Path(__file__).resolve().parents[2]
SEVEN = {"forward_step": 3, "backward_dq": 3, "backward_dkv": 1}
"""The forward and dQ have a kernel each for the first step, a middle one and the last; dK/dV has one kernel."""


def compilations(tmp_path: Path, mutant: str, *dims: int) -> list[dict[str, int]]:
    """Return the compilations of each head dim, counted in a process that does not interpret kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.blocks.dispatch", mutant, *map(str, dims)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        env=clean_environment(str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout).values())


def test_lengths_and_strides_compile_nothing_anew(tmp_path: Path) -> None:
    assert compilations(tmp_path, "right", 72) == [SEVEN]


@pytest.mark.thorough
def test_every_head_dim_has_seven_kernels(tmp_path: Path) -> None:
    """The head dims 20, 33 and 64 have seven kernels for all lengths and strides, as 72 has."""
    assert compilations(tmp_path, "right", 20, 33, 64) == [SEVEN] * 3


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", ["kernels by strides", "tensors from any address"])
def test_a_mutant_compiles_more(tmp_path: Path, mutant: str) -> None:
    (found,) = compilations(tmp_path, mutant, 72)
    assert found != SEVEN and all(found[kernel] >= count for kernel, count in SEVEN.items())
