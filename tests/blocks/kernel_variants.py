"""Variants of the kernels that were compiled and left out, and their figures: `python -m tests.blocks.kernel_variants`.

docs/guide/triton.md says what the figures in benchmarks/results/kernels/variants.json show. Each variant is a change of the kernels'
text, or of their signature. It compiles; nobody has run it.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ringlab.blocks.triton import compiling, offline
from ringlab.blocks.triton.compiling import Source
from ringlab.blocks.triton.configs import COMPILED, KERNELS, choose
from ringlab.blocks.triton.offline import Job
from tests.blocks.compiled import FILE
from tests.blocks.kernel_mutants import loaded, source

RESULTS = FILE.with_name("variants.json")
HEADS = {"forward_step": "H", "backward_dq": "H", "backward_dkv": "(H // GROUP)"}
SMALLEST_LOOP = 100  # instructions: shorter ones wait for a barrier


def persistent(text: str) -> str:
    """Return the kernels with a loop over entries of the table around each."""
    for kernel, heads in HEADS.items():
        begin = text.index("    program = tl.program_id(0)", text.index(f"def {kernel}("))
        after = re.search(r"\n(# fmt: off\n)?@triton\.jit", text[begin:])
        end = begin + after.start() if after else len(text)
        body = text[begin:end].replace("tl.program_id(0)", "place")
        loop = f"for place in tl.range(tl.program_id(0), n_programs * {heads} * 4, tl.num_programs(0)):"
        text = f"{text[:begin]}    {loop}\n{textwrap.indent(body, '    ')}\n{text[end:]}"
    return text


def with_descriptors(text: str) -> str:
    """Return the kernels with tensor descriptors, made by each program, for the two tensors that it walks over."""
    start = "    q = tile(q_base, row, q_l, owned, BLOCK_M, HEAD_DIM, BLOCK_D, True)\n"
    keys = _made("k", "HEAD_DIM", "N", "D", 4) + _made("v", "VALUE_DIM", "N", "V", 4)
    rows = _made("q", "HEAD_DIM", "M", "D", 8) + _made("dout", "VALUE_DIM", "M", "V", 8)
    of_keys = ("k", "k_base, key, k_l"), ("v", "v_base, key, v_l")
    of_rows = ("q", "q_base, row, q_l"), ("dout", "dout_base, row, dout_l")
    text = _walking(text, "_attend", of_keys, start, keys + start, "q, k_base, v_base", "q, k_desc, v_desc")
    text = _walking(
        text, "_add_to_dq", of_keys, start, keys + start, "delta, k_base, v_base", "delta, k_desc, v_desc"
    )
    begin = "        lse_base = LSE +"
    calls = "k, v, q_base, dout_base", "k, v, q_desc, dout_desc"
    return _walking(text, "_add_to_dkv", of_rows, begin, rows + begin, *calls)


def _made(name: str, dim: str, side: str, deep: str, indent: int) -> str:
    shape = f"shape=[n_rows, {dim}], strides=[{name}_l, 1], block_shape=[BLOCK_{side}, BLOCK_{deep}]"
    return f"{' ' * indent}{name}_desc = tl.make_tensor_descriptor({name}_base, {shape})\n"


def _walking(
    text: str,
    helper: str,
    loads: tuple[tuple[str, str], ...],
    begin: str,
    made: str,
    call: str,
    with_made: str,
) -> str:
    """The text in which `helper` loads by descriptors, and the kernel after it makes them and passes them on."""
    at = text.index(f"def {helper}(")
    inside = text.index("):\n", at)
    kernel = text.index("\ndef ", inside) if helper != "_attend" else text.index("def forward_step(")
    head, body, rest = text[:inside], text[inside:kernel], text[kernel:]
    for name, where in loads:
        body, count = re.subn(
            rf"{name} = tile\({re.escape(where)}, [^\n]*\)\n",
            f"{name} = {where.split(',')[0]}.load([{where.split(', ')[1]}, 0])\n",
            body,
        )
        assert count == 1, (helper, name)
    stop = rest.find("\n@triton.jit\n", 1)
    own, others = (rest[:stop], rest[stop:]) if stop > 0 else (rest, "")
    assert own.count(begin) == 1 and own.count(call) == 2, (helper, own.count(begin), own.count(call))
    return head + body + own.replace(begin, made).replace(call, with_made) + others


def constant_strides(job: Job) -> Source:
    """Return the signature of `job` in which the strides of tokens are constants: those of dense tensors."""
    found = compiling.source(job)
    fixed = {name: job.head_dim for name in found.types if name in ("q_l", "k_l", "v_l", "dout_l")}
    types = {name: kind for name, kind in found.types.items() if name not in fixed}
    return Source(found.kernel, types, {**found.constants, **fixed}, found.aligned - set(fixed))


Signature = Callable[[Job], Source]
VARIANTS: dict[str, tuple[Callable[[str], str], Signature]] = {
    "shipped": (str, compiling.source),
    "persistent grid": (persistent, compiling.source),
    "tensor descriptors": (with_descriptors, compiling.source),
    "constant strides": (str, constant_strides),
}


def compile_variant(job: Job, kernels: ModuleType, signature: Signature) -> dict[str, int | list[int]]:
    """Return registers, spills, instructions of the whole kernel, and those of its two innermost loops."""
    import triton

    found = signature(job)
    names = found.kernel.arg_names
    compiled, log = compiling._compile(
        triton.compiler.ASTSource(
            fn=getattr(kernels, job.kernel),
            signature={n: "constexpr" if n in found.constants else found.types[n] for n in names},
            constexprs=dict(found.constants),
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in sorted(found.aligned)},
        ),
        triton.backends.compiler.GPUTarget("cuda", int(job.arch.removeprefix("sm_")), 32),
        {"num_warps": job.config.num_warps, "num_stages": job.config.num_stages},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [
        (int(at, 16), what)
        for at, what in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    ]
    jumps = [(int(to[1], 16), at) for at, what in lines if (to := re.search(r"BRA.*?(0x[0-9a-f]+)", what))]
    loops = sorted(sum(to <= at <= end for at, _ in lines) for to, end in jumps if to < end)
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", log))),
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill stores", log))),
        "instructions": len(lines),
        "innermost": [length for length in loops if length >= SMALLEST_LOOP][:2],
    }


def measured() -> dict[str, Any]:
    """Return the figures of every variant for the shipped tiles, 16-bit inputs, and head dims of 64 and 128."""
    rows = []
    for name, (change, signature) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            kernels = loaded(change(source()), Path(folder))
            for arch in COMPILED:
                if arch == "sm_80" and name in ("persistent grid", "tensor descriptors"):
                    continue
                for kernel in KERNELS:
                    for head_dim in (64, 128):
                        config = choose(kernel, arch, head_dim, "bfloat16")
                        job = Job(kernel, arch, head_dim, "bfloat16", config)
                        figures = compile_variant(job, kernels, signature)
                        named = {"variant": name, "arch": arch, "kernel": kernel, "head_dim": head_dim}
                        rows.append(named | {"config": str(config)} | figures)
    return {"triton": importlib.metadata.version("triton"), "rows": rows}


if __name__ == "__main__":
    import os

    with tempfile.TemporaryDirectory() as cache:
        os.environ |= offline.clean_environment(cache)
        RESULTS.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
