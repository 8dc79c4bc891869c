"""The command line accepts all commands of the run sheets, scripts start them, and recorded runs exist."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer

from ringlab.bench.contest import PASSES, WARM_UP
from ringlab.bench.problem import Problem
from ringlab.cli import app
from ringlab_course.lab.l1 import L1, Queued
from ringlab_course.lab.l2 import L2
from ringlab_course.lab.l3 import L3
from ringlab_course.lab.report import report
from ringlab_course.lab.result import load_all
from tools.slides import deck

CHECKOUT = Path(__file__).resolve().parents[3]
SHEET = (CHECKOUT / "docs/labs.md").read_text(encoding="utf-8")


def commands(page: str) -> list[str]:
    """Return the lines of all blocks of shell commands of a page."""
    return [
        line for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()
    ]


LINES = [line for line in commands(SHEET) if not line.startswith("cp ")]
PROFILES = {
    name: [
        line for line in commands((CHECKOUT / name).read_text(encoding="utf-8")) if "nsys profile " in line
    ]
    for name in ("docs/labs.md", "docs/guide/processes.md")
}


def read_by_the_command_line(words: list[str]) -> None:
    """Parse the words after `ringlab` with typer, which raises an error for a wrong word."""
    command: Any = typer.main.get_command(app)
    arguments = words[words.index("ringlab") + 1 :]
    while hasattr(command, "get_command"):
        name, *arguments = arguments
        command = command.get_command(None, name)
        assert command is not None, f"no command {name}"
    command.make_context(command.name, arguments)


@pytest.mark.parametrize("line", LINES)
def test_each_line_can_be_typed(line: str) -> None:
    words = shlex.split(line)
    if "--wrap" in words:  # an option of sbatch: the job's command as one word
        words = shlex.split(words[words.index("--wrap") + 1])
    script = next((n for n, word in enumerate(words) if word.endswith(".sh")), None)
    if script is not None:
        assert (CHECKOUT / words[script]).exists()
        given = words[script + 1 :] if words[script].endswith("slurm.sh") else words[script + 2 :]
        words = ["ringlab", "lab", *given]
    read_by_the_command_line(words)


def test_every_slide_has_a_picture_and_its_commands_can_be_typed() -> None:
    page = (CHECKOUT / "tools/slides.md").read_text(encoding="utf-8")
    slides = deck(page).split("<section>")[1:]
    assert len(slides) > 10 and all("<svg" in slide for slide in slides)
    for line in re.findall(r"`(ringlab .+)`", page):
        read_by_the_command_line(shlex.split(line))
    with pytest.raises(KeyError):
        deck(page.replace("![ring]", "![rings]"))


def test_the_minutes_of_slides_and_sheet_add_up_to_90_for_each_lab() -> None:
    slides = Counter[str]()
    for lab, minutes in re.findall(
        r"^# (L\d): .+, (\d+) minutes$", (CHECKOUT / "tools/slides.md").read_text(), re.M
    ):
        slides[lab] += int(minutes)
    assert slides == {"L1": 90, "L2": 90, "L3": 90}
    for part in re.split(r"^## (?=L\d: )", SHEET, flags=re.M)[1:]:
        assert sum(map(int, re.findall(r"^\| (\d+) \|", part, re.M))) == 90, part[:2]


def gpu_seconds(settings: L2, P: int, flops_per_s: float) -> float:
    """Return the seconds that the calls of L2 take on `P` GPUs with this rate, if only computation takes time."""
    total = 0.0
    for p in settings.numbers(P):
        for S in (settings.S, settings.c * p):
            problem = Problem(settings.H, S, settings.D, True, settings.dtype)
            whole = sum(map(problem.flops, PASSES)) / flops_per_s
            share = sum((2 * p - 1) / p if name == "contiguous" else 1.0 for name in settings.layouts) / p
            # A ring has one more untimed call than the perfect split.
            total += whole * ((settings.rounds + WARM_UP + 1) * share + settings.rounds + WARM_UP)
    return total


def test_the_sheet_says_how_long_the_calls_of_l2_take_on_gpus() -> None:
    said = re.findall(r"L2 on (\d) GPUs, (.+?) tokens: (\d+) s", SHEET)
    assert [(P, S) for P, S, _ in said] == [("8", "131,072"), ("4", "65,536")]
    for P, S, seconds in said:
        settings = L2(S=int(S.replace(",", "")), c=16384, H=16, D=128, dtype="bfloat16")
        assert int(seconds) == pytest.approx(gpu_seconds(settings, int(P), 4e14), abs=1), "at 400 TFLOP/s"


def test_the_sheet_says_that_the_calls_of_l1_and_l3_are_short_on_gpus() -> None:
    assert (
        "L1 for groups of 2, over links of 50 GB/s: under 2 s. ringlab's own calls in L3: under half" in SHEET
    )
    words = next(shlex.split(line) for line in LINES if line.startswith("docs/labs/groups.sh 2 l1"))
    messages, lengths = (
        [*map(int, words[words.index(name) + 1].split(","))] for name in ("--messages", "--lengths")
    )
    l1 = L1(tuple(messages), tuple(lengths), H=16, K=16, D=128, dtype="bfloat16")
    blocks = sum(4 * l1.H * l1.D * c**2 / 4e14 for c in l1.tokens)
    sent = (
        sum(l1.messages) + 2 * sum(4 * l1.K * l1.D * c for c in l1.tokens)
    ) / 5e10  # alone, and with blocks
    assert (l1.rounds + 2) * Queued.CALLS * (2 * blocks + sent) < 2
    problem, l3 = Problem(16, 65536, 128, True, "bfloat16"), L3("a:b", S=65536, H=16, D=128, dtype="bfloat16")
    assert (l3.rounds + WARM_UP + 1) * sum(map(problem.flops, PASSES)) / 8 / 4e14 < 0.5


def test_a_wrong_line_would_be_found() -> None:
    with pytest.raises(Exception, match="no-such-option|No such option"):
        read_by_the_command_line(["ringlab", "lab", "l1", "--no-such-option"])


def check_profile(line: str) -> None:
    """Check a command of Nsight Systems, whose user guide wants "=" after a long option.

    One nsys follows the processes that it starts. If each rank has an nsys of its own, each needs a file of its own.
    """
    words = shlex.split(line.split("nsys profile ")[1], comments=True)
    options = list(takewhile(lambda word: word.startswith("-"), words))
    program = words[len(options)]
    assert all("=" in option for option in options), f"no = in {options}"
    said = dict(option.split("=", 1) for option in options)
    assert said.keys() == {"--trace", "--output"}
    assert {"cuda", "nvtx"} <= set(said["--trace"].split(",")) <= {"cuda", "nvtx", "osrt"}
    of_its_own = "%q{RANK}" in said["--output"]
    assert of_its_own == (program == "python") and program in ("python", "torchrun"), "a file for each nsys"


@pytest.mark.parametrize("page", PROFILES)
def test_a_page_on_streams_has_commands_that_profile_them(page: str) -> None:
    assert PROFILES[page]
    for line in PROFILES[page]:
        check_profile(line)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--trace cuda,nvtx --output=ring-%q{RANK} python", "no ="),
        ("--trace=cuda,nvtx --output=ring python", "a file for each"),
        ("--trace=nvtx --output=ring-%q{RANK} python", "cuda"),
    ],
)
def test_a_wrong_profile_is_noticed(options: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_profile(f"nsys profile {options} ring.py")


def test_the_sheet_says_how_much_memory_l2_takes() -> None:
    said = re.search(r"which takes about (\d+) GiB at these sizes", SHEET)
    line = next(line for line in LINES if " lab l2 --transport nccl" in line)
    size = {name: int(number) for name, number in re.findall(r"--([a-z-]+) (\d+)", line)}
    settings = L2(S=size["tokens"], c=size["per-rank"], H=size["heads"], D=size["head-dim"])
    assert said and int(said[1]) == pytest.approx(settings.needed_bytes(8) / 2**30, rel=0.05)


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """Make stand-ins for srun, scontrol, torchrun and ssh that record how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {
        "srun": 'while [[ $1 == --* ]]; do echo "$1" >> "$CALLS.srun"; shift; done; exec "$@"',
        "scontrol": "printf 'node0\\nnode1\\n'",
        "torchrun": 'printf "%s\\n" "$*" >> "$CALLS"',
        "ssh": 'while [ "$1" = -o ]; do shift 2; done; host=$1; shift; echo "ssh $host" >> "$CALLS"; exec bash -c "$*"',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}


