"""The three labs on gloo processes write the right files, accept correct entrants, and report crashes."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ringlab.bench.contest import Sampled
from ringlab.cli import app
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.errors import LabError, RankFailedError, TransportTimeout
from ringlab.layout import layout_names
from ringlab_course.lab import l1, l2, l3
from ringlab_course.lab.l1 import gather_rows
from ringlab_course.lab.l2 import PERFECT
from ringlab_course.lab.report import report
from ringlab_course.lab.result import ResultFile, header, load
from ringlab_course.lab.start import Start, look, on_rank, run

pytestmark = pytest.mark.thorough

CHECKOUT = Path(__file__).resolve().parents[3]
L1 = l1.L1(messages=(64, 4096), tokens=(32, 16), H=2, K=1, D=16, rounds=2)
L2 = l2.L2(S=64, c=32, H=2, D=16, rounds=2)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of all labs, run one after another in the same two processes."""
    folder = tmp_path_factory.mktemp("labs")
    jobs = {
        "l1": ("l1", l1.cases, L1), "l2": ("l2", l2.cases, L2),
        **{name: ("l3", l3.cases, l3.L3(f"tests.course.lab.entrants:{name}", S=64, H=2, D=16, rounds=2))
           for name in ("right", "wrong")},
    }  # fmt: skip

    def program(ring: Ring) -> None:
        for name, (lab, cases, settings) in jobs.items():
            on_rank(ring, lab, cases, settings, Start(folder / f"{name}.json"))

    launch(program, 2, memory=False)
    return {name: load(folder / f"{name}.json") for name in jobs}


def test_a_result_says_of_itself_what_it_is(results: dict[str, dict[str, Any]]) -> None:
    for name, found in results.items():
        assert found["finished"] and found["ended_by"] == "", name
        assert found["label"] == "2 gloo processes on the CPU of 1 machine: no GPU took part"
        assert found["settings"]["rounds"] == 2 and found["settings"]["seed"] == 0
        assert [each["rank"] for each in found["ranks"]] == [0, 1]
        assert found["ranks"][0]["versions"]["torch"] == torch.__version__ == found["machine"]["torch"]
        assert all(each["ok"] for each in found["preflight"]) and len(found["preflight"]) == 7
        assert found["code"]["ringlab"]


def test_l1_adds_up(results: dict[str, dict[str, Any]]) -> None:
    cases = results["l1"]["cases"]
    assert [each["case"] for each in cases] == [
        "bandwidth",
        "bandwidth",
        "link",
        "overlap",
        "overlap",
        "threshold",
    ]
    for each in cases[:2]:
        assert each["median_s"] == statistics.median(each["times_s"]) and len(each["times_s"]) == 2
        assert each["bytes_per_s"] == pytest.approx(each["bytes"] / each["median_s"])
    for each in cases[3:5]:
        times = {name: each[f"{name}_s"] for name in ("compute", "exchange", "both")}
        hidden = (times["compute"] + times["exchange"] - times["both"]) / min(
            times["compute"], times["exchange"]
        )
        assert each["hidden"] == pytest.approx(hidden)
        assert each["flops_per_s"] == pytest.approx(4 * 2 * 16 * each["tokens"] ** 2 / times["compute"])
    longest = next(each for each in cases[3:5] if each["tokens"] == 32)
    assert cases[-1]["tokens"] > 0 and cases[-1]["flops_per_s"] == longest["flops_per_s"]


def test_l2_is_right_and_its_efficiency_is_that_of_its_times(results: dict[str, dict[str, Any]]) -> None:
    cases = results["l2"]["cases"]
    assert [(each["scaling"], each["P"], each["S"], each["pass"]) for each in cases] == [
        (scaling, 2, 64, of) for scaling in ("strong", "weak") for of in ("forward", "forward_backward")
    ]
    for each in cases:
        assert set(each["contenders"]) == set(layout_names()) and each["perfect_s"] > 0
        for one in each["contenders"].values():
            assert one["correct"] and one["median_s"] == statistics.median(one["times_s"])
            assert one["efficiency"] > 0
        assert PERFECT not in each["contenders"]


def test_l3_gates_by_correctness(results: dict[str, dict[str, Any]]) -> None:
    for name, correct in (("right", True), ("wrong", False)):
        for each in results[name]["cases"]:
            assert each["contenders"][f"tests.course.lab.entrants:{name}"]["correct"] is correct
            assert each["contenders"]["ringlab"]["correct"]
            assert each["case"] == "first call" or each["contenders"]["ringlab"]["score"] == 1.0


