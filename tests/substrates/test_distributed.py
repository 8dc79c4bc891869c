"""Over torch.distributed a mismatch is an error on all ranks, torchrun works, and the counted bytes are sent."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ringlab import connect, launch
from ringlab.comm.processes import wire_format
from ringlab.comm.processes.connect import closing
from ringlab.comm.processes.failure_board import Board, Journal, read_journal
from ringlab.comm.ring import Ring
from ringlab.errors import DeadlockError, MismatchError, RinglabError, WorldSizeError

CHECKOUT = Path(__file__).resolve().parents[2]

MISMATCHES = {
    "longer": (torch.zeros(8), torch.zeros(6)),
    "same bytes, other shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "same bytes, other dtype": (torch.zeros(4), torch.zeros(4, dtype=torch.int32)),
    "empty": (torch.zeros(0), torch.zeros(1)),
}


def mismatches(ring: Ring) -> dict[str, str]:
    """Make the two ranks disagree in many ways; return each error, and check that the ring works after it."""
    seen = {}

    def attempt(name: str, sent: tuple[torch.Tensor, ...], tag: str = "kv") -> None:
        try:
            ring.shift(*sent, tag=tag)
        except MismatchError as error:
            seen[name] = str(error)

    for name, pair in MISMATCHES.items():
        attempt(name, (pair[ring.rank],))
    k, v = torch.zeros(3), torch.zeros(5)
    attempt("K and V swapped", (k, v) if ring.rank else (v, k))
    attempt("one tensor more", (k, v) if ring.rank else (k,))
    attempt("tag", (k,), tag=f"tag of rank {ring.rank}")
    attempt("long tag", (k,), tag="x" * 600 + str(ring.rank))
    seen["after all that"] = str(ring.shift(torch.tensor(ring.rank)).item())
    return seen


def test_every_mismatch_is_an_error_on_both_ranks_and_nothing_breaks() -> None:
    for rank, seen in enumerate(launch(mismatches, 2, timeout=40, memory=False).results):
        names = [*MISMATCHES, "K and V swapped", "one tensor more", "tag", "long tag", "after all that"]
        assert list(seen) == names
        assert seen.pop("after all that") == str(1 - rank)
        for exchange, (name, message) in enumerate(seen.items()):
            assert f"which rank {1 - rank} sent" in message, name
            assert f"rank {rank} expects from rank {1 - rank} in its exchange {exchange}" in message
        assert f"'tag of rank {1 - rank}': float32[3], which" in seen["tag"]


def wrong_calls(ring: Ring) -> list[str]:
    """Return the errors of calls that no rank answers; none of the calls may hang."""
    mine = torch.ones(2)
    calls = (
        lambda: ring.comm.exchange(send=(mine,), to=1).wait(),
        lambda: ring.comm.exchange(send=(mine.to("meta"),), to=0).wait(),
        lambda: ring.shift(mine),
        lambda: ring.comm.exchange().wait(),
        lambda: ring.comm.exchange(receive=(torch.zeros(2),), source=0).wait(),
    )
    seen = []
    for call in calls:
        try:
            call()
            seen.append("fine")
        except RinglabError as error:
            seen.append(type(error).__name__)
    return seen


def test_wrong_calls_of_a_single_rank() -> None:
    [seen] = launch(wrong_calls, 1, timeout=20, memory=False).results
    assert seen == ["WorldSizeError", "DeviceError", "fine", "fine", DeadlockError.__name__]


TORCHRUN = """
import torch
from ringlab import connect
from ringlab.comm.ring import Ring
with connect(TRANSPORT, timeout=30) as ring:
    received = ring.shift(torch.tensor([float(ring.rank)])).item()
    total = ring.all_reduce(torch.tensor([1.0])).item()
with connect(TRANSPORT, timeout=30) as ring:  # a second time in the same process
    ring.barrier()
    print(f"rank {ring.rank} of {ring.world_size}: {received} {total}", flush=True)
    if FAIL and ring.rank == 1:
        raise ValueError("rank 1 gives up")
    ring.shift(torch.zeros(3))
"""


def torchrun(folder: Path, fail: bool, transport: str = "gloo") -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(f"FAIL, TRANSPORT = {fail}, {transport!r}\n" + TORCHRUN)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(program),
    ]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as agent:
        try:
            out, err = agent.communicate(timeout=300)
        finally:
            agent.terminate()  # torchrun then ends its ranks; if killed, it would leave them running
    return subprocess.CompletedProcess(command, agent.returncode, out, err)


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["gloo", "symmetric", "shared-gpu"])
def test_torchrun(tmp_path: Path, transport: str) -> None:
    done = torchrun(tmp_path, fail=False, transport=transport)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank \d of 2: \d\.\d \d\.\d", done.stdout)  # lines of ranks may be joined
    assert sorted(said) == ["rank 0 of 2: 1.0 2.0", "rank 1 of 2: 0.0 2.0"]


@pytest.mark.thorough
def test_torchrun_with_a_rank_that_fails(tmp_path: Path) -> None:
    done = torchrun(tmp_path, fail=True)
    assert done.returncode != 0
    assert "ringlab.errors.PeerDiedError: needed: rank 1 to" in done.stderr
    assert "rank 1 failed first: ValueError: rank 1 gives up" in done.stderr


def test_connect_outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(WorldSizeError, match="torchrun --nproc-per-node 2 program.py"), connect():
        pass


def test_numbers_on_the_wire() -> None:
    signature = wire_format.Signature.of("kv", [torch.zeros(2)])
    last = (1 << 16) - 1
    numbers = [wire_format.header_number(m) for m in (0, 1, last)]
    numbers += [signature.number(m, place) for m in (0, 1, last) for place in range(1000)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0
    assert max(numbers) < 1 << 31
    assert signature.number(last + 1, 0) == signature.number(0, 0)
    longer = wire_format.Signature.of("kv", [torch.zeros(3)])
    assert signature.number(0, 0) != longer.number(0, 0), (
        "with equal numbers gloo would pair the two messages"
    )


def test_journal_keeps_the_last_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for line in ("a long first line", "short", "x" * 1000):
        journal.write(line)
        assert read_journal(tmp_path / "journal") == line[:512]
    assert read_journal(tmp_path / "nothing") == ""


def test_the_board_keeps_the_first_failure() -> None:
    store = torch.distributed.HashStore()
    board, other = Board(store), Board(store)
    assert board.first_failure() is None
    assert not board.ended([0, 1])
    board.end(0)
    assert (other.ended([0]), other.ended([0, 1])) == (True, False)
    other.record(2, "ValueError: first")
    kept = board.record(1, "ValueError: second")
    assert str(kept) == str(other.why_gone(1)) == "rank 2 failed first: ValueError: first"
    blind = Board(None)
    assert (blind.first_failure(), blind.why_gone(0), blind.ended([0])) == (None, None, False)


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_group_of_nccl_is_aborted_after_a_failure(
    backend: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed NCCL group is aborted: destroying it would wait for kernels that wait for the failed rank."""
    left: list[str] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append("destroyed"))
    assert callable(dist.distributed_c10d._abort_process_group)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: left.append("aborted"))
    comm = SimpleNamespace(
        rank=0, world_size=1, board=Board(None), fail=lambda error: left.append(str(error)),
        finish=lambda: left.append("finished"), close=lambda: left.append("closed"),
    )  # fmt: skip
    with suppress(ValueError), closing(comm):
        if fails:
            raise ValueError("rank 0 gives up")
    aborted = "aborted" if fails and "nccl" in backend else "destroyed"
    assert left == ["rank 0 gives up" if fails else "finished", aborted, "closed"]
