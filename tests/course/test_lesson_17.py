"""Lesson 17's last task judges itself: as it stands it says "not yet", its answer is "done", wrong ones are not.

Lessons say that their kernels run on a GPU as they stand: a compiler agrees, where there is none.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringlab_course.builder.build import find_root
from ringlab_course.builder.sources import read_percent

SOURCE = find_root() / "ringlab_course/lessons/17_ring_in_jax.py"
KEPT = {"P", "tokens", "text", "q", "even"}
"""Variables that the task uses; of the other cells only imports and functions are run."""
ALL = "for step in range(1, layout.P):"
ANSWER = "for step in range(1, min(layout.P, -(-(window - 1) // q.shape[2]) + 1)):"


def needed(cell: str, first: bool) -> str:
    """Return what of a cell the task needs; of the first, where JAX is set up, all."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    body = [
        node
        for node in ast.parse(cell).body
        if first or isinstance(node, kinds) or (isinstance(node, ast.Assign) and KEPT & names(node))
    ]
    return "\n".join(ast.unparse(node) for node in body)


def names(node: ast.Assign) -> set[str]:
    return {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}


def task(loop: str) -> str:
    """Return a script of the task with `loop` in place of the one that visits everybody."""
    *cells, last = [cell.source for cell in read_percent(SOURCE).cells if cell.cell_type == "code"]
    script = "\n".join(needed(cell, cell is cells[0]) for cell in cells)
    before, _, after = script.rpartition(ALL)
    assert before and "near(step)" in after, "the task no longer has this loop"
    return f"{before}{loop}{after}\n{last}"


def test_the_answer_that_the_lesson_shows_is_the_one_tried_here() -> None:
    assert ANSWER.removeprefix("for step in ").removesuffix(":") in SOURCE.read_text(encoding="utf-8")


@pytest.mark.needs_jax
@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (ANSWER, ["values right: True   messages: 4", "done"]),
        ("for step in range(1, 2):", ["values right: False   messages: 2", "not yet"]),
        ("for step in (2, 1):", ["values right: False   messages: 4", "not yet"]),
    ],
)
def test_the_task_judges_itself(loop: str, told: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", task(loop)],
        cwd=tmp_path,
        env=os.environ | {"RINGLAB_STATIC": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line[: len(want)] for line, want in zip(done.stdout.splitlines()[-2:], told, strict=True)] == told


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
    """Return the source of a notebook's kernels, renamed; of a source with solutions, the solved ones."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"(?:^|\n)(@triton\.jit\ndef .*?)(?=\n\n|\n# %%|\Z)", text, re.DOTALL)
    return "\n\n\n".join(re.sub(r"def (\w+_kernel)", rf"def {prefix}_\1", one) for one in found)


@pytest.mark.needs_triton
@pytest.mark.parametrize("pointer", ["*fp32", "*fp16"])
def test_the_first_kernels_compile_for_a_gpu(tmp_path: Path, pointer: str) -> None:
    course, name = find_root() / "ringlab_course", "04_triton_from_zero"
    lesson = kernels(course / f"lessons/{name}.py", "lesson")
    exercise = kernels(course / f"exercises/e{name}/exercise.py", "exercise")
    # The lesson's kernels multiply weights in float32: they are for float32 only, as its text uses them.
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
