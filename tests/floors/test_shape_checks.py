"""While tests run, the shapes in annotations are checked, and an import of ringlab loads few modules.

The loaded modules are counted in a fresh interpreter, so that no time needs to be measured.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch
from jaxtyping import TypeCheckError

from ringlab import blocks
from tests.conftest import CHECKOUT

pytestmark = pytest.mark.thorough


def inputs(B: int = 1, H: int = 4, K: int = 2, L: int = 3, D: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, heads, L, D, generator=generator) for heads in (H, K, K))


def test_right_shapes_pass() -> None:
    q, k, v = inputs()
    part = blocks.get_block("naive", q).forward(q, k, v, causal=True, scale=1.0)
    assert part.out.shape == q.shape


def test_a_missing_axis_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeCheckError, match=r"naive\.Naive\.forward"):
        blocks.get_block("naive", q).forward(q[0], k, v, causal=True, scale=1.0)


def test_axes_that_contradict_each_other_are_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeCheckError, match="Lk"):
        blocks.get_block("naive", q).forward(q, k, v[:, :, 1:], causal=True, scale=1.0)


def test_array_types_exist_at_run_time() -> None:
    """No array type is imported only for the type checker, because the shape checks could not see it."""
    modules = [
        path for package in ("ringlab", "ringlab_course") for path in (CHECKOUT / package).rglob("*.py")
    ]
    assert {str(path): hidden for path in modules if (hidden := hidden_array_types(path.read_text()))} == {}


def hidden_array_types(source: str) -> list[str]:
    """Return the modules of array types that `source` imports under TYPE_CHECKING."""
    guards = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    imported = [n for guard in guards for n in ast.walk(guard) if isinstance(n, ast.ImportFrom)]
    return [str(n.module) for n in imported if n.module in ("jaxtyping", "ringlab.types")]


HEAVY = {"torch", "triton", "jupyter", "jupyterlab", "jupyter_core", "notebook", "ipykernel", "IPython"}
HEAVY |= {"ipywidgets", "matplotlib", "nbformat", "nbclient", "jupytext", "typer", "rich", "scipy", "jax"}


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules in sys.modules after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_ringlab_loads_nothing_heavy() -> None:
    loaded = loaded_by("import ringlab")
    assert "ringlab" in loaded
    assert loaded & (HEAVY | {"numpy"}) == set()


def test_the_oracle_stands_on_numpy_alone() -> None:
    loaded = loaded_by("import ringlab.oracle")
    assert "numpy" in loaded
    assert loaded & HEAVY == set()
    code = "import sys, ringlab.oracle\nprint(*(name for name in sys.modules if name.startswith('ringlab.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"ringlab.oracle", "ringlab.errors"}


def test_attention_loads_torch_but_neither_triton_nor_jupyter() -> None:
    loaded = loaded_by("from ringlab import ring_attention, zigzag, VirtualCluster")
    assert loaded & HEAVY == {"torch"}


def test_every_public_name_can_be_had() -> None:
    code = "import ringlab\nassert all(getattr(ringlab, n) is not None for n in ringlab.__all__)\nprint(len(dir(ringlab)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 5
