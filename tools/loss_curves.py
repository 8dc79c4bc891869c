"""Loss curves of the same training on one process and over rings: `python -m tools.loss_curves FILE`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ringlab.bench.device import machine
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.nn import ModelConfig, Recipe, train
from ringlab.nn.text import library

RECIPE = Recipe(ModelConfig(width=32, layers=2, heads=4, kv_heads=2, hidden=96), S=128, batch=2, steps=200)
ALONE = "1 process"
RINGS: dict[str, dict[str, Any]] = {
    "4 ranks, contiguous": {"layout": "contiguous"},
    "4 ranks, zig-zag": {"layout": "zigzag"},
    "2 × 2 ranks, hybrid": {"layout": "zigzag", "schedule": "hybrid(ring=2, ulysses=2)"},
}
"""The options in which each ring differs from the recipe. The single process uses torch's own attention."""


def curves(recipe: Recipe) -> dict[str, list[float]]:
    """Return the loss of every step, in nats per byte, for one process and each of RINGS."""
    cluster = VirtualCluster(4, memory=False)
    rings = {
        name: cluster.run(train, replace(recipe, **changes)).results[0] for name, changes in RINGS.items()
    }
    return {ALONE: train(None, recipe), **rings}


def differences(curves: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest relative difference of each ring's curve from the curve of one process."""
    alone = curves[ALONE]
    return {
        name: max(abs(a - b) / abs(b) for a, b in zip(curve, alone, strict=True))
        for name, curve in curves.items()
        if name != ALONE
    }


def measure(recipe: Recipe = RECIPE) -> dict[str, Any]:
    """Return recipe, text, machine, curves and their differences as data for JSON."""
    torch.set_num_threads(1)
    found = curves(recipe)
    text = library()
    return {
        "bench": "loss_curves",
        "recipe": asdict(recipe),
        "text": {"name": text.name, "bytes": len(text), "sha256": text.digest},
        "largest_relative_difference": differences(found),
        "curves": found,
        "machine": machine(),
    }


if __name__ == "__main__":
    result = measure()
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    for name, difference in result["largest_relative_difference"].items():
        print(f"{name}: at most {difference:.1e} from 1 process")
