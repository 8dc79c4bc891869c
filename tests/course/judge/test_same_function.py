"""One function of exercise 05: in the notebook, under the judge, in processes over gloo, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ringlab.comm.processes.launch import launch
from ringlab.layout import zigzag
from ringlab_course.checking.in_process import InProcessSubject
from ringlab_course.checking.loading import folder_of, load_stage
from ringlab_course.checking.ring_mistakes import CAUSAL, FORWARD
from ringlab_course.checking.shards import Shards, compare_ranks, shards
from ringlab_course.exercises.e05_emulated_ring import causal as e05_causal
from ringlab_course.judge.session import SandboxedSubject, Session

SUBMISSION = folder_of("05") / "right" / "shift.py"
P = 2
TORCHRUN = """
import sys, torch
from ringlab import connect
space = {}
exec(open(sys.argv[1]).read(), space)
function, per_rank, keywords = torch.load(sys.argv[2])
with connect("gloo") as ring:
    result = space[function](ring, *(argument[ring.rank] for argument in per_rank), **keywords)
    torch.save(result, f"{sys.argv[2]}.{ring.rank}")
"""


def case_of(stage: str) -> Shards:
    rng = np.random.default_rng(11)
    if stage == "05.forward":
        return shards(rng, [5] * P, 4, 2, 8)
    return e05_causal._case(rng, zigzag(11, P), 4, 2, 8)


def compared(case: Shards, results: list) -> list:
    """The results, each rank's within the bound that rounding allows of the float64 oracle."""
    compare_ranks(case, results, FORWARD if case.positions is None else CAUSAL)
    return results


def keywords(case: Shards) -> dict:
    return {} if case.positions is None else {"positions": case.positions}


def program(ring, source: str, function: str, shards: list, shared: dict):
    space: dict = {}
    exec(source, space)
    return space[function](ring, *(part[ring.rank] for part in shards), **shared)


def space() -> dict:
    found: dict = {}
    exec(SUBMISSION.read_text(), found)
    return found


@pytest.mark.parametrize("stage_id", ["05.forward", "05.causal"])
def test_in_this_process_and_in_processes_over_gloo(stage_id) -> None:
    stage, case = load_stage(stage_id), case_of(stage_id)
    shards = [case.qs, case.ks, case.vs]
    here = compared(case, case.run(InProcessSubject(stage, space())).results)
    outcome = launch(program, P, SUBMISSION.read_text(), stage.function, shards, keywords(case))
    there = compared(case, outcome.results)
    assert all(map(alike, here, there))


@pytest.mark.needs_bwrap
def test_in_the_judges_workers() -> None:
    stages = [load_stage("05.forward"), load_stage("05.causal")]
    names = [stage.function for stage in stages] + ["ring_step"]
    with Session([SUBMISSION.read_text()], names, torch=True, seconds=120, total_seconds=600) as session:
        for stage in stages:
            case = case_of(stage.id)
            judged = compared(case, case.run(SandboxedSubject(session, stage.function)).results)
            assert all(map(alike, judged, case.run(InProcessSubject(stage, space())).results))


def test_under_torchrun(tmp_path: Path) -> None:
    stage, case = load_stage("05.causal"), case_of("05.causal")
    given, script = tmp_path / "given.pt", tmp_path / "program.py"
    torch.save((stage.function, [case.qs, case.ks, case.vs], keywords(case)), given)
    script.write_text(TORCHRUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(P)]
    ended = subprocess.run(
        [*torchrun, str(script), str(SUBMISSION), str(given)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    results = compared(case, [torch.load(f"{given}.{rank}") for rank in range(P)])
    assert all(map(alike, results, case.run(InProcessSubject(stage, space())).results))


def alike(a: tuple, b: tuple) -> bool:
    """Whether two answers of a rank have the same bits."""
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
