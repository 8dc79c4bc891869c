"""The clock, the caches and the memory of the GPU, the CPU or the group of ranks that a benchmark runs on.

`machine` describes the machine, and the versions of packages, on which a number was measured.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils.deterministic
from jaxtyping import Shaped
from torch import Tensor

import ringlab
from ringlab.comm.memory import MemoryMeter
from ringlab.comm.ring import Ring
from ringlab.errors import DeviceError

NEEDED = "an NVIDIA GPU"
REMEDY = "on a machine with one, run `make gpu`"
FLUSHES = 8
"""Passes over a buffer of twice the L2 before each timed run. They keep the GPU busy during the launch."""


def no_cuda() -> str | None:
    """Return the reason why this machine has no usable GPU, or None; tests and `ringlab doctor` print it."""
    found = _without_cuda()
    return f"needs {NEEDED}: {found}; {REMEDY}" if found else None


def _without_cuda() -> str | None:
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} finds no GPU with a driver for CUDA {torch.version.cuda}"


def fill_with_nan(tensor: Shaped[Tensor, "..."]) -> None:
    """Set every bit of the memory of `tensor`, which makes it NaN in every float format."""
    every_byte = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    every_byte.set_(tensor.untyped_storage()).fill_(0xFF)


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN inside the block, on every thread.

    This is part of torch's deterministic mode, so operators may choose other algorithms inside the block.
    """
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filling = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = True
        try:
            yield
        finally:
            memory.fill_uninitialized_memory = filling
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)


class Clock(Protocol):
    """The interface through which `ringlab.bench.interleaved` times a machine."""

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds from the first to the last operation of `run`."""
        ...

    def settle(self) -> None:
        """Clear the caches. Queue so much work that the device need not wait for the next launch."""
        ...


class Device(Clock, Protocol):
    """A clock that also measures memory, for the benchmarks of kernels."""

    name: str
    """Its name in torch: "cuda" or "cpu"."""

    def poison(self, outputs: tuple[Shaped[Tensor, "..."], ...]) -> None:
        """Write NaN over `outputs`, so that the next run cannot pass by leaving outputs unwritten.

        After `outputs` are freed, the next run's outputs probably get the same memory.
        """
        ...

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Return the peak bytes allocated during `run`, minus the bytes allocated before `run`."""
        ...


class Cpu:
    """A clock for work on this machine's processor, in this process."""

    name = "cpu"

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds of `run`."""
        begin = time.perf_counter()
        kept = run()  # keeps the result until the clock stops, because freeing is not timed
        end = time.perf_counter()
        del kept
        return end - begin

    def settle(self) -> None:
        """Do nothing: operators on a CPU have ended when they return."""

    def poison(self, outputs: tuple[Shaped[Tensor, "..."], ...]) -> None:
        """Write NaN over `outputs`."""
        for output in outputs:
            fill_with_nan(output)

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Return the peak bytes of the tensors that `run` makes."""
        meter = MemoryMeter()
        with meter.watch():
            run()
        return meter.peak_bytes


class Ranks:
    """A clock for all ranks of a group. A run ends when the last rank has finished."""

    def __init__(
        self,
        ring: Ring,
        device: torch.device | str = "cpu",
        seen: Callable[[Any], None] = lambda kept: None,
    ) -> None:
        """Make the clock.

        seen: a function that is called with the value of a run after its clock has stopped.
        """
        self.ring, self.device, self.seen = ring, torch.device(device), seen

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds from the moment all ranks are ready until all are done."""
        self.settle()
        self.ring.barrier()
        begin = self.ring.comm.now()
        kept = run()
        self.settle()
        self.ring.barrier()
        end = self.ring.comm.now()
        self.seen(kept)
        return end - begin

    def settle(self) -> None:
        """Wait until a GPU has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Cuda:
    """The current CUDA device, timed by its own events. Raises: DeviceError without a GPU."""

    name = "cuda"

    def __init__(self) -> None:
        if found := _without_cuda():
            cpu = "`ringlab bench emulate` and `ringlab bench processes` measure the same ring on a CPU"
            raise DeviceError(NEEDED, found, f"{REMEDY}; {cpu}")
        l2 = torch.cuda.get_device_properties().L2_cache_size
        self._buffer = torch.empty(2 * max(l2, 64 * 2**20), dtype=torch.uint8, device="cuda")

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the seconds between events recorded before and after `run`."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kept = run()  # keeps the result until the clock stops, because freeing is not timed
        end.record()
        end.synchronize()
        del kept
        return begin.elapsed_time(end) / 1000

    def settle(self) -> None:
        """Overwrite the L2 cache FLUSHES times. The GPU is still busy when this function returns."""
        torch.cuda.synchronize()
        for _ in range(FLUSHES):
            self._buffer.zero_()

    def poison(self, outputs: tuple[Shaped[Tensor, "..."], ...]) -> None:
        """Write NaN over `outputs`."""
        torch.cuda.synchronize()
        for output in outputs:
            fill_with_nan(output)

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Return the peak bytes of torch's allocator during `run`, minus the bytes allocated before `run`."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


_ASKED = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "highest_sm_clock": "clocks.max.sm",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
}
"""The queries to nvidia-smi, made right after the runs; they change nothing."""


def machine() -> dict[str, object]:
    """Return processor, cores, GPUs, system, versions and the date (UTC), ready for JSON.

    With a GPU, `gpu` describes the current GPU, and `versions` includes triton, CUDA and cuDNN.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        **({"gpu": _gpu(), "versions": _versions()} if torch.cuda.is_available() else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ringlab": ringlab.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """Return the commit of ringlab's checkout, with "+" if files were edited, or "" outside of a checkout."""
    folder = Path(ringlab.__file__).resolve().parents[1]
    asked = ("rev-parse --short=12 HEAD", "status --porcelain --untracked-files=no")
    try:
        said = [
            subprocess.run(
                ["git", "-C", str(folder), *words.split()], capture_output=True, text=True, timeout=30
            )
            for words in asked
        ]
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if any(done.returncode for done in said) or not (folder / ".git").exists():
        return ""
    return said[0].stdout.strip() + ("+" if said[1].stdout.strip() else "")


@cache
def source() -> str:
    """Return a digest of ringlab's Python files. Equal files have equal digests, committed or not."""
    folder = Path(ringlab.__file__).resolve().parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _gpu() -> dict[str, Any]:
    """Return the current GPU's memory and multiprocessors and, if readable, driver, clocks and power."""
    gpu = torch.cuda.get_device_properties()
    return {
        "name": gpu.name,
        "capability": f"sm_{gpu.major}{gpu.minor}",
        "memory_bytes": gpu.total_memory,
        "multiprocessors": gpu.multi_processor_count,
        "l2_bytes": gpu.L2_cache_size,
        **_read(f"GPU-{gpu.uuid}"),
    }


def _read(uuid: str) -> dict[str, str]:
    """Return nvidia-smi's values, with units, for each name of `_ASKED`, or {} without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(_ASKED.values())}"]
    done = subprocess.run([*command, "--format=csv,noheader"], capture_output=True, text=True, timeout=60)
    said = [word.strip() for word in done.stdout.strip().split(",")]
    return dict(zip(_ASKED, said, strict=True)) if len(said) == len(_ASKED) else {}


def _versions() -> dict[str, object]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "not installed"
    return {"triton": triton, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
