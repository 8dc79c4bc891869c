"""The numbers of `tables/hardware.toml` once more, transcribed apart from it, in base units.

Each row: ranks in a node; bytes, bytes/s of memory; TFLOP/s by dtype; (GB/s one way, µs) inside and
between nodes; fractions reached by attention forward, backward and matrices.
"""

from __future__ import annotations

import pytest

from ringlab.cost.hardware import Hardware, hardware, hardware_names

MIB, GB, GIB = 2**20, 10**9, 2**30

A100: dict[str, float] = {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5}
HOPPER: dict[str, float] = {
    "bfloat16": 989.4,
    "float16": 989.4,
    "tf32": 494.7,
    "float32": 66.9,
    "float8": 1978.9,
}
BLACKWELL: dict[str, float] = {"bfloat16": 2250, "float16": 2250, "tf32": 1100, "float32": 80, "float8": 4500}

Sheet = tuple[
    int, float, float, dict[str, float], tuple[float, float], tuple[float, float], tuple[float, float, float]
]

SHEETS: dict[str, Sheet] = {
    "a100": (8, 81920 * MIB, 2039 * GB, A100, (300, 3.4), (25, 14), (0.73, 0.63, 0.8)),
    "a100-40gb": (8, 40960 * MIB, 1555 * GB, A100, (300, 3.4), (25, 14), (0.73, 0.63, 0.8)),
    "h100": (8, 81559 * MIB, 3350 * GB, HOPPER, (450, 3.4), (50, 14), (0.655, 0.567, 0.8)),
    "h200": (8, 141 * GB, 4800 * GB, HOPPER, (450, 3.4), (50, 14), (0.655, 0.567, 0.8)),
    "b200": (8, 180 * GB, 8000 * GB, BLACKWELL, (900, 3.4), (50, 14), (1, 1, 1)),
    "tpu-v3": (1024, 32 * GIB, 900 * GB, {"bfloat16": 123}, (100, 1), (6.25, 50), (1, 1, 1)),
    "tpu-v4": (4096, 32 * GIB, 1200 * GB, {"bfloat16": 275}, (45, 1), (6.25, 50), (1, 1, 1)),
    "tpu-v5e": (256, 16 * GIB, 819 * GB, {"bfloat16": 197}, (45, 1), (3.125, 50), (1, 1, 1)),
    "laptop": (4, 4 * GB, 12.8 * GB, {"float32": 0.096, "bfloat16": 0.096}, (2, 50), (0.125, 100), (1, 1, 1)),
    "laptops": (
        1,
        16 * GB,
        51.2 * GB,
        {"float32": 0.384, "bfloat16": 0.384},
        (2, 50),
        (0.125, 100),
        (1, 1, 1),
    ),
}


def _numbers(it: Hardware) -> list[float]:
    """All numbers of an entry, in the order of `SHEETS`."""
    links = [(link.bytes_per_s / 1e9, link.latency_s * 1e6) for link in (it.inside, it.between)]
    flops = [rate / 1e12 for _, rate in sorted(it.flops_per_s.items())]
    reached = it.reached.attention_forward, it.reached.attention_backward, it.reached.linear
    return [it.ranks_per_node, it.memory_bytes, it.memory_bytes_per_s, *flops, *links[0], *links[1], *reached]


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_is_that_of_the_sheets(name: str) -> None:
    ranks, memory, bandwidth, flops, inside, between, reached = SHEETS[name]
    ordered = [flops[dtype] for dtype in sorted(flops)]
    assert sorted(hardware(name).flops_per_s) == sorted(flops)
    expected = [ranks, memory, bandwidth, *ordered, *inside, *between, *reached]
    assert _numbers(hardware(name)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["a100", "a100-40gb", "h100", "h200", "b200"])
def test_the_source_says_whether_memory_is_the_drivers_or_the_sheets(name: str) -> None:
    """What a driver reports is a whole number of MiB; the sheet's decimal GB is less, and is called so."""
    it = hardware(name)
    reported = f"driver reports it, {it.memory_bytes / 2**20:.0f} MiB" in it.source
    assert reported != ("decimal GB, which is conservative" in it.source)
    assert reported == (it.memory_bytes % 2**20 == 0)
