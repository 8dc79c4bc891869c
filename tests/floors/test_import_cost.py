"""What an import pulls in: asked of a fresh interpreter, so no clock is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_the_oracle_does_not_load_torch() -> None:
    loaded = loaded_by("import ringlab.oracle")
    assert "numpy" in loaded
    assert loaded & HEAVY == set()


def test_attention_loads_torch_but_neither_triton_nor_jupyter() -> None:
    loaded = loaded_by("from ringlab import ring_attention, zigzag, VirtualCluster")
    assert loaded & HEAVY == {"torch"}


@pytest.mark.parametrize("name", ["torch", "matplotlib"])
def test_a_heavy_import_is_noticed(name: str) -> None:
    assert loaded_by(f"import ringlab, {name}") & HEAVY >= {name}


def test_every_public_name_can_be_had() -> None:
    code = "import ringlab\nassert all(getattr(ringlab, n) is not None for n in ringlab.__all__)\nprint(len(dir(ringlab)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 5
