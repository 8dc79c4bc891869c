"""Under torchrun, the processes are the ranks of `ringlab check`, and rank 0 reports for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringlab.conformance import check
from ringlab.conformance.run.run import RankResult, Run, Trouble
from ringlab.conformance.run.torchrun import rendezvous, watchdog
from ringlab.conformance.run.torchrun.lead import Source
from ringlab.conformance.run.troubles import returned_in
from ringlab.errors import TransportTimeout

CHECKOUT = Path(__file__).resolve().parents[2]
TARGETS = "tests.conformance.bad_targets"
GUARD = 400
"""Seconds after which a test gives up on torchrun: every run ends long before."""


def torchrun(processes: int, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return torchrun's exit status and rank 0's report, which is the only output of its processes."""
    status, out = run_under_torchrun(processes, "-m", "ringlab", "check", *arguments, "--json")
    return status, json.loads(out)


def run_under_torchrun(processes: int, *program: str) -> tuple[int, str]:
    """Return torchrun's exit status and the output of its processes, which must not be empty."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    command = [sys.executable, *launcher, *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(
        command, env=environment, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as agent:  # fmt: skip
        try:
            out, err = agent.communicate(timeout=GUARD)
        finally:
            agent.terminate()  # torchrun then ends its ranks; if killed, it would leave them running
    assert out, err
    return agent.returncode, out


def only(*names: str) -> Iterator[str]:
    for name in names:
        yield from ("--only", name)


def findings(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in report["checks"]}


def test_an_error_ends_the_job_where_a_shard_has_a_wrong_shape_but_not_where_a_rank_died() -> None:
    parts = [RankResult(), RankResult(trouble=Trouble("raised", "11 tokens")), None]
    run = Run(3, 24, "contiguous", False)
    assert returned_in(replace(run, fault="wrong shape"), parts) == ()
    assert returned_in(replace(run, fault="dies"), parts) == (0,)
    assert returned_in(replace(run, fault="wrong shape"), [RankResult(), None, RankResult()]) == (0, 2)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_right_ring_passes_on_numbers_of_ranks_up_to_those_of_torchrun() -> None:
    names = ("dq", "two rings", "rank stalls", "wrong shape", "rank dies")
    status, report = torchrun(
        4, "ringlab.conformance.plain_distributed:attend", *only(*names), "--ranks", "2,4,8"
    )
    found = findings(report)
    assert (status, report["ok"], report["transport"]) == (0, True, "gloo")
    assert "P = 2, 4;" in found["dq"]["evidence"]
    assert [name for name in names if not found[name]["applies"]] == ["rank dies"]
    assert "no rank is killed under torchrun" in found["rank dies"]["evidence"]
    assert "rank 1: ValueError: rank 1 owns 12 tokens, got 11" in found["wrong shape"]["evidence"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_wrong_ring_fails_the_same_checks_as_without_torchrun() -> None:
    names = ("forward", "dq", "gather", "strided")
    status, report = torchrun(2, f"{TARGETS}:gather_and_average", *only(*names), "--ranks", "2")
    alone = check(f"{TARGETS}:gather_and_average", only=names, ranks=(2,))
    assert status == 1
    assert [each["name"] for each in report["checks"] if not each["ok"]] == alone.failed
    assert len(alone.failed) > 1
    smallest = {each.name: each.counterexample for each in alone.findings}
    assert {name: each["counterexample"] for name, each in findings(report).items()} == smallest


@pytest.mark.thorough
@pytest.mark.slow
def test_each_trouble_of_one_rank_is_named_and_the_next_check_is_made() -> None:
    """Rank 1 lacks a package, returns None, dies, prints without end and hangs, and then passes a check."""
    says = {
        "types": "a package is missing: rank 1: No module named 'a_package_that_is_not_there'; rank 0: raised: ",
        "grouped heads": "wrong result: rank 1: a tensor, or a tuple that begins with one, is needed; got None",
        "large logits": "crashed: rank 1: the process ended with exit status 3; its last words: …last words",
        "scale": "printed without end: rank 1: more than 4 MiB in one run",
        "strided": "rank 1: the limit of 6 s for one run (--limit) was reached; rank 1 is in _hang (bad_targets.py, line ",
    }
    options = ("--quick", "--ranks", "2", "--no-backward", "--limit", "6")
    status, report = torchrun(2, f"{TARGETS}:attend", *only(*says, "layouts"), *options)
    told = {name: each["evidence"] for name, each in findings(report).items() if not each["ok"]}
    assert status == 1
    assert told.keys() == says.keys()
    for name, words in says.items():
        assert words in told[name]
    assert told["strided"].startswith("over the limit: ")


@pytest.mark.thorough
@pytest.mark.slow
def test_every_rank_that_raises_is_named() -> None:
    status, report = torchrun(
        4, f"{TARGETS}:raises_on_odd_ranks", *only("types"), "--ranks", "4", "--dtypes", "float32"
    )
    evidence = findings(report)["types"]["evidence"]
    assert status == 1
    assert evidence.startswith("raised: rank ")
    for rank in (1, 3):
        assert f"rank {rank}: ValueError: rank {rank} has no keys" in evidence


ONE_AFTER_THE_OTHER = """
import json, os, pathlib, sys
from typer.testing import CliRunner
from ringlab.cli import app

