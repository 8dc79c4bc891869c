"""Compiles kernels without the GPUs, and checks registers and memory against budgets.

Jobs run in child processes, because a kernel that was defined under TRITON_INTERPRET=1 cannot be compiled,
and because a crash of the compiler must not end the caller. Nothing here measures the speed of a kernel.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from queue import SimpleQueue
from typing import Any

from ringlab.blocks.triton.configs import COMPILED, KERNELS, SCORES, Config, Row, choose, render, table
from ringlab.errors import BackendError
from ringlab.temporary import TemporaryFolder

# The bytes of shared memory that one program may use. Source: CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability": 163 KiB for 8.0, 227 KiB for 9.0 and 10.0. Triton compiles programs that need
# more without a warning, and their launch fails.
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
# The matrix instructions that an architecture's kernels should use.
TENSOR_CORE = {"sm_80": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05"}
TENSOR_MEMORY_LIMIT = 512  # columns, sm_100
# These kernels must not spill with 16-bit inputs and head dims up to NO_SPILL_HEAD_DIM.
NO_SPILL = ("forward_step", "backward_dq")
NO_SPILL_HEAD_DIM = 128
# Head dims between those of the rows. They are multiples of 8 but not of 16; 8 numbers of 16 bits fill a
# load of 16 bytes.
BETWEEN = (40, 72, 88, 104, 120)
RULES = tuple(" ".join(rules) for n in range(1, len(SCORES) + 1) for rules in combinations(SCORES, n))
# The steps of a ring as (first, last). Each step is compiled to a separate kernel.
STEPS = {"middle": (False, False), "first": (True, False), "last": (False, True), "only": (True, True)}

SOURCES = "ringlab.blocks.triton.compiling"


@dataclass(frozen=True)
class Job:
    """One kernel to compile. The function `source(job)` of the module `sources` returns the kernel itself.

    step: the step of a ring. A kernel starts its state in the first step and finishes it in the last.
    scores: the score rules, joined by a space, or "" for none. value_dim: the head dim of v; 0 means
    `head_dim`. window: whether tiles have the left edge of a window.
    """

    kernel: str
    arch: str
    head_dim: int
    dtype: str
    config: Config
    step: str = "middle"
    scores: str = ""
    sources: str = SOURCES
    value_dim: int = 0
    window: bool = False


@dataclass(frozen=True)
class Compiled:
    """The result of a job. If compilation failed, `error` contains the reason and the numbers are 0.

    registers: registers per thread. spill_bytes: bytes that a thread stores to memory for lack of registers
    (ptxas -v).
    shared_bytes: shared memory per program. tensor_core: the matrix instructions in use, "mma.sync", "wgmma"
    or "tcgen05", joined by " + " if there are two, or "" if there are none. tensor_core_count: the number of
    these instructions in the PTX text, not how often they run. tensor_memory_columns: only on sm_100.
    narrow_loads: the number of loads of one 16-bit number from global memory in the PTX text.
    """

    job: Job
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    tensor_core: str = ""
    tensor_core_count: int = 0
    tensor_memory_columns: int = 0
    narrow_loads: int = 0
    error: str = ""

    def broken(self) -> tuple[str, ...]:
        """Return a sentence for each exceeded budget."""
        return (f"does not compile: {self.error}",) if self.error else tuple(_broken(self))

    def as_json(self) -> dict[str, Any]:
        """Return the row that `ringlab kernels --offline --json` prints."""
        job, numbers = self.job, {k: v for k, v in asdict(self).items() if k not in ("job", "error")}
        named = {"kernel": job.kernel, "arch": job.arch, "head_dim": job.head_dim, "dtype": job.dtype}
        return (
            named
            | {"step": job.step, "scores": job.scores, "window": job.window, "config": asdict(job.config)}
            | numbers
            | {"broken": list(self.broken())}
        )


def _broken(found: Compiled) -> Iterator[str]:
    job, limit = found.job, SHARED_LIMIT[found.job.arch]
    if found.shared_bytes > limit:
        yield f"{found.shared_bytes:,} bytes of shared memory, {job.arch} has {limit:,}"
    if found.tensor_memory_columns > TENSOR_MEMORY_LIMIT:
        yield f"{found.tensor_memory_columns} columns of tensor memory, there are {TENSOR_MEMORY_LIMIT}"
    if job.dtype != "float32":
        if (_no_spill(job) or job.scores or job.window) and found.spill_bytes:
            yield f"{found.spill_bytes:,} bytes spilled by a thread, none are allowed here"
        if found.narrow_loads and job.head_dim % 8 == job.value_dim % 8 == 0:
            yield f"{found.narrow_loads} loads of 2 bytes, where 16 bytes can be loaded at once"
        if found.tensor_core != TENSOR_CORE[job.arch]:
            yield f"matrix instructions: {found.tensor_core or 'none'}, should be {TENSOR_CORE[job.arch]}"
    elif job.config.precision == "tf32x3" and not found.tensor_core:
        yield "no matrix instructions, though tf32x3 is meant to use them"


def jobs_of(arch: str, rows: Iterable[Row]) -> list[Job]:
    """Return a job for each row, in order, for a middle step and the largest head dim that the row serves."""
    return [Job(row.kernel, arch, row.head_dim, _dtype(row), row.config, scores=row.scores) for row in rows]


def _dtype(row: Row) -> str:
    return "bfloat16" if row.dtype == "16-bit" else row.dtype


def shipped_jobs(archs: Iterable[str] = COMPILED, kernels: Iterable[str] = KERNELS) -> list[Job]:
    """Return the jobs for the rows of `archs` and `kernels` in the tables.

    Rows that must not spill are compiled for all steps of a ring, and other rows for a middle step. 16-bit
    rows up to NO_SPILL_HEAD_DIM are also compiled in three other ways: under a window; for the head dims
    BETWEEN the rows; and with each set of SCORES, in the configuration that `choose` returns for it.
    """
    wanted = tuple(kernels)
    every = [job for arch in archs for job in jobs_of(arch, table(arch)) if job.kernel in wanted]
    jobs = [job for job in every if not job.scores]
    steps = [replace(job, step=step) for job in jobs for step in (STEPS if _no_spill(job) else ("middle",))]
    others = [job for job in every if job.scores and not _usual(job)]
    usual = [job for job in jobs if _usual(job)]
    windows = [replace(job, window=True) for job in usual]
    between = [
        replace(job, head_dim=D) for job in usual for D in BETWEEN if job.head_dim // 2 < D <= job.head_dim
    ]
    return steps + windows + between + [_ruled(job, rules) for job in usual for rules in RULES] + others


def _ruled(job: Job, scores: str) -> Job:
    config = choose(job.kernel, job.arch, job.head_dim, job.dtype, job.config.precision, scores.split())
    return replace(job, scores=scores, config=config)


def _no_spill(job: Job) -> bool:
    return job.kernel in NO_SPILL and _usual(job) and not job.scores


def _usual(job: Job) -> bool:
    return job.head_dim <= NO_SPILL_HEAD_DIM and job.dtype != "float32"


def recorded(arch: str, rows: Iterable[Row], found: Iterable[Compiled]) -> str:
    """Return the text of the table of `arch`, with the numbers that compiling its `rows` gave, in order."""
    new = [
        replace(row, compiled=(each.registers, each.spill_bytes, each.shared_bytes))
        for row, each in zip(rows, found, strict=True)
    ]
    return render(arch, importlib.metadata.version("triton"), new)


def compile_all(
    jobs: Sequence[Job], processes: int = 2, on_done: Callable[[Compiled], None] | None = None
) -> list[Compiled]:
    """Return the result of each job, in order. `on_done` is called when a job finishes, from other threads.

    Raises: BackendError if Triton or its assembler is missing.
    """
    require_triton()
    idle: SimpleQueue[_Child] = SimpleQueue()

    def work(job: Job) -> Compiled:
        child = idle.get()
        try:
            found = child.compile(job)
        finally:
            idle.put(child)
        if on_done is not None:
            on_done(found)
        return found

    count = max(1, min(processes, len(jobs)))
    with TemporaryFolder(prefix="ringlab-kernels-") as cache, _children(count, cache) as children:
        for child in children:
            idle.put(child)
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(work, jobs))


def require_triton() -> None:
    """Check that Triton is installed. Raises: BackendError."""
    if importlib.util.find_spec("triton") is None:
        here = f"{platform.system()} on {platform.machine()}, without it"
        remedy = "Triton's packages are for Linux on x86-64: run this command there"
        raise BackendError("the package triton, which compiles the kernels", here, remedy)


@contextmanager
def _children(count: int, cache: str) -> Iterator[list[_Child]]:
    children = [_Child(cache) for _ in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.close()


class _Child:
    """A process that compiles one job after another.

    It is started for the first job, and again after a crash.
    """

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self._process: subprocess.Popen[str] | None = None

    def compile(self, job: Job) -> Compiled:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process = None
            return Compiled(job, error=f"the compiler's process ended with status {process.wait()}")
        answer = json.loads(line)
        if missing := answer.pop("missing", ""):
            remedy = "reinstall triton, or name the assembler in TRITON_PTXAS_PATH"
            raise BackendError("the assembler ptxas that comes with triton", missing, remedy)
        return Compiled(job, **answer)

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ringlab.blocks.triton.compiling"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(self._cache),
        )
        return self._process


def clean_environment(cache: str) -> dict[str, str]:
    """Return the environment of a child: no interpreter, and compiler logs even for cached kernels."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ours = {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_CACHE_DIR": cache}
    return kept | ours | {"OMP_NUM_THREADS": "1"}
