"""How much each rank computes: products counted in the notebook, the processor's time read by the judge."""

from __future__ import annotations

import os
import time

import pytest
import torch

from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import load_stage
from ringlab_course.judge.processes import cpu_seconds, precise_cpu_seconds
from ringlab_course.judge.session import SandboxedSubject, Session

SOURCE = """
import torch
def ring_forward(ring, x):
    (arrived,) = ring.shift(x)
    for _ in range(200 * ring.rank):
        y = ring.compute("product", torch.matmul, x, arrived)
    return arrived
"""


def shards() -> list[torch.Tensor]:
    return [torch.ones(1, 1, 128, 128)] * 3


def test_products_of_each_rank_are_counted_in_the_notebook() -> None:
    space: dict = {}
    exec(SOURCE.replace("200 *", ""), space)
    efforts = InProcessSubject(load_stage("18.forward"), space).efforts(3, shards())
    assert efforts == [0, 2 * 128**3, 2 * 2 * 128**3]


@pytest.mark.needs_bwrap
def test_the_processors_time_of_each_rank_is_read_from_outside() -> None:
    with Session([SOURCE.replace('ring.compute("product", torch.matmul, x, arrived)', "x @ arrived")], ["ring_forward"], torch=True) as session:  # fmt: skip
        subject = SandboxedSubject(session, "ring_forward")
        runs = [subject.efforts(3, shards()) for _ in range(4)][1:]
        # The least of each: the clock counts as the process's own what interrupts it, and what takes its processor away.
        idle, _, busy = map(min, zip(*runs, strict=True))
        assert 0 <= idle < busy / 2
        assert sum(run[2] for run in runs) < sum(worker.computed() for worker in session.workers(3))


def test_the_clocks_of_another_process_read_what_its_own_do() -> None:
    """The precise one is of the process alone, the coarse one, in ticks, also of its children that have ended."""
    own, tick = os.getpid(), 1 / os.sysconf("SC_CLK_TCK")
    before = time.process_time()
    told = precise_cpu_seconds([own])
    assert before <= told <= time.process_time()
    before = sum(os.times()[:4])
    told = cpu_seconds(own)
    assert before - 4 * tick <= told <= sum(os.times()[:4]) + 4 * tick


def test_the_precise_clock_is_0_for_who_is_gone() -> None:
    assert precise_cpu_seconds([2**22 + 1]) == 0.0
