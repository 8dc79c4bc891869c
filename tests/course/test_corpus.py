"""The corpus of the lessons is real text, equal on every run, in the shapes that the caller requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringlab.errors import CourseError
from ringlab_course.notebook import corpus


def test_tokens_are_the_bytes_of_the_library():
    import heapq

    source = Path(heapq.__file__).read_bytes()
    np.testing.assert_array_equal(corpus.tokens(8192), np.frombuffer(source[:8192], dtype=np.uint8))
    assert corpus.tokens(8192).dtype == np.int64
    assert corpus.text(47) == '"""Heap queue algorithm (a.k.a. priority queue)'  # lesson 00 shows it


def test_a_longer_text_begins_with_the_shorter_one():
    long = corpus.tokens(300_000)
    assert len(long) == 300_000 and np.array_equal(long[:8192], corpus.tokens(8192))


def test_more_than_there_is_is_an_error():
    with pytest.raises(CourseError, match="bytes of Python source"):
        corpus.tokens(10**9)


def test_shapes_and_scale_of_queries_keys_and_values():
    q, k, v = corpus.qkv(256, heads=6, kv_heads=2, head_dim=16)
    assert q.shape == (1, 6, 256, 16) and k.shape == v.shape == (1, 2, 256, 16)
    assert corpus.qkv(8, heads=3)[1].shape == (1, 3, 8, 64)
    for tensor in (q, k, v):
        assert str(tensor.dtype) == "torch.float32" and tensor.is_contiguous()
        assert 0.7 < float(tensor.std()) < 1.3
    assert not np.allclose(k, v)


def test_equal_bytes_at_different_places_differ():
    x = corpus.embedded(64)
    quotes = np.flatnonzero(corpus.tokens(64) == ord('"'))[:2]
    assert not np.allclose(x[quotes[0]], x[quotes[1]])
    np.testing.assert_allclose(np.sqrt((x**2).mean(axis=1)), 1.0)


def test_seeds_decide_and_another_process_gets_the_same():
    first, second, other = corpus.qkv(32), corpus.qkv(32), corpus.qkv(32, seed=1)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert not first[0].equal(other[0])
    program = "from ringlab_course import corpus; print(corpus.qkv(32)[0].double().sum().item().hex())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == first[0].double().sum().item().hex()
