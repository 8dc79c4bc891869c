"""Batches are a function of their number, so that the number is the position in the data."""

from __future__ import annotations

import heapq
import itertools
import platform
from pathlib import Path

import pytest
import torch

from ringlab.errors import TrainingError
from ringlab.nn import text


def test_the_text_is_the_library_and_names_its_python() -> None:
    library = text.library()
    assert Path(heapq.__file__).read_bytes() in library.content
    assert platform.python_version() in library.name and len(library) > 200_000
    assert len(library.digest) == 12


def test_batches_are_stretches_of_the_text_and_depend_on_number_and_seed_alone() -> None:
    library = text.library()
    batch = text.batch(library, S=64, rows=3, number=5)
    assert batch.shape == (3, 64) and batch.dtype == torch.int64
    assert all(bytes(row.tolist()) in library.content for row in batch)
    assert torch.equal(batch, text.batch(library, 64, 3, 5))
    for other in (text.batch(library, 64, 3, 6), text.batch(library, 64, 3, 5, seed=1)):
        assert not torch.equal(batch, other)


def test_an_iterator_starts_anywhere() -> None:
    library = text.library()
    numbers, tensors = zip(*itertools.islice(text.batches(library, 16, 2, start=7), 3), strict=True)
    assert numbers == (7, 8, 9)
    assert torch.equal(tensors[1], text.batch(library, 16, 2, 8))


def test_a_text_too_short_is_refused() -> None:
    assert text.batch(text.Text("abc", b"abc"), 3, 1, 0).tolist() == [[97, 98, 99]]
    with pytest.raises(TrainingError, match="of 1 to 3 bytes"):
        text.batch(text.Text("abc", b"abc"), 4, 1, 0)


def test_a_python_without_its_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(TrainingError, match=r"no argparse\.py, bisect\.py"):
        text.library.__wrapped__()
