"""Compiles every shipped kernel once, after a change of the kernels: `python -m tests.blocks.compiled`.

Compiling all kernels takes minutes and gives the same numbers until the kernels, their tables or Triton
change. So the file of numbers records the sources and the Triton version that it was made from. If they
differ from the present ones, the tests compile all kernels themselves.

This module also makes a Triton block with tiles so small that a short sequence has many.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ringlab.blocks.triton import TritonBlock, configs, offline
from ringlab.blocks.triton.configs import Config
from ringlab.blocks.triton.offline import Compiled, Job, shipped_jobs
from ringlab_course.checking.code_alone import code

CHECKOUT = Path(__file__).resolve().parents[2]
FILE = CHECKOUT / "benchmarks/results/kernels/offline.json"
_SOURCES = ("kernels.py", "addressing.py", "scoring.py", "compiling.py", "offline.py", "configs.py")


def made_from() -> dict[str, str]:
    """Return the inputs of the numbers: a digest of the code and tables, and Triton's version."""
    folder = Path(offline.__file__).parent
    texts = [code((folder / name).read_text(encoding="utf-8")) for name in _SOURCES]
    texts += [file.read_text(encoding="utf-8") for file in sorted(configs.TABLES.glob("*.toml"))]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]
    return {"sources": digest, "triton": importlib.metadata.version("triton")}


def compile_now() -> list[dict[str, Any]]:
    """Return the rows that the command prints in a new process, which has never interpreted a kernel."""
    code = "import sys; from ringlab.cli import main; sys.argv = ['ringlab', *sys.argv[1:]]; main()"
    command = [sys.executable, "-c", code, "kernels", "--offline", "--json"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, env=os.environ)
    assert done.returncode in (0, 1), done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def known() -> list[dict[str, Any]] | None:
    """Return the rows of the file, or None if the file was made from other sources or another Triton."""
    if not FILE.exists():
        return None
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return found["rows"] if found["made_from"] == made_from() else None


def as_compiled(rows: list[dict[str, Any]]) -> dict[Job, Compiled]:
    """Return the compiled kernels of the rows, by job."""
    found = {}
    for job, row in zip(shipped_jobs(), rows, strict=True):
        named = (row["kernel"], row["arch"], row["head_dim"], row["scores"], row["window"])
        assert named == (job.kernel, job.arch, job.head_dim, job.scores, job.window)
        names = ("registers", "spill_bytes", "shared_bytes", "tensor_core", "tensor_core_count")
        numbers = {name: row[name] for name in (*names, "narrow_loads", "tensor_memory_columns")}
        error = row["broken"][0] if row["broken"] and not row["registers"] else ""
        found[job] = Compiled(job, **numbers, error=error)
    return found


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"made_from": made_from(), "rows": compile_now()}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


def small_tiles(block_m: int = 32, block_n: int = 16, precision: str = "ieee") -> TritonBlock:
    """Return a block whose kernels own, or walk over, tiles of `block_m` rows and `block_n` keys."""
    config = Config(block_m, block_n, num_warps=4, num_stages=1, precision=precision)
    return TritonBlock(precision, dict.fromkeys(("forward_step", "backward_dq", "backward_dkv"), config))
