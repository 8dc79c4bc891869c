"""The first hour on a machine with GPUs: its tests, benchmarks and labs, in the order of their value.

Each step is a command with a time limit and a log of its own. The result file is written whenever a step ends. A
later run leaves out the steps that have passed, unless ringlab or the machine has changed. A step that exceeded its
time limit gets at least twice as much time in the later run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ringlab.bench.device import NEEDED, machine, no_cuda, source
from ringlab.bench.draw import ceiling
from ringlab.checkout import find_checkout
from ringlab.cost.hardware import hardware, hardware_names
from ringlab.errors import DeviceError

PASSED, FAILED, LATE, ABSENT = "passed", "failed", "out of time", "not here"
_LAST_LINES = 12
_GRACE = 10.0  # seconds between asking a step to end and killing it


@dataclass(frozen=True)
class Step:
    """One command of the hour.

    words: the arguments of `python`; {out} is replaced by the file of the step's results, {logs} by the
    folder of this file, and {gpus} by the number of GPUs that the step takes. minutes: the time limit. gpus:
    the fewest GPUs that it needs. most: the most GPUs that it takes if the machine has them; None for all.
    wave: steps of the same wave run side by side if there are enough GPUs. optional: whether all its tests
    may be skipped, as for a library that is not installed. at_once: whether its tests run in several
    processes at once, which saves time if they mostly compile. Timings, and tests of several GPUs, must not share
    their GPUs with other tests.
    """

    name: str
    words: tuple[str, ...]
    minutes: float
    wave: int
    gpus: int = 1
    most: int | None = 1
    optional: bool = False
    at_once: bool = False

    def takes(self, gpus: int) -> int:
        """Return how many of a machine's `gpus` GPUs the step takes."""
        return gpus if self.most is None else min(self.most, gpus)

    @property
    def is_test(self) -> bool:
        """Return whether the command is pytest."""
        return "pytest" in self.words


def _tests(name: str, minutes: float, wave: int, *words: str, at_once: bool = True, **more: Any) -> Step:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/gpu", *words)
    return Step(name, words, minutes, wave, at_once=at_once, **more)


def _ringlab(name: str, minutes: float, wave: int, command: str) -> Step:
    return Step(name, ("-m", "ringlab", *command.split(), "--output", "{out}"), minutes, wave)


def _lab(name: str, minutes: float, command: str) -> Step:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{gpus}")
    common = "--transport nccl --dtype bfloat16 --heads 16 --head-dim 128 --rounds 7 --output {out}"
    # A checkout that is not installed has no command `ringlab lab`, so the module is run.
    words = (*torchrun, "-m", "ringlab_course.cli.lab", *command.split(), *common.split())
    return Step(name, words, minutes, wave=4, gpus=2, most=None)


_TABLE, _TRANSPORTS = "tests/gpu/test_case_table.py", "tests/gpu/test_transports.py"
_COMPILE = "tests/gpu/test_compile.py"
_MESSAGES = ",".join(str(2**power) for power in (12, 16, 20, 24, 28, 30))

STEPS = (
    # flex and flash-attn take long to compile, so their bits are compared in steps of their own.
    _tests("same bits", 2, 1, _TABLE, "-k", "cudnns_lse or same_bits and (triton or native or cudnn)"),
    _tests("triton bfloat16", 6, 1, _TABLE, "-k", "triton and bfloat16"),
    _tests("native", 3, 1, _TABLE, "-k", "native-"),
    _tests("cudnn", 3, 1, _TABLE, "-k", "cudnn-", optional=True),
    # Version 4 compiles each kernel at its first call.
    _tests("flash-4", 4, 1, _TABLE, "-k", "flash-4", optional=True),
    _tests("flash-3", 2, 1, _TABLE, "-k", "flash-3", optional=True),
    _tests("flash-2", 2, 1, _TABLE, "-k", "flash-2", optional=True),
    _tests("flex", 3, 1, _TABLE, "-k", "flex"),
    _tests("triton float16", 3, 1, _TABLE, "-k", "triton and float16 and not bfloat16"),
    _tests("triton float32", 4, 1, _TABLE, "-k", "triton and float32"),
    _tests("conformance suite", 3, 1, "tests/gpu/test_conformance_gpu.py"),
    _tests("one GPU", 3, 1, _TRANSPORTS, "-m", "not needs_two_gpus"),
    _tests("torch.compile", 3, 1, _COMPILE, "-m", "not needs_two_gpus"),
    _tests("clock", 1, 2, "tests/gpu/test_benches.py", at_once=False),
    _ringlab("kernels", 5, 2, "bench kernels --blocks triton,native,cudnn,flash,flex --rounds 15"),
    _ringlab("ring on one GPU", 4, 2, "bench ring --emulated 8 --blocks triton,native --rounds 9"),
    # Four ranks use every way of every schedule, and leave GPUs for the other steps of the wave.
    _tests("several GPUs", 6, 3, _TRANSPORTS, "-m", "needs_two_gpus", at_once=False, gpus=2, most=4),
    _tests("torch.compile on two", 6, 3, _COMPILE, "-m", "needs_two_gpus", at_once=False, gpus=2, most=2),
    # Not in the wave of the benchmarks, because it compiles on many cores and would slow them down.
    _ringlab("tune", 8, 3, "tune --short --table {logs}/tune.toml"),
    _lab("lab L2 triton", 3, "l2 --tokens 131072 --per-rank 16384 --layouts zigzag --block triton"),
    _lab("lab L1", 3, f"l1 --lengths 1024,2048,4096,8192 --messages {_MESSAGES}"),
    _lab("lab L2", 4, "l2 --tokens 131072 --per-rank 16384"),
)
"""Right results first, then speed. Steps that need the most GPUs come last."""


