"""The number of programs on an SM is that of the vendor's arithmetic, and the model of configurations obeys laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringlab.blocks.triton.configs import Config
from ringlab.blocks.triton.occupancy import clocks_per_score, resident_programs
from ringlab.blocks.triton.offline import Compiled, Job

UNITS = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}


def compiled(arch: str, warps: int, registers: int, shared: int, columns: int = 0) -> Compiled:
    job = Job("forward_step", arch, 128, "bfloat16", Config(128, 64, warps, 2))
    return Compiled(job, registers, 0, shared, UNITS[arch], 8, columns)


@pytest.mark.parametrize(
    ("found", "programs"),
    [
        (compiled("sm_80", 8, 128, 0), 2),  # 2 × 256 threads × 128 registers are all 65,536
        (compiled("sm_80", 8, 129, 0), 1),  # registers are allocated in eights: 136
        (compiled("sm_80", 4, 32, 0), 16),  # 64 warps
        (compiled("sm_80", 4, 32, 82 * 1024), 1),
        (compiled("sm_90", 8, 255, 113 * 1024), 1),  # room for two in shared memory, for one in registers
        (compiled("sm_90", 4, 128, 228 * 1024), 0),
        (compiled("sm_100", 4, 64, 0, columns=256), 2),  # of 512 columns
    ],
)
def test_programs_of_an_sm(found: Compiled, programs: int) -> None:
    assert resident_programs(found) == programs
    assert (clocks_per_score(found) == float("inf")) == (programs == 0)


def test_a_second_program_hides_the_waits_of_the_first() -> None:
    one, two = compiled("sm_80", 4, 250, 100 * 1024), compiled("sm_80", 4, 250, 80 * 1024)
    assert (resident_programs(one), resident_programs(two)) == (1, 2)
    assert clocks_per_score(two) < clocks_per_score(one)


def test_float32_on_the_lanes_is_slower_than_three_products_of_tf32() -> None:
    found = compiled("sm_90", 4, 128, 32 * 1024)
    lanes, three = (
        clocks_per_score(replace(found, job=replace(found.job, dtype="float32", config=config)))
        for config in (Config(32, 32, 4, 2), Config(32, 32, 4, 2, "tf32x3"))
    )
    assert three < lanes
