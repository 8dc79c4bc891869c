"""The checks of the Triton kernels can fail: each wrong kernel fails a check, and the right ones pass all."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringlab.blocks.triton as package
from tests.blocks.kernel_checks import CHECKS
from tests.blocks.kernel_mutants import MUTANTS, Mutant, loaded, mutated, source

pytestmark = [pytest.mark.thorough, pytest.mark.needs_interpreter]


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unchanged kernels pass when loaded like the mutants, so the loading itself breaks nothing."""
    monkeypatch.setattr(package, "kernels", loaded(source(), tmp_path), raising=False)
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_dies(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = loaded(mutated(source(), mutant), tmp_path)
    monkeypatch.setattr(package, "kernels", wrong, raising=False)
    with pytest.raises(AssertionError):
        CHECKS[mutant.dies_in]()
