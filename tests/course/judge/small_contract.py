"""A contract of two stages, small enough to read at a glance, for tests of the judge itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ringlab_course.checking.answers import compare_with
from ringlab_course.checking.contract import Check, Exercise, Stage
from ringlab_course.checking.failures import Failure

HINTS = ("What is doubled?", "Multiply.", "$y = 2x$")


def _double(subject, rng) -> None:
    x = rng.standard_normal(5)
    compare_with(subject.call(x), 2 * x, bound=1e-12)


def _double_hidden(subject, rng) -> None:
    x = rng.standard_normal((3, 4)).astype(np.float32)
    answer = subject.call(x)
    if not isinstance(answer, np.ndarray) or answer.dtype != np.float32:
        raise Failure("The answer should keep the dtype.", f"probe {x.tolist()}")
    compare_with(answer, 2 * x, bound=1e-6, case=f"probe {x.tolist()}")


def _sum(P: int):
    def check(subject, rng) -> None:
        import torch

        shards = [torch.from_numpy(rng.standard_normal((1, 1, 4, 8))) for _ in range(P)]
        outcome = subject.run_ring(P, shards)
        for rank, answer in enumerate(outcome.results):
            compare_with(answer, sum(shards).numpy(), bound=1e-12, case=f"rank {rank} of {P}")
        if any(outcome.trace.rounds(rank) != P - 1 for rank in range(P)):
            raise Failure(f"{P - 1} exchanges are enough.", f"rank 0 made {outcome.trace.rounds(0)}")
        if any(outcome.trace.bytes_sent(rank) != (P - 1) * 4 * 8 * 8 for rank in range(P)):
            raise Failure("Every exchange sends one shard.")
        if any(outcome.trace.peers(rank) - {(rank + 1) % P} for rank in range(P)):
            raise Failure("Send to the next rank only.")

    return check


DOUBLE = Stage(
    id="90.double", function="double", title="double", hints=HINTS,
    checks=(
        Check("values", 2, "visible", "values", _double),
        Check("dtype", 3, "held-out", "dtype", _double_hidden),
    ),
)  # fmt: skip
RING = Stage(
    id="90.ring", function="ring_sum", title="ring sum", hints=HINTS, kind="ring",
    checks=(
        Check("one", 1, "visible", "one rank", _sum(1)),
        Check("two", 1, "visible", "two ranks", _sum(2)),
        Check("three", 3, "held-out", "three ranks", _sum(3)),
    ),
)  # fmt: skip
EXERCISE = Exercise(id="90", slug="90_small", title="small", stages=(DOUBLE,))
RING_EXERCISE = Exercise(id="90", slug="90_ring", title="ring", stages=(RING,))

RIGHT = "def double(x):\n    return x + x\n"
RIGHT_RING = """
def ring_sum(ring, x):
    total = x.clone()
    for step in range(ring.world_size - 1):
        x = ring.shift(x)
        total += x
    return total
"""


def notebook(folder: Path, *sources: str, grade: str = "90.double", name: str = "handed_in.ipynb") -> Path:
    """Write a notebook of code cells, the last of them marked as graded, and return its path."""
    cells = [
        {"cell_type": "code", "source": s, "metadata": {}, "outputs": [], "execution_count": None}
        for s in sources
    ]
    cells[-1]["metadata"] = {"grade": grade}
    path = folder / name
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}))
    return path
