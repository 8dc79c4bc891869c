"""The child process of `offline`, which reads jobs from stdin as lines of JSON, and answers on stdout.

It works with Triton 3.6 to 3.9. Instead of tensors it passes a signature to `triton.compile`: the types,
constants and alignments of a typical call.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from ringlab.blocks.triton import kernels
from ringlab.blocks.triton.configs import Config, padded
from ringlab.blocks.triton.offline import STEPS, Job

_NARROW_LOAD = r"\bld\.global[.\w:]*(?<!v2)(?<!v4)(?<!v8)\.[bu]16\b"
_MATRIX = {"mma.sync": r"\bmma\.sync", "tcgen05": r"\btcgen05\.mma", "wgmma": r"\bwgmma\.mma_async"}


@dataclass(frozen=True)
class Source:
    """A kernel and its signature.

    types: for each argument "*bf16", "*fp32", "i32" and so on. constants: the constexprs. aligned: the arguments that
    are multiples of 16, which Triton's launcher detects for pointers.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str] = field(default_factory=frozenset)


def compile_source(source: Source, arch: str, config: Config) -> dict[str, Any]:
    """Return the numbers of `offline.Compiled` for one kernel, or the `error` of the compiler."""
    names = source.kernel.arg_names
    compiled, log = _compile(
        ASTSource(
            fn=source.kernel,
            signature={
                name: "constexpr" if name in source.constants else source.types[name] for name in names
            },
            constexprs=dict(source.constants),
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in sorted(source.aligned)},
        ),
        GPUTarget("cuda", int(arch.removeprefix("sm_")), 32),
        {"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    counts = {name: len(re.findall(pattern, compiled.asm["ptx"])) for name, pattern in _MATRIX.items()}
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        "shared_bytes": compiled.metadata.shared,
        "tensor_core": " + ".join(name for name, count in counts.items() if count),
        "tensor_core_count": sum(counts.values()),
        "narrow_loads": len(re.findall(_NARROW_LOAD, compiled.asm["ptx"])),
        "tensor_memory_columns": getattr(compiled.metadata, "tmem_size", None) or 0,
    }


def _compile(source: ASTSource, target: GPUTarget, options: dict[str, int]) -> tuple[Any, str]:
    """Return the compiled kernel and the output of ptxas -v, which Triton prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        compiled = triton.compile(source, target=target, options=options)
    return compiled, printed.getvalue()


def answer(line: str) -> dict[str, Any]:
    """Return the answer to one line of stdin."""
    fields = json.loads(line)
    job = Job(**(fields | {"config": Config(**fields["config"])}))
    try:
        get_ptxas(int(job.arch.removeprefix("sm_")))
    except RuntimeError as error:
        return {"missing": str(error)}
    try:
        return compile_source(importlib.import_module(job.sources).source(job), job.arch, job.config)
    except Exception as error:  # an error of the compiler is the result of this job
        lines = [text.strip() for text in str(error).splitlines() if text.strip()]
        return {"error": f"{type(error).__name__}: {' / '.join(lines[-3:])}"}


if __name__ == "__main__":
    # Only answers are written to the real stdout, because output of the compiler would break the protocol.
    replies, sys.stdout = sys.stdout, sys.stderr
    for each in sys.stdin:
        print(json.dumps(answer(each)), file=replies, flush=True)


_WIDTH = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_INPUTS = {"Q", "K", "V", "DOUT", "OUT", "DQ"}  # in the dtype of q; all other tensors are float32 state
_TABLES = {"PROGRAMS", "SEGMENTS", "LOWS", "ROWS_AT", "KEYS_AT"}
_COUNTS = {"n_programs", "n_rows", "n_keys", "H"}
_FACTORS = {"scale", "cap", "keep"}

_USUAL = {
    "NEGATIVE": False,
    "NON_FINITE": False,
    "GROUP": 4,
}  # a positive scale, four query heads for each key/value head


def source(job: Job) -> Source:
    """Return the kernel of `job` with the signature of a call on dense tensors."""
    kernel = getattr(kernels, job.kernel)
    config, dims = job.config, (job.head_dim, job.value_dim or job.head_dim)
    sizes = {
        "HEAD_DIM": dims[0],
        "VALUE_DIM": dims[1],
        "BLOCK_D": padded(dims[0]),
        "BLOCK_V": padded(dims[1]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    first, last = STEPS[job.step]
    known: dict[str, Any] = _USUAL | sizes | {"PRECISION": config.precision, "FIRST": first, "LAST": last}
    known |= {"SOFTCAP": "softcap" in job.scores, "DROPOUT": "dropout" in job.scores, "WINDOW": job.window}
    parameters = inspect.signature(kernel.fn).parameters.values()
    constants = {each.name: known[each.name] for each in parameters if "constexpr" in str(each.annotation)}
    types = {name: _type(name, job.dtype) for name in kernel.arg_names if name not in constants}
    aligned = {name for name, type in types.items() if type[0] == "*"}
    return Source(kernel, types, constants, frozenset(aligned))


def _type(name: str, dtype: str) -> str:
    if name in _TABLES:
        return "*i32"
    if name.isupper() and name not in _COUNTS:
        return f"*{_WIDTH[dtype] if name in _INPUTS else 'fp32'}"
    return "fp32" if name in _FACTORS else "i32"