def test_the_slurm_script_starts_every_gpu_of_every_node(tools: dict[str, str], tmp_path: Path) -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "96",
    }
    script = CHECKOUT / "docs/labs/slurm.sh"
    subprocess.run(
        ["bash", str(script), "l2", "--tokens", "4096"], env={**tools, **job}, cwd=tmp_path, check=True
    )
    (called,) = Path(tools["CALLS"]).read_text().splitlines()
    assert "--nnodes 2 --nproc-per-node gpu" in called and "--rdzv-endpoint node0:29507" in called
    assert "--rdzv-conf join_timeout=120,timeout=120" in called
    words = shlex.split(called)
    read_by_the_command_line(words)
    assert words[words.index("--output") + 1] == "results/l2-7.json" and "4096" in words
    hours, minutes, seconds = map(int, re.findall(r"--time=(\d+):(\d+):(\d+)", script.read_text())[0])
    of_job = 3600 * hours + 60 * minutes + seconds
    assert int(words[words.index("--timeout") + 1]) < of_job, (
        "SLURM would end the lab before it says where it was"
    )
    # Otherwise SLURM would give all ranks of a node one CPU.
    assert {"--cpus-per-task=96", "--cpu-bind=none"} <= set(
        Path(tools["CALLS"] + ".srun").read_text().split()
    )