def minutes_for(gpus: int) -> float:
    """Return the time limit for all steps together, in minutes, on a machine with `gpus` GPUs."""
    return 30.0 if gpus >= 8 else 60.0


@dataclass(frozen=True)
class Row:
    """A measured value and the expected one.

    odd: whether a person should look at it, because it is far below what is expected, or above what the GPU
    can do.
    """

    name: str
    measured: float
    expected: float
    unit: str
    source: str
    least: float = 0.7
    most: float = 1.1

    @property
    def odd(self) -> bool:
        """Return whether the measured value is outside the expected range."""
        return not self.least * self.expected <= self.measured <= self.most * self.expected

    def __str__(self) -> str:
        mark = "  <- look at this" if self.odd else ""
        return f"{self.name}: {self.measured:.3g} {self.unit}, expected {self.expected:.3g} ({self.source}){mark}"


@dataclass(frozen=True)
class Published:
    """TFLOP/s of kernels on a GPU, by (pass, causal) and kernel, for head dim 128 and 16k tokens; and their source."""

    gpus: tuple[str, ...]
    source: str
    tflops: Mapping[tuple[str, bool], Mapping[str, float]]


_BEST = {"flash-4": 1613}
_PUBLISHED = (
    Published(
        ("H100", "H200", "H800"),
        "FlashAttention-3's paper, H100",
        {
            ("forward", False): {"flash-2": 370, "triton": 395, "cudnn": 595, "flash-3": 648},
            ("forward", True): {"flash-2": 335, "triton": 378, "cudnn": 539, "flash-3": 616},
            ("backward", False): {"flash-2": 322, "cudnn": 516, "flash-3": 561},
        },
    ),
    Published(
        ("B200",),
        "the best case in FlashAttention-4's abstract",
        {("forward", False): _BEST, ("forward", True): _BEST},
    ),
)
"""The figures of "triton" are those of Triton's own kernel. Those of the papers' other kernels stand in bar charts."""
_SAME_KERNEL = {"flash": "flash-2", "native": "flash-2"}
"""torch's own flash attention is version 2, as an operator of `scaled_dot_product_attention` and as a block."""
_EFFICIENCY = {"forward": 0.85, "forward_backward": 0.90}
_RING_PAPER = "ring-flash-attention's zig-zag ring on 8 H800, 8k tokens a GPU"


def expected(step: str, result: Mapping[str, Any], gpu: str, gpus: int) -> list[Row]:
    """Return the figures of a step's result with the expected ones, for the GPU that torch calls `gpu`.

    A figure without a published or computed counterpart is left out.
    """
    compare = {"kernels": _kernels, "ring on one GPU": _ring, "lab L1": _link}.get(step)
    if step.startswith("lab L2"):
        compare = _scaling
    return list(compare(result, gpu, gpus)) if compare else []


def _kernels(result: Mapping[str, Any], gpu: str, gpus: int) -> Iterator[Row]:
    roof = ceiling(gpu)
    published = next((each for each in _PUBLISHED if any(name in gpu for name in each.gpus)), None)
    for case in result["cases"]:
        kind = case["pass"], case["causal"]
        for name, found in case["contenders"].items():
            kernel = result.get("computed_by", {}).get(name, name)
            label = name if kernel in name else f"{name} ({kernel})"
            what = f"{label}, {kind[0]}, {'causal' if kind[1] else 'full'}"
            peak = "peak"
            if published:
                figure = published.tflops.get(kind, {}).get(_SAME_KERNEL.get(kernel, kernel))
                if figure:
                    yield Row(what, found["tflops"], figure, "TFLOP/s", published.source, most=2.0)
                else:
                    peak += "; no published figure known"
            if roof:
                yield Row(what, found["tflops"], roof.flops / 1e12, "TFLOP/s", peak, least=0.2, most=1.0)


