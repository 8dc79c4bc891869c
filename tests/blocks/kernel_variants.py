"""Compiles variants of the kernels that are not shipped: `python -m tests.blocks.kernel_variants`.

Each variant is a change of the kernels' text, or a kernel of its own. docs/benchmarks.md shows the figures. Nothing
here has run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringlab.blocks.triton import compiling, offline
from ringlab.blocks.triton.compiling import Source
from ringlab.blocks.triton.configs import KERNELS, Config, choose
from ringlab.blocks.triton.offline import Job
from ringlab_course.checking.code_alone import code
from tests.blocks.compiled import FILE
from tests.blocks.kernel_mutants import loaded, source

RESULTS = FILE.with_name("variants.json")
ARCHS = ("sm_90", "sm_100")
GLUON = Path(__file__).with_name("gluon_forward.py")
_BARRIER = re.compile(r"\b(BAR\.SYNC|SYNCS\.PHASECHK)\b")  # where a warp waits for others, or for a copy
_SERIALISED = "C7514"  # the remark of ptxas that every product waits for the one before


def specialised(text: str) -> str:
    """Return the kernels whose loops over tiles ask for warp specialisation."""
    return re.sub(r"(tl\.range\(\w+, \w+, BLOCK_[MN])\)", r"\1, warp_specialize=True)", text)


def with_descriptors(text: str) -> str:
    """Return the kernels, changed to load the tensors that they walk over by tensor descriptors (TMA).

    A descriptor's length is n_rows, so that the arguments stay the same; a usable kernel needs a block's
    length.
    """

    def made(found: re.Match[str]) -> str:
        line, indent, name = found.groups()
        of_keys = name in ("k", "v")
        if of_keys != (len(indent) == 4):  # a program's own tensor, which it loads once
            return line
        dim, deep = ("HEAD_DIM", "D") if name in ("k", "q") else ("VALUE_DIM", "V")
        block = f"BLOCK_{'N' if of_keys else 'M'}, BLOCK_{deep}"
        shape = f"shape=[n_rows, {dim}], strides=[{name}_l, 1], block_shape=[{block}]"
        return f"{line}\n{indent}{name}_base = tl.make_tensor_descriptor({name}_base, {shape})"

    text = re.sub(r"^(( +)(k|v|q|dout)_base = .*)", made, text, flags=re.MULTILINE)
    return re.sub(r"= tile\((\w+_base), (key|row), \w+, inside, .*\)", r"= \1.load([\2, 0])", text)


VARIANTS: dict[str, Callable[[], str]] = {
    "shipped": source,
    "warp specialisation": lambda: specialised(source()),
    "tensor descriptors": lambda: with_descriptors(source()),
    "warp specialisation, tensor descriptors": lambda: with_descriptors(specialised(source())),
    "Gluon": lambda: GLUON.read_text(encoding="utf-8"),
}
"""The text of each variant's kernels."""


def jobs(variant: str) -> list[Job]:
    """Return the jobs of a variant: shipped tiles of 16-bit inputs in a middle step, or those of Gluon.

    With warp specialisation there is one more job, whose tiles have four warps.
    """
    if variant == "Gluon":
        return [Job("forward_step", "sm_90", D, "bfloat16", Config(128, 128, 4, 2)) for D in (64, 128)]
    found = [
        Job(kernel, arch, D, "bfloat16", choose(kernel, arch, D, "bfloat16"))
        for arch in ARCHS
        for kernel in KERNELS
        for D in (64, 128)
    ]
    if "warp" in variant:  # the compiler specialises warps of a warpgroup, and the shipped tiles have two
        found += [Job("forward_step", "sm_90", 128, "bfloat16", Config(64, 64, 4, 3))]
    return found


def digest(variant: str) -> str:
    """Return a digest of the code from which a variant is compiled."""
    return hashlib.sha256(code(VARIANTS[variant]()).encode()).hexdigest()[:16]


def _source(variant: str, job: Job, folder: Path) -> Source:
    kernels = loaded(VARIANTS[variant](), folder)
    if variant != "Gluon":
        return Source(getattr(kernels, job.kernel), *_signature(job))
    types = dict.fromkeys(("n_rows", "n_keys", "row", "begin", "split", "end", "shift"), "i32")
    types |= dict.fromkeys("QKV", "*bf16") | dict.fromkeys(("ACC", "M", "TOTAL"), "*fp32") | {"scale": "fp32"}
    sizes = {"HEAD_DIM": job.head_dim, "BLOCK_M": job.config.block_m, "BLOCK_N": job.config.block_n}
    aligned = frozenset(name for name, kind in types.items() if kind[0] == "*")
    return Source(kernels.forward_step, types, sizes | {"STAGES": job.config.num_stages}, aligned)


def _signature(job: Job) -> tuple[Any, Any, Any]:
    found = compiling.source(job)
    return found.types, found.constants, found.aligned


def figures(variant: str, job: Job) -> dict[str, int | bool]:
    """Return the figures of one kernel, from the compiler and the instructions of sm_90 or sm_100 (SASS)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    with tempfile.TemporaryDirectory() as folder:
        found = _source(variant, job, Path(folder))
        names = found.kernel.arg_names
        compiled, log = compiling._compile(
            (GluonASTSource if variant == "Gluon" else ASTSource)(
                fn=found.kernel,
                signature={n: "constexpr" if n in found.constants else found.types[n] for n in names},
                constexprs=dict(found.constants),
                attrs={(names.index(n),): [["tt.divisibility", 16]] for n in sorted(found.aligned)},
            ),
            GPUTarget("cuda", int(job.arch.removeprefix("sm_")), 32),
            {"num_warps": job.config.num_warps, "num_stages": job.config.num_stages},
        )
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)
    return {
        "warps": compiled.metadata.num_warps,
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        "shared_bytes": compiled.metadata.shared,
        "instructions": len(lines),
        "barriers": sum(bool(_BARRIER.search(line)) for line in lines),
        "serialised": _SERIALISED in log,
    }


def row(variant: str, job: Job) -> dict[str, Any]:
    """Return one row of the file, compiled in a process of its own, because a fault may end the compiler."""
    named = {"variant": variant, "arch": job.arch, "kernel": job.kernel, "head_dim": job.head_dim}
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=lambda: theirs.send(figures(variant, job)))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        process.join()
        found = {"error": f"the compiler ends with status {process.exitcode}"}
    process.join()
    return named | {"config": str(job.config)} | found


def write() -> None:
    """Compile every variant, which takes minutes, and write the file: one row a line."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ.update(offline.clean_environment(cache))
        rows = [row(variant, job) for variant in VARIANTS for job in jobs(variant)]
    lines = ",\n  ".join(json.dumps(each, ensure_ascii=False) for each in rows)
    made_from = {
        "triton": importlib.metadata.version("triton"),
        "sources": {each: digest(each) for each in VARIANTS},
    }
    RESULTS.write_text(
        f'{{"made_from": {json.dumps(made_from)},\n "rows": [\n  {lines}\n]}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    write()
