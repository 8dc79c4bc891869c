"""What each schedule holds beyond its shard, on the meter; the guide says these figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ringlab import VirtualCluster, ring_attention
from ringlab.comm.ring import Ring
from ringlab.layout import zigzag

GUIDE = (Path(__file__).parents[2] / "docs/guide/schedules.md").read_text(encoding="utf-8")
P, S, H, D = 8, 1024, 8, 64
PEAKS = {
    "ring": (6.1, 14.6),
    "allgather": (16.1, 44.0),
    "ulysses": (6.0, 14.8),
    "hybrid(ulysses=2)": (9.1, 19.5),
    "double-ring(node=2)": (8.1, 18.6),
}
"""Forward, and with backward: in tensors of S/P tokens, as large as q's shard."""


def program(ring: Ring, schedule: str, backward: bool) -> None:
    layout = zigzag(S, ring.world_size)
    shape = 1, H, layout.length(ring.rank), D
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=draw).requires_grad_(backward) for _ in range(3))
    out = ring_attention(q, k, v, ring=ring, layout=layout, schedule=schedule, block="native")
    if backward:
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def peak(schedule: str, backward: bool) -> float:
    """Return the largest rank's peak beyond q, k, v and dout, in tensors as large as q's shard."""
    reports = VirtualCluster(P).run(program, schedule, backward).memory
    return max(report.peak_bytes for report in reports) / (H * S // P * D * 4) - (4 if backward else 3)


@pytest.mark.parametrize("schedule", PEAKS)
def test_peaks_are_those_of_the_table(schedule: str) -> None:
    for backward, expected in zip((False, True), PEAKS[schedule], strict=True):
        assert peak(schedule, backward) == pytest.approx(expected, abs=0.06)


def test_the_guide_says_so() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|[^|]+\| ([\d.]+) \| ([\d.]+) \|", GUIDE, re.MULTILINE)
    assert {name: (float(one), float(both)) for name, one, both in rows} == PEAKS
