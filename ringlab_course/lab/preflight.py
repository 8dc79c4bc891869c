"""The conditions for a measurement. Every rank checks them, and every rank gets the findings of all ranks.

All ranks draw the same conclusions from the same facts, so a lab begins on all of them or on none.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import ringlab
from ringlab.bench.device import source
from ringlab.comm.ring import Ring
from ringlab.errors import LabError
from ringlab_course.lab.result import gather

BUSY_SHARE = 0.05
"""If others use a larger share of a GPU's time or memory before the run, all figures are doubtful."""
_SAMPLED = 1.2
"""Seconds until nvidia-smi's share of time no longer includes this run's own start of NCCL."""
_ASKED = ("utilization.gpu", "memory.used", "clocks.sm", "clocks.max.sm", "power.limit", "temperature.gpu")


@dataclass(frozen=True)
class Finding:
    """One finding: its name, whether a lab can run, the observation, and a remedy.

    doubtful: whether a lab can run, but its times will say little.
    """

    name: str
    ok: bool
    told: str
    remedy: str = ""
    doubtful: bool = False


def facts(
    ring: Ring, settings: Mapping[str, Any], device: torch.device, needed_bytes: int = 0
) -> dict[str, Any]:
    """Return facts about this rank as plain data: its device, versions, settings, memory and load.

    The load is the number of threads that computed on this machine over the last minute.
    """
    own = {
        "rank": ring.rank,
        "host": socket.gethostname(),
        "kind": device.type,
        "device": platform.processor() or platform.machine(),
        "id": f"{socket.gethostname()} process {os.getpid()} rank {ring.rank}",
        "versions": versions(),
        "settings": dict(settings),
        "load": os.getloadavg()[0],
        "cores": os.cpu_count() or 1,
        "free_bytes": free_bytes(device),
        "needed_bytes": needed_bytes,
    }
    return own | (_of_gpu(device) if device.type == "cuda" else {})


def versions() -> dict[str, str]:
    """Return the versions on which results depend; `source` is a digest of ringlab's own files."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(), "torch": torch.__version__, "ringlab": ringlab.__version__, "source": source(),
        "triton": triton, "cuda": str(torch.version.cuda), "nccl": nccl,
    }  # fmt: skip


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of memory on a device; on a CPU this includes caches that the system can free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    memory = Path("/proc/meminfo")  # Linux only
    found = re.search(r"^MemAvailable:\s+(\d+) kB", memory.read_text(), re.M) if memory.exists() else None
    if found is not None:
        return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_gpu(device: torch.device) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(device)
    torch.cuda.synchronize(device)
    time.sleep(_SAMPLED)
    free, total = torch.cuda.mem_get_info(device)
    said = nvidia_smi(f"GPU-{gpu.uuid}")
    return {"device": gpu.name, "id": f"GPU-{gpu.uuid}", "in_use": 1 - free / total, "smi": said}


def nvidia_smi(gpu: str) -> dict[str, str]:
    """Return what nvidia-smi reports about a GPU, with units, or nothing without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = [word.strip() for word in done.stdout.strip().split(",")]
    return dict(zip(_ASKED, said, strict=True)) if len(said) == len(_ASKED) else {}


