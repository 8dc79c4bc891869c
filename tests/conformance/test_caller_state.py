"""The suite notes every change that a call makes to its arguments or to the state of the process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ringlab.conformance.run.caller_state import kept_modes, unchanged
from ringlab.conformance.run.memory_forms import AWAY, FORMS, WORDS, away_in
from ringlab.conformance.run.run import Run


def noted(change: Callable[[dict[str, Any]], Any]) -> list[str]:
    """Return the notes about a change that a call makes to its arguments or to the process."""
    numbers = torch.arange(4.0)
    given = {
        "q": numbers[1:],
        "positions": [torch.arange(2)],
        "options": {"scale": np.ones(2)},
        "layout": "zigzag",
    }
    found: list[str] = []
    with kept_modes(), unchanged(given, found.append):
        change(given)
    return found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda given: given["q"].mul_(2), "the argument q"),
        (lambda given: given["q"].requires_grad_(), "the argument q"),
        (lambda given: given["positions"].clear(), "the argument positions"),
        (lambda given: given["positions"][0].add_(1), "the argument positions"),
        (lambda given: given["options"].update(scale=1), "the argument options"),
        (lambda given: torch.rand(1), "torch's random numbers"),
        (lambda given: np.random.seed(3), "NumPy's random numbers"),
        (lambda given: random.seed(3), "the seed of Python's random numbers"),
        (lambda given: os.environ.update(PATH="/ring"), "the environment"),
        (lambda given: os.environ.pop("PATH"), "the environment"),
        (lambda given: torch.set_default_dtype(torch.float64), "the default dtype"),
        (lambda given: torch.set_num_threads(torch.get_num_threads() + 1), "torch's number of threads"),
        (lambda given: torch.set_grad_enabled(False), "the grad mode"),
    ],
)
def test_a_change_is_noted_by_its_name(change: Callable[[dict[str, Any]], Any], named: str) -> None:
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), dict(os.environ)
    assert noted(change) == [f"a call changed {named}"]
    assert before == (
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), dict(os.environ)
    )  # fmt: skip


def test_what_libraries_do_is_no_change() -> None:
    """Packages that check types draw from Python's generator, and others set variables of their own."""
    assert noted(lambda given: [random.random() for _ in range(2_000)]) == []
    assert noted(lambda given: os.environ.update(RING="1")) == [] and "RING" not in os.environ


@pytest.mark.parametrize("form", WORDS)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_form_in_memory_changes_no_value(form: str, heads: int) -> None:
    shape = [2, 6, 6, 4]
    q, k, v, dout = (torch.randn(shape) for _ in range(4))
    k, v = (x.narrow(heads, 0, 1).expand_as(x).contiguous() for x in (k, v))
    made = FORMS[form]([q, k, v, dout], heads)
    assert all(torch.equal(x, y) for x, y in zip(made, (q, k, v, dout), strict=True))
    assert any(not x.is_contiguous() or x.storage_offset() for x in made)


def test_tensors_in_lists_get_an_offset_too() -> None:
    (ends,), name = away_in([torch.arange(3)]), away_in("zigzag")
    assert ends.tolist() == [0, 1, 2] and ends.storage_offset() == AWAY and name == "zigzag"


def test_padding_with_holes_hides_padding_from_tokens_in_each_sequence() -> None:
    run = Run(1, 6, "contiguous", False, B=2, holes=((1, 2, 3), (0, 1, 5)))
    assert run.padded_tokens.tolist() == [
        [False, True, True, False, False, False],
        [True, False, False, False, False, False],
    ]
    seen = run.visible()[:, 0]
    assert seen[0, 0].tolist() == [True, False, False, True, True, True] and not seen[1, 1, 0]