def _ring(result: Mapping[str, Any], gpu: str, gpus: int) -> Iterator[Row]:
    for case in result["cases"]:
        for name, ratios in case["speed_ratio"].items():
            once = name.replace(" ring", " once")
            if once in ratios:
                what = f"{name} / {once}, {case['pass'].replace('_', ' + ')}"
                yield Row(what, ratios[once], 1.0, "as fast", "the same products", least=0.8)


def _link(result: Mapping[str, Any], gpu: str, gpus: int) -> Iterator[Row]:
    roof = ceiling(gpu)
    blocks = [case for case in result["cases"] if case["case"] == "overlap"]
    if roof and blocks:
        longest = max(blocks, key=lambda case: int(case["tokens"]))
        what = f"{longest['block']}, {longest['tokens']} tokens"
        yield Row(
            what, longest["flops_per_s"] / 1e12, roof.flops / 1e12, "TFLOP/s", "peak", least=0.2, most=1.0
        )
    named = [each for each in hardware_names() if re.search(rf"\b{each}\b", gpu.lower())]
    links = [case for case in result["cases"] if case["case"] == "bandwidth"]
    if not (named and links):
        return
    link = hardware(named[0]).inside
    largest = max(links, key=lambda case: int(case["bytes"]))
    what = f"{largest['bytes'] / 2**20:.0f} MiB to the next rank"
    yield Row(
        what, largest["bytes_per_s"] / 1e9, link.bytes_per_s / 1e9, "GB/s", f"{link.name}, one way", 0.5
    )


def _scaling(result: Mapping[str, Any], gpu: str, gpus: int) -> Iterator[Row]:
    for case in result["cases"]:
        if case["case"] == "scaling" and case["P"] == 8 and "zigzag" in case["contenders"]:
            what = f"zig-zag, {case['scaling']} scaling, {case['pass'].replace('_', ' + ')}"
            efficiency = case["contenders"]["zigzag"]["efficiency"]
            yield Row(
                what, efficiency, _EFFICIENCY[case["pass"]], "of a perfect split", _RING_PAPER, 0.85, 1.2
            )


def available(gpus: int) -> tuple[list[Step], list[Step]]:
    """Return the steps that a machine with `gpus` GPUs can run, and the others."""
    can = [step for step in STEPS if step.gpus <= gpus]
    return can, [step for step in STEPS if step not in can]


