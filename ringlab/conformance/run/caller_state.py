"""The state that belongs to a caller: the settings of the process, and the arguments of a call.

A call may neither change an argument, nor leave a setting or the random numbers of the process in another
state than it found.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab.torch_modes import outside_modes

_ENVIRONMENT = "the environment"
_PYTHONS = "the seed of Python's random numbers"
_SETTINGS: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the grad mode": torch.is_grad_enabled,
    "the inference mode": torch.is_inference_mode_enabled,
    "autocast": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    "autograd's anomaly mode": torch.is_anomaly_enabled,
    "torch's deterministic mode": torch.are_deterministic_algorithms_enabled,
    "torch's number of threads": torch.get_num_threads,
    "torch's precision of float32 products": torch.get_float32_matmul_precision,
    "the kernels that torch may choose for attention": lambda: (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    ),
    "NumPy's answers to floating-point errors": np.geterr,
    "Python's garbage collector": gc.isenabled,
    _ENVIRONMENT: lambda: dict(os.environ),
}
"""How to read each setting of the process or of the thread."""
_TWISTS = 64
"""How many times Python's generator is moved on to find a later state; each time is 624 numbers of 32 bits."""


@contextmanager
def kept_modes() -> Iterator[None]:
    """Restore torch's modes and the environment after this context, so that a target cannot change them for other runs.

    A number is drawn from each random generator first, see `draw_numbers`.
    """
    before, environment = state(numbers=False), dict(os.environ)
    draw_numbers()
    try:
        yield
    finally:
        torch.set_default_dtype(before["the default dtype"])
        torch.set_grad_enabled(before["the grad mode"])
        torch.set_num_threads(before["torch's number of threads"])
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        deterministic = before["torch's deterministic mode"]
        # The mode is set only if it differs, because setting it imports torch's compiler.
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)


def draw_numbers() -> None:
    """Draw a number from each random generator, so that a call that sets a seed changes the generator's state.

    Without this, an earlier call might have left the very state that the seed sets.
    """
    torch.rand(1), np.random.random(), random.random()


@contextmanager
def unchanged(arguments: Mapping[str, Any], note: Callable[[str], None]) -> Iterator[None]:
    """Give `note` a sentence if the code in this context changes the state of the process, or one of the arguments.

    An argument may be a tensor, an array, or a list, tuple or dict of them. Its numbers, its place in memory, and
    whether it needs a gradient are compared.
    """
    before, forms = state(), {name: _form(value) for name, value in arguments.items()}
    try:
        yield
    finally:
        found = changed(before)
        found += [f"the argument {name}" for name, value in arguments.items() if _form(value) != forms[name]]
        if found:
            note(f"a call changed {' and '.join(found)}")


def state(numbers: bool = True) -> dict[str, Any]:
    """Return the settings by name, and with `numbers` the states of the random generators."""
    if not numbers:
        return {name: read() for name, read in _SETTINGS.items()}
    numpys = np.random.get_state(legacy=False)["state"]
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b""
    return {
        **state(numbers=False),
        "torch's random numbers": (torch.get_rng_state().numpy().tobytes(), cuda),
        "NumPy's random numbers": (numpys["key"].tobytes(), numpys["pos"]),
        _PYTHONS: random.getstate(),
    }


def changed(before: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings and generators that differ from the state `before`."""
    now = state()
    return [name for name, value in before.items() if not _same(name, value, now[name])]


def _same(name: str, before: Any, after: Any) -> bool:
    """Return whether a setting is the same.

    New environment variables are allowed, because libraries set some when they are imported or first compile.
    Draws from Python's generator are allowed, because packages that check types draw numbers. Draws leave the
    words of the generator as they are, or replace all of them by the next words of its sequence. A seed
    replaces them by other words.
    """
    if name == _ENVIRONMENT:
        return before.items() <= after.items()
    if name != _PYTHONS or before == after:
        return bool(before == after)
    words, moving = after[1][:-1], random.Random()
    moving.setstate(before)
    for _ in range(_TWISTS):
        if moving.getstate()[1][:-1] == words:
            return True
        moving.getrandbits(32 * 624)
    return False


def _form(value: Any) -> Any:
    """Return what must stay the same in an argument, as data that can be compared."""
    if isinstance(value, Tensor):
        with outside_modes():  # a meter must not count what is done here
            x = value.detach()
            # NumPy has no bfloat16
            numbers = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).cpu().numpy().tobytes()
        gradient = value.is_leaf and value.grad is not None
        hooked = bool(value._backward_hooks)
        place = x.data_ptr(), tuple(x.shape), x.stride(), x.dtype
        return place, value.requires_grad, gradient, hooked, numbers
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, Mapping):
        return type(value), {key: _form(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [_form(each) for each in value]
    return None  # an object without numbers of the caller, such as a ring, or a number
