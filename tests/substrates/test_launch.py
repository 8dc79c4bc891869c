"""`launch` gives the virtual cluster's results and errors that name ranks, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ringlab import VirtualCluster, launch
from ringlab.errors import (
    BackendError,
    CommError,
    RankFailedError,
    TransportTimeout,
    UnreceivedError,
    WorldSizeError,
)
from tests.substrates import programs

CHECKOUT = Path(__file__).resolve().parents[2]


def test_same_results_and_trace_as_the_virtual_cluster() -> None:
    scale = torch.linspace(-1, 1, 7)
    real, virtual = (
        launch(programs.many_exchanges, 3, scale),
        VirtualCluster(3).run(programs.many_exchanges, scale),
    )
    for rank in range(3):
        assert real.results[rank].keys() == virtual.results[rank].keys()
        for name, value in virtual.results[rank].items():
            torch.testing.assert_close(
                real.results[rank][name], value, rtol=0, atol=0, msg=f"{name}, rank {rank}"
            )
        assert facts(real.trace, rank) == facts(virtual.trace, rank)
        assert real.memory[rank] == virtual.memory[rank]
    assert [e.label for e in real.trace.computes()] == ["product"] * 3
    assert all(0 <= e.posted <= e.waited <= e.done < 120 for e in real.trace.exchanges(control=True))


def facts(trace, rank):
    """Return the exchanges of a rank without their times, in the order in which they were posted."""
    exchanges = sorted(trace.exchanges(rank, control=True), key=lambda e: e.index)
    return [(e.index, e.tag, e.to, e.source, e.bytes_sent, e.bytes_received, e.shapes) for e in exchanges]


def test_one_rank_threads_output_and_grad_mode(capfd: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        outcome = launch(programs.who_am_i, 1, threads=2, memory=False)
    [(rank, process, threads, grad)] = outcome.results
    assert (rank, threads, grad) == (0, 2, False)
    assert process != os.getpid()
    assert not alive(process)
    captured = capfd.readouterr()
    lines = captured.out.splitlines()
    assert [len(line) for line in lines] == [len("[rank 0] ") + n for n in (99, 200_000, 6)]
    assert lines[-1] == "[rank 0] I am 0"
    assert "[rank 0] no end of line\n" in captured.err


def test_the_first_failure_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankFailedError, match="rank 1 failed first") as caught:
        launch(programs.raise_on_rank_1, 3, timeout=20, memory=False)
    error = caught.value
    assert error.rank == 1
    assert sorted(error.errors) == [0, 1, 2]
    assert "in raise_on_rank_1" in error.errors[1]
    assert "ValueError: rank 1 gives up" in str(error)
    assert isinstance(error.__cause__, ValueError)
    for survivor in (0, 2):
        assert "PeerDiedError" in error.errors[survivor]
        assert "rank 1 failed first: ValueError: rank 1 gives up" in error.errors[survivor]


@pytest.mark.thorough
def test_a_program_that_does_not_end() -> None:
    with pytest.raises(TransportTimeout, match=r"on all 2 ranks within 6 s") as caught:
        launch(programs.sleep_on_rank_1, 2, timeout=6, memory=False)
    assert "rank 1 has not finished; last: completed exchange 0 'control:barrier'" in str(caught.value)
    assert "rank 0 has not finished" not in str(caught.value)


@pytest.mark.thorough
def test_a_result_that_cannot_travel_and_an_early_exit() -> None:
    with pytest.raises(RankFailedError, match="TypeError: cannot pickle"):
        launch(programs.result_that_cannot_travel, 2, timeout=20, memory=False)
    with pytest.raises(RankFailedError, match="its process ended with status 3 and no result"):
        launch(programs.exit_quietly, 2, timeout=20, memory=False)


def test_an_exchange_that_nobody_waits_for() -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(programs.forget_to_wait, 2, timeout=20, memory=False)
    assert isinstance(caught.value.__cause__, UnreceivedError)


def test_bad_arguments() -> None:
    for world_size in (0, -1, 2.0, None):
        with pytest.raises(WorldSizeError, match="1 or more"):
            launch(programs.who_am_i, world_size)
    with pytest.raises(BackendError, match="threads"):
        launch(programs.who_am_i, 1, threads=0)
    with pytest.raises(BackendError, match="timeout"):
        launch(programs.who_am_i, 1, timeout=0)
    with pytest.raises(BackendError, match="smoke"):
        launch(programs.who_am_i, 1, transport="smoke signals")
    with pytest.raises(CommError, match="cannot pickle"):
        launch(programs.who_am_i, 1, threading.Lock())


NOTEBOOK = """
import linecache, sys, torch
import ringlab
cell = '''
from helpers_beside_the_notebook import offset
def program(ring, x):
    if len(x) == 1: return 1 / 0  # in a cell
    return (ring.shift(x * ring.rank) + offset).sum().item()
'''
linecache.cache["cell-1"] = len(cell), None, cell.splitlines(True), "cell-1"  # as IPython does
exec(compile(cell, "cell-1", "exec"), sys.modules["__main__"].__dict__)
print(ringlab.launch(program, 2, torch.ones(3), memory=False).results)
try:
    ringlab.launch(program, 1, torch.ones(1), memory=False)
except ringlab.errors.RankFailedError as error:
    print(*[line.strip() for line in error.errors[0].splitlines()], sep="|")
"""


@pytest.mark.thorough
def test_functions_of_cells_and_scripts_without_a_guard(tmp_path: Path) -> None:
    folder = tmp_path / "my course"
    folder.mkdir()
    (folder / "notebook.py").write_text(NOTEBOOK)
    (folder / "helpers_beside_the_notebook.py").write_text("offset = 1.0\n")
    done = subprocess.run(
        [sys.executable, "notebook.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results, quoted = done.stdout.splitlines()
    assert results == "[6.0, 3.0]"
    assert '|File "cell-1", line 4, in program|if len(x) == 1: return 1 / 0  # in a cell|' in quoted
    assert quoted.endswith("|ZeroDivisionError: division by zero")


SLEEPERS = """
import os, signal, time
import ringlab
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
def program(ring):
    print("pid", os.getpid(), flush=True)
    time.sleep(120)
ringlab.launch(program, 2, memory=False)
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_orphan_and_no_folder_when_the_parent_is_interrupted_or_killed(how: str, tmp_path: Path) -> None:
    if how != "SIGINT" and sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS)
    folder = tmp_path / "temporary"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-u", str(script)],
        env=environment() | {"TMPDIR": str(folder)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        children = [int(parent.stdout.readline().split()[-1]) for _ in range(2)]
        assert all(map(alive, children))
        parent.send_signal(getattr(signal, how))
        parent.wait(timeout=90)
        deadline = time.monotonic() + 30
        while (any(map(alive, children)) or any(folder.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, children)) and [*folder.iterdir()] == []
        if how == "SIGINT":
            assert parent.stderr is not None
            assert "KeyboardInterrupt" in parent.stderr.read()


def alive(process: int) -> bool:
    """Return whether a process runs; a zombie, which only its new parent can reap, does not run."""
    if sys.platform == "linux":
        try:  # the process may be reaped at any moment
            stat = Path(f"/proc/{process}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"
    return subprocess.run(["ps", "-p", str(process)], capture_output=True).returncode == 0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(CHECKOUT)}
