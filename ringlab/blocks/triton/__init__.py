"""Triton kernels that compute a whole ring step in one launch, on a GPU or in Triton's interpreter.

`TritonBlock` is loaded at first use: importing the package loads neither Triton nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringlab.blocks.triton.block import TritonBlock as TritonBlock


def __getattr__(name: str) -> Any:
    if name != "TritonBlock":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringlab.blocks.triton.block import TritonBlock

    return TritonBlock
