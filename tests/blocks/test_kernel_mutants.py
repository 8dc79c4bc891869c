"""The checks of the Triton kernels can fail: each wrong kernel dies in one of them, the right ones in none."""

from __future__ import annotations

from pathlib import Path

import pytest

import ringlab.blocks.triton as package
from tests.blocks.kernel_checks import CHECKS
from tests.blocks.kernel_mutants import MUTANTS, Mutant, loaded, mutated, source

pytestmark = pytest.mark.needs_interpreter


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are, but loaded like the mutants, so that no mutant dies of that."""
    monkeypatch.setattr(package, "kernels", loaded(source(), tmp_path), raising=False)
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_dies(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = loaded(mutated(source(), mutant), tmp_path)
    monkeypatch.setattr(package, "kernels", wrong, raising=False)
    with pytest.raises(AssertionError):
        CHECKS[mutant.dies_in]()


@pytest.mark.parametrize(
    ("function", "old", "message"),
    (
        ("right", "absent", "got: 0 times"),
        ("right", "twice", "got: 2 times"),
        ("gone", "", "a function gone"),
    ),
)
def test_a_change_that_does_not_apply_once_is_an_error(function: str, old: str, message: str) -> None:
    text = "@triton.jit\ndef right(x):\n    twice = x\n    return twice\n\n\n@triton.jit\ndef other():\n    absent\n"
    with pytest.raises(ValueError, match=message):
        mutated(text, Mutant("", function, old, "changed", ""))
    assert mutated(text, Mutant("", "other", "absent", "x", "")) == text.replace("absent", "x")
