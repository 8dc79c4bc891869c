"""The memory meter: live bytes, peak and largest, per rank."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch

from ringlab import VirtualCluster
from ringlab.comm.memory import MemoryMeter
from ringlab.comm.virtual.turns import _Job


def test_views_and_in_place_results_are_no_new_memory() -> None:
    meter, given = MemoryMeter(), torch.ones(1000)
    with meter.watch():
        view = given[:10]
        view.add_(1)
        given.mul_(2)
    assert (meter.peak_bytes, meter.live_bytes) == (0, 0)


def test_a_view_keeps_its_memory_alive() -> None:
    meter = MemoryMeter()
    with meter.watch():
        whole = torch.ones(1000)
        part = whole[:10]
        del whole
        assert meter.live_bytes == 4000
        del part
        assert meter.live_bytes == 0
    assert (meter.peak_bytes, meter.largest_bytes) == (4000, 4000)


def test_the_peak_is_of_what_lives_at_once() -> None:
    meter = MemoryMeter()
    with meter.watch():
        for _ in range(5):
            torch.ones(100)
        a, b = torch.ones(100), torch.ones(200)
        del a, b
    assert (meter.peak_bytes, meter.largest_bytes, meter.live_bytes) == (1200, 800, 0)


def test_gradients_count() -> None:
    meter = MemoryMeter()
    with meter.watch():
        x = torch.ones(1000, requires_grad=True)
        (x * 2).sum().backward()
    assert x.grad is not None and meter.live_bytes >= 8000


def test_each_rank_is_accounted_on_its_own() -> None:
    def program(ring):
        mine = torch.ones(100 * (ring.rank + 1))
        ring.compute("square", lambda: mine * mine)
        return None

    reports = VirtualCluster(3).run(program).memory
    assert [r.largest_bytes for r in reports] == [400, 800, 1200]
    assert [r.peak_bytes for r in reports] == [800, 1600, 2400]
    assert [r.rank for r in reports] == [0, 1, 2]


def test_a_materialised_score_matrix_is_seen() -> None:
    """The mutant that the meter exists for: S × S numbers where the ring needs far fewer."""

    def program(ring, q):
        return (q @ q.mT).softmax(-1) @ q

    report = VirtualCluster(1).run(program, torch.randn(1, 1, 256, 16)).memory[0]
    assert report.largest_bytes == 256 * 256 * 4


def test_a_computation_that_is_over_holds_no_tensors() -> None:
    """Neither what went in nor, once its rank has it, what came out: a worker may be slow to go to its next one."""
    given, held = torch.ones(3), []
    seen = weakref.ref(given)
    job = _Job(lambda given=given: given + 1)
    del given
    job._done = SimpleNamespace(release=lambda: held.append(seen() is not None), acquire=lambda: True)
    job.run()
    assert held == [False]
    result = weakref.ref(job.result())
    assert result() is None
