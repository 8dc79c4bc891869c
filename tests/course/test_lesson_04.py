"""The kernels of lesson 04 and its exercise compile for a GPU without changes, even on a machine without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringlab_course.builder.build import find_root

pytestmark = pytest.mark.thorough

COMPILE = """
import kernels_of_lessons as kernels, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BLOCKS = {"D": 32, "BLOCK_M": 64, "BLOCK_N": 64}
CONSTANTS = {"lesson_flash_kernel": BLOCKS, "lesson_causal_kernel": BLOCKS | {"STEP": 3},
             "lesson_softmax_kernel": {"BLOCK": 64, "OTHER": -float("inf")},
             "exercise_softmax_kernel": {"BLOCK": 64}, "exercise_flash_kernel": BLOCKS, "exercise_causal_kernel": BLOCKS}
for name, constants in CONSTANTS.items():
    kernel = getattr(kernels, name)
    types = {"lse_ptr": "*fp32", "scale": "fp32"}
    signature = {n: "constexpr" if n in constants else types.get(n, POINTER if n.endswith("_ptr") else "i32")
                 for n in kernel.arg_names}
    places = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
    print(name)
"""


def kernels(path: Path, prefix: str) -> str:
    """Return a notebook's kernels from its source, solved and with `prefix` added to their names."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"(?:^|\n)(@triton\.jit\ndef .*?)(?=\n\n|\n# %%|\Z)", text, re.DOTALL)
    return "\n\n\n".join(re.sub(r"def (\w+_kernel)", rf"def {prefix}_\1", one) for one in found)


@pytest.mark.needs_triton
@pytest.mark.parametrize("pointer", ["*fp32", "*fp16"])
def test_the_first_kernels_compile_for_a_gpu(tmp_path: Path, pointer: str) -> None:
    course, name = find_root() / "ringlab_course", "04_triton_from_zero"
    lesson = kernels(course / f"lessons/{name}.py", "lesson")
    exercise = kernels(course / f"exercises/e{name}/exercise.py", "exercise")
    # The lesson's kernels multiply weights in float32, so they work for float32 only, as the lesson says.
    skip = 'CONSTANTS = {k: v for k, v in CONSTANTS.items() if "exercise" in k}\nfor name,'
    script = COMPILE if pointer == "*fp32" else COMPILE.replace("for name,", skip, 1)
    (tmp_path / "kernels_of_lessons.py").write_text(
        f"import triton\nimport triton.language as tl\n\n{lesson}\n\n\n{exercise}\n", encoding="utf-8"
    )
    run = subprocess.run(
        [sys.executable, "-c", script.replace("POINTER", repr(pointer))],
        cwd=tmp_path, env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(run.stdout.split()) == (6 if pointer == "*fp32" else 3)