def test_the_ssh_script_starts_each_machine_with_its_number(tools: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    script = CHECKOUT / "docs/labs/ssh.sh"
    subprocess.run(["bash", str(script), "node0 node1", "l1"], env=tools, cwd=folder, check=True)
    called = Path(tools["CALLS"]).read_text().splitlines()
    assert {"ssh node0", "ssh node1"} <= set(called)
    ranks = sorted(re.search(r"--node-rank (\d)", line)[1] for line in called if "node-rank" in line)  # type: ignore[index]
    assert ranks == ["0", "1"]
    assert all(
        "--master-addr node0" in line and "--rdzv-conf timeout=120" in line
        for line in called
        if "node-rank" in line
    )


def by_ssh(tools: dict[str, str], folder: Path, **changed: str) -> subprocess.CompletedProcess[str]:
    script = CHECKOUT / "docs/labs/ssh.sh"
    command = ["bash", str(script), "node0 node1", "l1"]
    return subprocess.run(
        command, env={**tools, **changed}, cwd=folder, capture_output=True, text=True, timeout=50
    )


def test_a_machine_that_does_not_answer_is_named_and_nothing_is_started(
    tools: dict[str, str], tmp_path: Path
) -> None:
    ssh = Path(tools["PATH"].split(":")[0]) / "ssh"
    ssh.write_text(ssh.read_text().replace("shift; echo", 'shift; [ "$host" != node1 ] || exit 255; echo'))
    done = by_ssh(tools, tmp_path)
    assert done.returncode == 1 and "not ready: node1: " in done.stderr
    assert "torchrun" not in Path(tools["CALLS"]).read_text()


@pytest.fixture
def taken() -> Iterator[int]:
    """Yield a port of this machine at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_named_with_the_way_out_and_nothing_is_started(
    tools: dict[str, str], tmp_path: Path, taken: int
) -> None:
    done = by_ssh(tools, tmp_path, RINGLAB_PORT=str(taken))
    assert done.returncode == 1 and f"port {taken} of node0 is taken" in done.stderr
    assert f"RINGLAB_PORT={taken + 1}" in done.stderr
    assert "torchrun" not in Path(tools["CALLS"]).read_text()


def test_a_job_passes_over_a_taken_port(tools: dict[str, str], tmp_path: Path) -> None:
    job = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    script = CHECKOUT / "docs/labs/slurm.sh"
    for number in range(7, 1000):  # the first whose port is free here
        with suppress(OSError), socket.create_server(("127.0.0.1", 29500 + number)):
            environment = {**tools, **job, "SLURM_JOB_ID": str(number)}
            subprocess.run(["bash", str(script), "preflight"], env=environment, cwd=tmp_path, check=True)
            break
    called = Path(tools["CALLS"]).read_text()
    assert "--rdzv-endpoint node0:" in called and f"--rdzv-endpoint node0:{29500 + number} " not in called


def test_a_machine_that_fails_ends_the_others(tools: dict[str, str], tmp_path: Path) -> None:
    torchrun = Path(tools["PATH"].split(":")[0]) / "torchrun"
    torchrun.write_text("""#!/bin/bash
case "$*" in *"--node-rank 1"*) until grep -q waits "$CALLS"; do sleep 0.05; done; exit 7 ;; esac
trap 'kill $!; echo ended >> "$CALLS"; exit 1' TERM
sleep 40 & echo waits >> "$CALLS"; wait
""")
    done = by_ssh(tools, tmp_path)
    assert done.returncode == 7 and "node1: ended with status 7; the others are ended" in done.stderr
    deadline = time.monotonic() + 20
    while "ended" not in (said := Path(tools["CALLS"]).read_text().splitlines()):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


def test_a_node_without_the_environment_is_named(tools: dict[str, str], tmp_path: Path) -> None:
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "96",
    }
    folder = tools["PATH"].split(":")[0]
    (Path(folder) / "torchrun").unlink()
    bare = {**tools, **job, "PATH": f"{folder}:/usr/bin:/bin"}
    command = ["bash", str(CHECKOUT / "docs/labs/slurm.sh"), "preflight"]
    done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (
        done.returncode == 1 and "no torchrun on PATH" in done.stderr and not (tmp_path / "results").exists()
    )


def in_groups(folder: Path, *words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(CHECKOUT / "docs/labs/groups.sh"), *words]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an active environment, which the sheet asks for
    environment = {**os.environ, "PATH": path, "RINGLAB_TRANSPORT": "gloo", "RINGLAB_GPUS": "4", **changed}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


def test_groups_measure_at_once_each_on_its_own_gpus_and_files(tmp_path: Path) -> None:
    small = ("--messages", "4096,65536", "--lengths", "32,64", "--heads", "2", "--rounds", "2")
    done = in_groups(tmp_path, "2", "l1", *small)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["results/group-1: 2 processes", "results/group-2: 2 processes"]
    found, others = load_all([tmp_path / "results"])
    assert sorted(path.parent.name for path in found) == ["group-1", "group-2"] and not others
    assert all(len(each["ranks"]) == 2 and each["finished"] for each in found.values())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("3", "l1", "--lenghts", "32"), "No such option: --lenghts"),
        (("3", "l1", "--lenghts", "32"), "groups of 3 leave 1 of 4 GPUs idle"),
        (("1", "l1"), "needed: groups of 2 GPUs or more"),
        (("l1", "2"), "got: groups of l1, 4 GPUs"),
        (("5", "l1"), "got: groups of 5, 4 GPUs"),
    ],
)
def test_a_group_that_fails_is_named_with_its_reason(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    done = in_groups(tmp_path, *words)
    assert done.returncode == 1 and says in done.stderr


def test_without_a_gpu_or_ringlab_the_groups_are_told_what_to_do(tmp_path: Path) -> None:
    done = in_groups(tmp_path, "2", "l1", RINGLAB_GPUS="", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "RINGLAB_TRANSPORT=gloo RINGLAB_GPUS=4" in done.stderr
    done = in_groups(tmp_path, "2", "l1", PATH="/usr/bin:/bin")
    assert done.returncode == 1 and "no ringlab on PATH: activate" in done.stderr


def test_groups_start_with_the_gpus_and_files_of_their_own(tools: dict[str, str], tmp_path: Path) -> None:
    """Each group of a run of L3 has its own GPUs and files, and a second run keeps the output of the first."""
    ringlab = Path(tools["PATH"].split(":")[0]) / "ringlab"
    ringlab.write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES $*" | tee -a "$CALLS"\n')
    ringlab.chmod(0o755)
    changed = {**tools, "RINGLAB_TRANSPORT": "nccl"}
    for _ in range(2):
        done = in_groups(tmp_path, "2", "l3", "a:b", "c:d", **changed)
    assert done.stdout.splitlines() == ["results/group-1: GPUs 0,1", "results/group-2: GPUs 2,3"]
    first = "0,1 lab l3 --transport nccl --ranks 2 --output results/group-1/l3 a:b c:d"
    assert sorted(Path(tools["CALLS"]).read_text().splitlines())[:2] == [first, first]
    assert (tmp_path / "results/group-1/l3.log").read_text().splitlines() == [first, first]


def test_the_recorded_runs_make_a_page() -> None:
    recorded, others = load_all([CHECKOUT / "benchmarks/results/lab"])
    assert not others
    assert {found["lab"] for found in recorded.values()} == {"l1", "l2", "l3"}
    assert all(found["finished"] and found["machine"]["processor"] for found in recorded.values())
    page, left_out = report(recorded)
    assert "Leaderboard" in page and not left_out
