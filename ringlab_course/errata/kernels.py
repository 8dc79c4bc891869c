"""Claims about kernels; what a compiler says of them needs no GPU."""

from __future__ import annotations

from typing import Any

from ringlab.blocks.triton.configs import Config
from ringlab.blocks.triton.offline import Job, compile_all
from ringlab_course.errata.entry import Entry, Figure

KERNELS_OF = "ringlab_course.errata.length_kernels"


def _constant_from_a_tensor() -> dict[str, Any]:
    config = Config(block_m=128, block_n=128, num_warps=4, num_stages=1)
    names, arch = ("published", "mended"), "sm_90"
    jobs = [Job(name, arch, 128, "float32", config, sources=KERNELS_OF) for name in names]
    made = compile_all(jobs, processes=1)
    return {"arch": arch, **{name: not each.error for name, each in zip(names, made, strict=True)}}


KERNELS = (
    Entry(
        "A kernel may compute a compile-time constant from a tensor",
        "A published kernel, with its launch, loads a length and declares the rest of it a `tl.constexpr`, the "
        "size of its tile.",
        "A `tl.constexpr` is known before the kernel runs, a loaded number only while it runs. Triton does not "
        "compile the kernel, here for {arch}, so nobody can have run it. Give the kernel a fixed block size and "
        "mask what lies beyond the length: that compiles.",
        "Code that was never run is presented as a complete implementation, and its claims about speed were not "
        "measured either.",
        "12",
        (
            Figure("published", "the published kernel compiles", True),
            Figure("mended", "a fixed block and a mask: compiles", None),
        ),
        _constant_from_a_tensor,
        modules=(KERNELS_OF,),
    ),
)