folder, commands = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
done = [CliRunner().invoke(app, ["check", *words, "--json"]) for words in commands]
told = [[each.exit_code, each.stdout] for each in done]
(folder / (os.environ["RANK"] + ".json")).write_text(json.dumps(told))
print("done")
"""
REFUSED = {
    "torchrun without --transport": ("ringlab.plain_ring:attend", "--transport", "gloo"),
    "run it without torchrun": ("tests.conformance.right_decodes:decode", "--kind", "decode"),
    "torchrun --nproc-per-node 3": ("ringlab.plain_ring:attend", "--ranks", "3"),
}


@pytest.mark.thorough
@pytest.mark.slow
def test_commands_one_after_the_other_end_all_ranks_with_the_status_of_rank_0(tmp_path: Path) -> None:
    """Three commands that cannot run under torchrun end with status 2. Then a ring passes, and on rank 0 a merge."""
    path = tmp_path / "report.md"
    ring = "ringlab.plain_ring:attend", *only("dq", "bytes", "two rings"), "--markdown", str(path)
    merge = "tests.conformance.test_merging:in_pairs", "--kind", "merge"
    commands = [*REFUSED.values(), ring, merge]
    program = tmp_path / "program.py"
    program.write_text(ONE_AFTER_THE_OTHER)
    status, _ = run_under_torchrun(2, str(program), str(tmp_path), json.dumps(commands))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert status == 0
    assert [code for code, _ in first] == [code for code, _ in second] == [2, 2, 2, 0, 0]
    assert not any(out for _, out in second)
    *refused, of_ring, of_merge = (json.loads(out) for _, out in first)
    for says, report in zip(REFUSED, refused, strict=True):
        assert not report["ok"] and says in " ".join(report["error"].values())
    found = findings(of_ring)
    assert (of_ring["over"], of_ring["transport"]) == ("ring", "gloo")
    assert found["bytes"]["applies"] and not found["two rings"]["applies"] and "| dq |" in path.read_text()
    assert (of_merge["ok"], of_merge["over"]) == (True, "one process")


def letters(session: int = 1) -> rendezvous.Rendezvous:
    return rendezvous.Rendezvous(dist.HashStore(), session)


def test_a_value_larger_than_the_store_takes_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_PIECE", 100)
    post, value = letters(), list(range(500))
    post.put("value", value)
    assert post.read("value", 1.0) == value
    post.forget("value")
    with pytest.raises(TransportTimeout, match="value within 0.1 s"):
        post.read("value", 0.1)


def test_a_rank_that_does_not_answer_costs_one_wait_only() -> None:
    """A rank that does not answer costs one wait, because the next run is not requested any more."""
    post, asked = letters(), list[Any]()

    def make(order: rendezvous.Order) -> None:
        post.put(f"part/{order.number}/0", (0, mail_part()))

    kept = SimpleNamespace(make=make, longest=lambda P: 0.2, spec=None)
    source = Source(SimpleNamespace(say=asked.append), kept, post)  # type: ignore[arg-type]
    runs = [Run(2, 24, "contiguous", False), Run(2, 48, "contiguous", False)]
    troubles = [str(ran.trouble) for ran in source.made(runs)]
    assert troubles == [
        "lost: rank 1: the process of rank 1 does not answer",
        "lost: the process of rank 1 does not answer",
    ]
    assert len(asked) == 1


def mail_part() -> Any:
    from ringlab.conformance.run.run import RankResult

    return RankResult()


def test_a_rank_without_a_gpu_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    second, third = (rendezvous.World(rank, 4, rank, 4) for rank in (1, 2))
    assert watchdog._lack(second, "cuda") == "" == watchdog._lack(third, "cpu")
    assert watchdog._lack(third, "cuda") == "rank 2: LOCAL_RANK 2, and 2 GPUs"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # under SLURM, a rank sees only its own GPU
    assert watchdog._lack(third, "cuda") == ""


def test_a_world_of_fewer_ranks_is_seen_in_the_environment() -> None:
    """The environment of a smaller world counts only its ranks: of three, one is on the second machine."""
    from ringlab.conformance.run.torchrun.rank import Seat

    seat = Seat(2, 3, "gloo", "cpu", "prefix", 0, 1.0)
    found = watchdog._surroundings(seat, rendezvous.World(2, 4, 0, 2))
    assert {name: found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert "GLOO_SOCKET_IFNAME" not in found or "GLOO_SOCKET_IFNAME" in os.environ


def test_without_torchrun_there_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun there are no ranks, even if a job script sets RANK and similar variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert rendezvous.world() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert rendezvous.world() == rendezvous.World(0, 0, 0, 0)
