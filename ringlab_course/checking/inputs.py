"""Random inputs."""

from __future__ import annotations

import numpy as np
import torch


def random(rng: np.random.Generator, *shape: int, size: float = 1.0) -> torch.Tensor:
    """Return a float32 tensor of normal numbers."""
    return torch.from_numpy((size * rng.standard_normal(shape)).astype(np.float32))
