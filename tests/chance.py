"""Random draws that depend only on the seed of the run and the test's name, not on earlier tests."""

from __future__ import annotations

import os
import random
import secrets
import zlib

import hypothesis
import numpy
import torch
from hypothesis import core
from hypothesis.internal.conjecture import providers

_fresh = random.Random()
"""The source that replaces the system's entropy, in `numpy.random.default_rng()` and in seeds of gradings."""


def install(seed: int) -> None:
    """Derive this process's random draws, and the order of sets of strings in its children, from `seed`.

    With the seed 0, Hypothesis derives its examples from the code of each test. Any other seed is also the
    seed of Hypothesis.
    """
    secrets.randbits = numpy.random.bit_generator.randbits = _fresh.getrandbits  # type: ignore[attr-defined]
    os.environ["PYTHONHASHSEED"] = str(seed % 2**32)
    # Otherwise the examples that Hypothesis draws would depend on the modules that happen to be imported.
    providers._get_local_constants = providers.Constants
    hypothesis.settings.load_profile("searching" if seed else "same")
    core.global_force_seed = seed or None


def begin(*names: object) -> None:
    """Set every generator of this process to the state that belongs to `names`."""
    seed = zlib.crc32(repr(names).encode())
    for set_seed in (random.seed, numpy.random.seed, torch.manual_seed, _fresh.seed):
        set_seed(seed)