def test_rows_of_several_ranks_come_together_and_what_is_missing_is_nan() -> None:
    from ringlab import VirtualCluster

    rows = torch.arange(12.0).reshape(1, 4, 3)

    def program(ring: Ring) -> Sampled:
        numbers = [[0, 3], [1]][ring.rank]
        return gather_rows(
            ring, Sampled(numbers, {"out": rows[:, numbers]}, ring.rank == 0), 4, torch.device("cpu")
        )

    for found in VirtualCluster(2).run(program).results:
        assert torch.equal(found.rows["out"][:, [0, 1, 3]], rows[:, [0, 1, 3]].double())
        assert found.rows["out"][:, 2].isnan().all() and not found.finite


def _breaks(ring: Ring, settings: l1.L1, device: torch.device) -> Iterator[dict[str, Any]]:
    yield {"case": "link", "latency_s": 1e-6, "bytes_per_s": 1e9}
    if ring.rank == 1:
        raise RuntimeError("CUDA out of memory, say")
    ring.barrier()
    yield {"case": "never"}


def test_a_crash_leaves_the_results_so_far_and_says_what_ended_it(tmp_path: Path) -> None:
    path = tmp_path / "made" / "l1.json"
    with pytest.raises(RankFailedError, match="CUDA out of memory, say"):
        run("l1", _breaks, L1, Start(path, timeout=60.0))
    found = load(path)
    assert [each["case"] for each in found["cases"]] == ["link"]
    assert not found["finished"]
    assert found["ended_by"] == "rank 1 failed first: RuntimeError: CUDA out of memory, say"
    waited, broke = found["stacks"]["0"], found["stacks"]["1"]
    assert "in _breaks" in broke and "control:barrier" in waited


def test_a_contest_that_runs_out_of_memory_keeps_its_first_pass_and_the_cause(tmp_path: Path) -> None:
    path = tmp_path / "l3.json"
    settings = l3.L3("tests.course.lab.entrants:out_of_memory", S=32, H=1, D=8, rounds=1)
    with pytest.raises(RankFailedError):
        run("l3", l3.cases, settings, Start(path, timeout=60.0))
    found = load(path)
    assert [(each["case"], each["pass"]) for each in found["cases"]] == [
        ("first call", "forward"), ("contest", "forward"),
    ]  # fmt: skip
    assert found["ended_by"].startswith("rank 1 failed first: OutOfMemoryError: CUDA out of memory")


def _one_case(ring: Ring, settings: l1.L1, device: torch.device) -> Iterator[dict[str, Any]]:
    yield {"case": "link", "latency_s": 1e-6, "bytes_per_s": 1e9, "seed": settings.seed}