def topology() -> str:
    """Return how the GPUs of this machine are connected, as nvidia-smi shows it, or "" without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def judge(
    everyone: list[dict[str, Any]], needed_bytes: int, nodes: int | None, *, shared: bool = False
) -> Iterator[Finding]:
    """Yield the findings from the facts of all ranks.

    needed_bytes: the bytes that a rank will allocate; a number in the rank's own facts takes precedence.
    nodes: the intended number of machines.
    shared: whether ranks may share a GPU; then they see each other's use of it.
    """
    yield _alike("versions", everyone, "install requirements.lock on every machine")
    yield _alike("settings", everyone, "start every rank with the same command")
    hosts = Counter(each["host"] for each in everyone)
    told = ", ".join(f"{count} on {host}" for host, count in sorted(hosts.items()))
    right = nodes is None or len(hosts) == nodes
    yield Finding(
        "machines", right, f"ranks: {told}", f"start torchrun on each of {nodes} machines" if nodes else ""
    )
    several = [which for which, count in Counter(each["id"] for each in everyone).items() if count > 1]
    crowded = _crowded(everyone)
    yield Finding(
        "a device each", shared or not several,
        ", ".join(several) + (", which ranks share" if shared else "") if several else crowded or "no two ranks share one",
        "--ranks at most the number of cores" if crowded else "--nproc-per-node at most the number of GPUs, or --transport shared-gpu",
        doubtful=bool(crowded),
    )  # fmt: skip
    yield _enough_memory(everyone, needed_bytes, shared)
    busy = [text for each in everyone if (text := _busy(each, several if shared else ()))]
    loaded = _load(everyone)
    told = "; ".join(busy) or loaded or "no device is in use"
    remedy = "nvidia-smi says by whom" if busy or not loaded else "wait until the machine is quiet"
    yield Finding("nobody else", not busy, told, remedy, doubtful=bool(loaded))


def _enough_memory(everyone: list[dict[str, Any]], needed_bytes: int, shared: bool) -> Finding:
    """Return the finding about the memory, of a GPU or a machine, that is most likely to be too small.

    It is the one with the least free bytes beyond those that its ranks need together.
    """
    by_memory: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in everyone:
        # If two ranks share a GPU, another finding reports this.
        of_gpu = each["id"] if shared else f"of rank {each['rank']}"
        by_memory[of_gpu if each["kind"] == "cuda" else each["host"]].append(each)

    def needed(ranks: list[dict[str, Any]]) -> int:
        return sum(int(each.get("needed_bytes") or needed_bytes) for each in ranks)

    def free(ranks: list[dict[str, Any]]) -> int:
        return min(int(each["free_bytes"]) for each in ranks)

    least = min(by_memory.values(), key=lambda ranks: free(ranks) - needed(ranks))
    whose = ", ".join(str(each["rank"]) for each in least[:8]) + (", …" if len(least) > 8 else "")
    who = f"rank {whose} has" if len(least) == 1 else f"ranks {whose} have together"
    return Finding(
        "memory", free(least) >= needed(least),
        f"{who} the least free: {free(least) / 2**30:.1f} GiB; {needed(least) / 2**30:.1f} GiB are needed",
        "end other programs there, or reduce the ranks, tokens (lengths), heads or message sizes",
    )  # fmt: skip


def _alike(what: str, everyone: list[dict[str, Any]], remedy: str) -> Finding:
    first = everyone[0][what]
    other = [
        f"rank {each['rank']} ({each['host']}): {name} {each[what].get(name)}, rank 0: {first.get(name)}"
        for each in everyone
        for name in {**first, **each[what]}
        if each[what].get(name) != first.get(name)
    ]
    if any(f": {name} " in text for text in other for name in ("ringlab", "source")):
        remedy = f"use the same checkout of ringlab, with the same edits, on every machine; {remedy}"
    return Finding(f"same {what}", not other, "; ".join(other[:4]) or "on all ranks", remedy)


def _busy(each: Mapping[str, Any], shared: Collection[str]) -> str:
    """Return in words how much others use the GPU of a rank, or "" if their share is at most BUSY_SHARE.

    If several ranks use the device (`shared`), the use by others is unknown.
    """
    if each["kind"] != "cuda" or each["id"] in shared:
        return ""
    at = f"rank {each['rank']}, {each['device']} on {each['host']}"
    using = each["smi"].get("utilization.gpu", "0 %").split()[0]
    if using.isdigit() and int(using) > 100 * BUSY_SHARE:
        return f"{at}: {using} % of its time"
    return f"{at}: {each['in_use']:.0%} of its memory" if each["in_use"] > BUSY_SHARE else ""


def _crowded(everyone: list[dict[str, Any]]) -> str:
    """Return the machines with more ranks than cores, where ranks wait for each other's computations."""
    on_cpu = [each for each in everyone if each["kind"] == "cpu"]
    ranks, cores = Counter(each["host"] for each in on_cpu), {each["host"]: each["cores"] for each in on_cpu}
    told = [
        f"{count} ranks share {cores[host]} core{'s' if cores[host] > 1 else ''} of {host}"
        for host, count in sorted(ranks.items())
        if count > cores[host]
    ]
    return f"{', '.join(told)}: exchanges wait for a core" if told else ""


def _load(everyone: list[dict[str, Any]]) -> str:
    """Return the machines whose CPUs were overloaded before the ranks began.

    They are reported but not refused, because ranks share CPUs.
    """
    busy = {each["host"]: each for each in everyone if each["kind"] == "cpu" and each["load"] > each["cores"]}
    told = [f"load {each['load']:.1f} on {each['cores']} cores of {host}" for host, each in busy.items()]
    return f"over the last minute {', '.join(told)}: times measured now will say little" if told else ""


def exchange_works(ring: Ring, device: torch.device) -> Finding:
    """Return whether each rank receives what its neighbour sends, and sums over ranks are right."""
    mine = torch.arange(1 << 16, device=device, dtype=torch.float32) + ring.rank
    got = ring.shift(mine)
    total = ring.comm.all_reduce(mine[:8])
    P = ring.world_size
    wanted = torch.arange(8, device=device, dtype=torch.float32) * P + P * (P - 1) / 2
    right = torch.equal(got, mine - ring.rank + ring.previous) and torch.equal(total, wanted)
    told = "neighbours exchange, and sums over ranks are right" if right else "wrong numbers arrive"
    return Finding(
        "exchange", right, told, "NCCL_DEBUG=INFO shows the links; NCCL_P2P_DISABLE=1 finds a broken one"
    )


def preflight(
    ring: Ring,
    settings: Mapping[str, Any],
    device: torch.device,
    needed_bytes: int = 0,
    nodes: int | None = None,
    *,
    shared: bool = False,
) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Return every rank's facts and the findings, which are the same on all ranks.

    needed_bytes: the bytes that this rank allocates.
    """
    everyone = gather(ring.comm, facts(ring, settings, device, needed_bytes), device)
    found = list(judge(everyone, needed_bytes, nodes, shared=shared))
    own = exchange_works(ring, device)
    seen = gather(ring.comm, asdict(own), device)
    wrong = [f"rank {rank}: {each['told']}" for rank, each in enumerate(seen) if not each["ok"]]
    found.append(Finding("exchange", not wrong, "; ".join(wrong) or own.told, own.remedy))
    return everyone, found


def expect_ready(found: list[Finding], *, allow_busy: bool = False) -> None:
    """Raise LabError unless all findings are good; with `allow_busy`, a busy device is accepted.

    The error is the same on every rank.
    """
    wrong = [each for each in found if not each.ok and not (allow_busy and each.name == "nobody else")]
    if wrong:
        raise LabError(
            "ranks that are ready: " + ", ".join(each.name for each in wrong),
            "\n        ".join(each.told for each in wrong),
            "; ".join(each.remedy for each in wrong),
        )
