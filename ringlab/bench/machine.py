"""Which machine and which versions a figure was measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ringlab

_ASKED = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "highest_sm_clock": "clocks.max.sm",
    "power_limit": "power.limit",
    "temperature": "temperature.gpu",
}
"""What nvidia-smi is asked, right after the runs; it changes nothing."""


def machine() -> dict[str, object]:
    """Return processor, cores, GPUs, system, versions and the date (UTC), ready for JSON.

    Where there is a GPU, `gpu` describes the current one and `versions` holds triton, CUDA and cuDNN.
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


def _gpu() -> dict[str, Any]:
    """The current GPU: bytes, multiprocessors, and driver, clocks, power and temperature if they can be read."""
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
    """What nvidia-smi says of a GPU, with units, in the words of `_ASKED`; nothing where it is not there."""
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