def test_what_is_there_stays_and_force_replaces_it_by_what_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "l1.json"
    start = Start(path, timeout=60.0)
    begun: list[Path] = []
    assert run("l1", _one_case, L1, start, begun.append) == path
    assert begun == [path]
    first = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()  # others may read and collect the file
    with pytest.raises(RankFailedError):
        run("l1", _breaks, L1, replace(start, force=True))
    assert path.read_text() == first and not load(tmp_path / "l1-2.json")["finished"]
    assert run("l1", _one_case, replace(L1, seed=3), start) == tmp_path / "l1-3.json"
    assert run("l1", _one_case, replace(L1, seed=5), replace(start, force=True)) == path
    assert load(path)["settings"]["seed"] == 5
    assert sorted(each.name for each in tmp_path.iterdir()) == ["l1-2.json", "l1-3.json", "l1.json"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_lab_that_does_not_begin_leaves_no_file_and_says_why_in_one_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="ranks that are ready: machines"):
        run("l1", _one_case, L1, Start(tmp_path / "l1.json", nodes=2, timeout=60.0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    ["l1 --dtype foo", "l1 --dtype int64", "l1 --lengths 0,16", "l1 --messages 0,64", "l1 --messages=-5,64", "l1 --kv-heads 3",
     "l1 --seed -1", "l1 --timeout inf", "l2 --dtype foo", "l2 --numbers 3", "l2 --layouts no-such-layout", "l2 --block nope",
     "l3 os:getcwd --tokens 64", "l3 nocolon --tokens 64", "l3 os:nothing", "l3 tests.course.lab.entrants:right --tokens 66 --ranks 4",
     "l3 tests.course.lab.entrants:right --layout no-such-layout", "l3 tests.course.lab.entrants:right --block nope", "l1 --transport smoke"],
)  # fmt: skip
def test_what_is_asked_wrongly_is_refused_before_any_rank_starts(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ringlab_course.lab import start

    if "smoke" not in words:  # `launch` itself refuses these words before it starts ranks
        monkeypatch.setattr(start, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["lab", *words.split()])
    assert done.exit_code == 1, done.output
    assert "needed: " in done.output and "Traceback" not in done.output
    assert isinstance(done.exception, SystemExit) and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "words", ["l1 --kv-heads 0", "l1 --kv-heads=-2", "l1 --messages 1,x", "l2 --rounds 0"]
)
def test_what_no_option_can_be_is_refused_by_the_command_line(words: str) -> None:
    assert CliRunner().invoke(app, ["lab", *words.split()]).exit_code == 2


def test_the_others_have_their_turn_where_an_entrant_dies_or_is_not_there(tmp_path: Path) -> None:
    names = [
        "tests.course.lab.entrants:dies",
        "nobody.at.all:ring",
        "tests.course.lab.entrants:right",
    ]
    options = [
        "--tokens",
        "64",
        "--heads",
        "1",
        "--head-dim",
        "8",
        "--rounds",
        "1",
        "--output",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, ["lab", "l3", *names, *options])
    assert done.exit_code == 1
    files = {file.name: load(file) for file in tmp_path.glob("*.json")}
    assert len(files) == 2 and files["tests.course.lab.entrants-right.json"]["finished"]
    assert "an entrant nobody.at.all:ring" in " ".join(done.output.split())
    dead = files["tests.course.lab.entrants-dies.json"]
    assert not dead["cases"] and dead["ended_by"].startswith("rank 1 failed first: its process ended")


def test_a_lab_under_torchrun_writes_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lab = ["-m", "ringlab", "lab", "l1", "--messages", "64,4096", "--lengths", "16,32", "--rounds", "1",
           "--nodes", "1", "--output", str(tmp_path / "l1.json")]  # fmt: skip
    done = subprocess.run([*command, *lab], capture_output=True, text=True, timeout=300, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    assert load(tmp_path / "l1.json")["finished"]
    assert done.stdout.count("no GPU took part") == 1


def ended_on_three_ranks(entrant: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Return the results of an entrant that fails or hangs on three ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    lab = ["-m", "ringlab", "lab", "l3", f"tests.course.lab.entrants:{entrant}", "--tokens", "66", "--heads", "1",
           "--head-dim", "8", "--rounds", "1", "--output", str(tmp_path), *options]  # fmt: skip
    done = subprocess.run([*command, *lab], capture_output=True, text=True, timeout=300, cwd=CHECKOUT)
    assert done.returncode != 0
    found = load(tmp_path / f"tests.course.lab.entrants-{entrant.replace('_', '-')}.json")
    assert not found["finished"] and set(found["stacks"]) == {"0", "1", "2"}
    page, _ = report({tmp_path / "l3.json": found})
    assert all(f"Rank {rank}" in page for rank in range(3)) and "entrants.py" in page
    return found


@pytest.mark.parametrize(
    ("entrant", "dead", "how"),
    [
        ("dies", 1, "ended with status 3"),
        ("killed", 1, "was killed by SIGKILL"),
        ("leader_killed", 0, "was killed by SIGKILL"),  # another rank writes
        ("killed_beside_a_hang", 1, "was killed by SIGKILL"),  # rank 0 waits, and no signal ends it
    ],
)
def test_under_torchrun_the_rank_that_died_first_is_named(
    entrant: str, dead: int, how: str, tmp_path: Path
) -> None:
    """The result names the first rank that died, how it died if that is still known, and where others were."""
    found = ended_on_three_ranks(entrant, tmp_path)
    assert re.fullmatch(
        rf"rank {dead} failed first: its process \d+ on .* ({how}|is gone), and it left no reason",
        found["ended_by"],
    ), found["ended_by"]
    stacks = found["stacks"]
    assert stacks.pop(str(dead)).startswith("no stack: its process")
    for rank, stack in stacks.items():
        assert f"of rank {rank} (" in stack.splitlines()[0], (
            "the first line names the exchange at which the rank is"
        )
        # A slow rank may still be in ringlab's ring, which runs before the entrant.
        assert f"in {entrant}" in stack or "in compete" in stack, stack


@pytest.mark.parametrize(
    ("rank", "stage", "said"),
    [
        (1, "unannounced", "a signal to end, before rank 1 had begun: see torchrun's output"),
        (0, "connecting", r"rank 0 failed first: its process \d+ on .* (was killed by SIGKILL|is gone)"),
    ],
)
def test_a_rank_that_is_killed_before_all_have_connected_is_named(
    rank: int, stage: str, said: str, tmp_path: Path
) -> None:
    """The other ranks wait in a call that no signal interrupts, but name the dead rank and the place of their wait."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    lab = ["-m", "tests.course.lab.killed_early", str(rank), stage, "lab", "l1", "--messages", "64,128", "--lengths", "16,32",
           "--rounds", "1", "--output", str(tmp_path / "l1.json")]  # fmt: skip
    done = subprocess.run([*command, *lab], capture_output=True, text=True, timeout=300, cwd=CHECKOUT)
    assert done.returncode != 0
    found = load(tmp_path / "l1.json")
    assert re.match(said, found["ended_by"]), (found["ended_by"], done.stderr)
    assert not found["finished"] and not found["cases"]
    stacks = found["stacks"]
    assert stacks.pop(str(rank)).startswith(("no stack: its process", "not begun"))
    assert len(stacks) == 2 and all("connect.py" in stack for stack in stacks.values()), stacks
    page, _ = report({tmp_path / "l1.json": found})
    assert "ended before all ranks had connected" in page


def test_under_torchrun_the_rank_that_hangs_is_named_after_the_time_of_a_message(tmp_path: Path) -> None:
    found = ended_on_three_ranks("hangs", tmp_path, "--message-timeout", "3")
    assert re.search("failed first: TransportTimeout: .*rank 2 to (send|take) 'shift'", found["ended_by"])
    waiting, sleeping = (found["stacks"][rank] for rank in "02")
    assert "time.sleep(0.1)" in sleeping and "in hangs" in sleeping and "shift" not in sleeping
    assert "waiting for exchange" in waiting.splitlines()[0] and "return ring.shift(q)" in waiting


def test_a_lab_that_takes_longer_than_its_time_ends_and_says_where(tmp_path: Path) -> None:
    found = ended_on_three_ranks("hangs", tmp_path, "--timeout", "4", "--message-timeout", "4")
    assert re.search("the lab took longer than --timeout|TransportTimeout: .*rank 2", found["ended_by"])


def test_the_signal_by_which_torchrun_ends_a_rank_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(program: Any, start: Start, *args: Any, witness: Any) -> None:
        ResultFile(
            args[-1].output, header("l1", {}, [{"device": "cpu", "host": "here", "kind": "cpu"}], "gloo")
        ).write()
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("ringlab_course.lab.start._on_all", cut_short)
    monkeypatch.setattr("ringlab_course.lab.witness.torchrun_store", lambda startup: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(LabError, match="a signal to end, while no rank had failed"):
        run("l1", l1.cases, L1, Start(tmp_path / "l1.json"))
    assert load(tmp_path / "l1.json")["ended_by"].startswith("a signal to end, while no rank had failed")
    assert signal.getsignal(signal.SIGTERM) is before


def test_ranks_that_do_not_come_are_named_long_before_the_lab_would_be_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_torchrun = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    for name, value in of_torchrun.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransportTimeout, match="within 3 s\n.*no word from ranks 1, 2 of 3"):
        # Within 3 s a rank reaches the store even on a busy machine, so the missing ranks are the reason.
        look(L1, Start(Path("l1.json"), timeout=3600.0, connect=3.0))


def test_preflight_on_the_command_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["lab", "preflight", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["ok"] and len(said["ranks"]) == 2 and len(said["findings"]) == 7
    done = CliRunner().invoke(app, ["lab", "preflight", "--nodes", "2", "--json"])
    assert done.exit_code == 1 and not json.loads(done.stdout)["ok"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: l1.L1(messages=(64,)),
        lambda: l1.L1(H=3, K=2),
        lambda: l2.L2(layouts=("no-such-layout",)),
        lambda: l2.L2(rounds=0),
        lambda: l2.L2(ranks=(4,)).numbers(2),
        lambda: l2.L2(ranks=(1,)).numbers(2),
    ],
)
def test_what_cannot_be_measured_is_refused(make: Any) -> None:
    with pytest.raises(LabError):
        make()


def test_the_numbers_of_ranks_are_powers_of_two_and_all() -> None:
    assert l2.L2().numbers(6) == (2, 4, 6) and l2.L2().numbers(8) == (2, 4, 8)
    assert l2.L2(ranks=(3,)).numbers(4) == (3,)
