"""Run every benchmark that needs no GPU, one after the other, and write the results into a folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ringlab.bench.answers import CALL

BENCHES = {
    "emulate-cpu.json": "bench emulate",
    "processes-cpu.json": "bench processes",
    "peers/float32.json": "bench peers",
    "peers/bfloat16.json": "bench peers --dtype bfloat16",
    "calibrate/two-processes.json": "calibrate --tokens 4096,5120,6144,7168,8192 --hardware {scratch}/this-machine.toml",
    "simulate/many-ranks.json": "bench simulator",
    "waiting/answers.json": "bench answers",
    "waiting/check.json": "bench check",
    "waiting/lessons.json": "bench lessons",
    "judge/throughput.json": "bench judge --numpy 200 --ring 60 --flat 500",
    "waiting/tests.json": "bench tests",
}
"""The command that writes each file. `make gpu` runs the benchmarks that need a GPU."""


def bench_all(
    output: Path, only: Sequence[str] = (), began: Callable[[str, str], None] = lambda file, command: None
) -> dict[str, str]:
    """Write the files of `BENCHES` into `output`, and return the error of each failed benchmark, by file.

    only: the files, or folders of files, to write; all files if empty.
    began: called with each file and its command before the command runs.
    A file is replaced only if its benchmark succeeded.
    """
    failed = {}
    for file, words in BENCHES.items():
        if only and not file.startswith(tuple(only)):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            new = Path(scratch) / "new.json"
            command = [*(word.format(scratch=scratch) for word in words.split()), "--output", str(new)]
            began(file, f"ringlab {words}")
            done = subprocess.run([sys.executable, "-c", CALL, *command], capture_output=True, text=True)
            if done.returncode or not new.exists():
                failed[file] = (done.stderr or done.stdout).strip()[-500:] or f"status {done.returncode}"
                continue
            (output / file).parent.mkdir(parents=True, exist_ok=True)
            (output / file).write_text(new.read_text(encoding="utf-8"), encoding="utf-8")
    return failed