@dataclass
class Hour:
    """A run of the steps on this machine.

    file: the result file. logs: the folder of logs and of the steps' own results. minutes: the time limit
    for all steps. tell: a function that is called with the name and the entry of each step when the step
    ends.

    Raises: DeviceError without a GPU.
    """

    file: Path
    logs: Path
    minutes: float
    tell: Callable[[str, Mapping[str, Any]], None] = lambda name, entry: None
    steps: Sequence[Step] = STEPS
    gpus: int | None = None

    def __post_init__(self) -> None:
        self.gpus = torch.cuda.device_count() if self.gpus is None else self.gpus
        if not self.gpus:
            raise DeviceError(
                NEEDED, no_cuda() or "no GPU that CUDA_VISIBLE_DEVICES allows", "ringlab doctor"
            )
        self._deadline = time.monotonic() + 60 * self.minutes
        self._head = {"bench": "hour", "machine": machine(), "gpus": self.gpus, "source": source()}
        before = self._before()
        self._entries: dict[str, Any] = {
            name: each for name, each in before.items() if each["state"] == PASSED
        }
        self._had = {name: each.get("limit", 0.0) for name, each in before.items() if each["state"] == LATE}

    @property
    def entries(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the steps that have ended, by name: state, seconds, command, log, result and figures."""
        return self._entries

    @property
    def ok(self) -> bool:
        """Return whether every step that this machine can run has passed."""
        ended = [self._entries.get(step.name, {}).get("state") for step in self.steps]
        return all(state in (PASSED, ABSENT) for state in ended)

    def _before(self) -> dict[str, Any]:
        """Return the entries of an earlier run, if ringlab and the machine are still the same."""
        try:
            before = json.loads(self.file.read_text(encoding="utf-8"))
            same = _lasting(before) == _lasting(self._head)
            return {name: each for name, each in before["steps"].items() if same and each["state"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _limit(self, step: Step) -> float:
        """Return the step's time limit in seconds, at least twice the limit that it exceeded in an earlier run."""
        return max(60 * step.minutes, 2 * self._had.get(step.name, 0.0))

    def run(self) -> bool:
        """Run every step that has not passed, and return whether all have passed."""
        assert self.gpus is not None
        for wave in sorted({step.wave for step in self.steps}):
            waiting = []
            for step in self.steps:
                if step.wave != wave or step.name in self._entries:
                    continue
                if step.gpus > self.gpus:
                    self._end(step, {"state": ABSENT, "why": f"needs {step.gpus} GPUs"})
                else:
                    waiting.append(step)
            self._wave(waiting, [str(gpu) for gpu in range(self.gpus)])
        return self.ok

    def _wave(self, waiting: list[Step], free: list[str]) -> None:
        """Run steps until all have ended, each on GPUs that no other step uses at the time."""
        running: list[_Running] = []
        gpus = len(free)
        try:
            while waiting or running:
                for each in [each for each in running if each.ended()]:
                    running.remove(each)
                    free = sorted(free + each.taken)
                    self._end(each.step, each.entry())
                for step in list(waiting):
                    needed = step.takes(gpus)
                    if needed > len(free):
                        break
                    waiting.remove(step)
                    left = self._deadline - time.monotonic()
                    if left <= 0:
                        self._end(step, {"state": LATE, "why": "no time was left; run it again"})
                        continue
                    taken, free = free[:needed], free[needed:]
                    running.append(_Running(step, taken, self.logs, min(self._limit(step), left)))
                if running:
                    time.sleep(0.05)
        finally:
            for each in running:
                each.stop()

    def _end(self, step: Step, entry: dict[str, Any]) -> None:
        gpu = str((self._head["machine"] or {}).get("gpu", {}).get("name", ""))  # type: ignore[attr-defined]
        if entry.get("result"):
            rows = expected(step.name, entry["result"], gpu, self.gpus or 0)
            entry["figures"] = [{**asdict(row), "odd": row.odd, "line": str(row)} for row in rows]
        self._entries[step.name] = entry
        whole = {**self._head, "ok": self.ok, "steps": self._entries}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        made = self.file.with_name(f".{self.file.name}.part")
        made.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        made.replace(self.file)
        self.tell(step.name, entry)


def _lasting(head: Mapping[str, Any]) -> tuple[Any, ...]:
    about = head["machine"]
    return head["source"], head["gpus"], about["torch"], about["gpus"], about.get("versions")


class _Running:
    """A step whose command runs in a process group of its own."""

    def __init__(self, step: Step, taken: list[str], logs: Path, seconds: float) -> None:
        self.step, self.taken, self.out = step, taken, logs / f"{_slug(step.name)}.json"
        logs.mkdir(parents=True, exist_ok=True)
        self.out.unlink(missing_ok=True)
        self.log = logs / f"{_slug(step.name)}.log"
        known = {"{out}": str(self.out), "{logs}": str(logs), "{gpus}": str(len(taken))}
        words = [re.sub(r"\{(out|logs|gpus)\}", lambda found: known[found[0]], word) for word in step.words]
        if step.at_once and importlib.util.find_spec("xdist"):
            words += ["-n", str(max(1, min(8, (os.cpu_count() or 1) // max(1, torch.cuda.device_count()))))]
        self.command = [sys.executable, *words]
        self.began, self.seconds, self.stopped = time.monotonic(), seconds, False
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": _visible(taken)}
        environment.pop("TRITON_INTERPRET", None)
        # flash-attn 4 compiles in each process. With its cache, processes and later runs share the programs.
        environment.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, cwd=find_checkout(), env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )  # fmt: skip

    def ended(self) -> bool:
        """Return whether the process has ended. End it if it has exceeded its time limit."""
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.began > self.seconds:
            self.stop()
        return self.process.poll() is not None

    def stop(self) -> None:
        """End the command and all processes that it started."""
        self.stopped = True
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sent)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE)

    def entry(self) -> dict[str, Any]:
        """Return the step's entry in the result file."""
        last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
        state = LATE if self.stopped else PASSED if self.process.returncode == 0 else FAILED
        if state == PASSED and self.step.is_test and not re.search(r"\d+ passed", "\n".join(last)):
            state = ABSENT if self.step.optional else FAILED  # every test was skipped
        result = None
        with suppress(OSError, ValueError):
            result = json.loads(self.out.read_text(encoding="utf-8"))
        why = f"it exceeded its limit of {self.seconds:.0f} s; a later run allows at least twice as much"
        return {
            "state": state,
            **({"why": why} if state == LATE else {}),
            "seconds": round(time.monotonic() - self.began, 1),
            "limit": round(self.seconds, 1),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(self.command[1:]),
            "log": str(self.log),
            "last": last,
            "result": result,
        }


def _visible(taken: list[str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a step.

    taken: the numbers of the step's GPUs among the GPUs that this process may use.
    """
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return ",".join(allowed[int(each)] if allowed != [""] else each for each in taken)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
