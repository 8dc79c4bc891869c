"""The reads and writes of kernels as a few arrays, the form in which a worker sends them to the judge.

The worker runs the submission's code, so these records are only its claim. Their form is checked here, but
their truth cannot be. So checks use values wherever values are a proof, and records only for counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringlab_course.checking.protocol import ProtocolError

if TYPE_CHECKING:
    from ringlab_course.checking.accesses import Access

KINDS = ("load", "store")
MOST = 100_000
"""The most accesses that one call may make."""


def written_down(accesses: Sequence[Access]) -> dict[str, Any]:
    """Return the accesses as arrays.

    For each access these are its program, kind, argument, number of masked lanes and shape; the offsets of
    all accesses follow each other in one array.
    """
    names = sorted({access.argument for access in accesses})
    deepest = max((len(access.shape) for access in accesses), default=0)
    return {
        "names": names,
        "programs": np.array([access.program for access in accesses], np.int64).reshape(-1, 3),
        "kinds": np.array([KINDS.index(access.kind) for access in accesses], np.int64),
        "arguments": np.array([names.index(access.argument) for access in accesses], np.int64),
        "masked": np.array([access.masked for access in accesses], np.int64),
        "shapes": np.array(
            [(*access.shape, *(1,) * (deepest - len(access.shape))) for access in accesses], np.int64
        ).reshape(len(accesses), deepest),
        "lengths": np.array([access.offsets.size for access in accesses], np.int64),
        "offsets": np.concatenate([np.zeros(0, np.int64), *(access.offsets.ravel() for access in accesses)]),
    }


def taken_in(value: Any) -> tuple[Any, tuple[Access, ...]]:
    """Return the answer and the accesses of a recorded call. Raises: ProtocolError if their form is wrong."""
    from ringlab_course.checking.accesses import Access

    _require(isinstance(value, tuple) and len(value) == 2, "an answer and its accesses")
    answer, parts = value
    _require(isinstance(parts, dict) and set(parts) == set(written_down(())), "the arrays of accesses")
    names, arrays = parts["names"], {key: part for key, part in parts.items() if key != "names"}
    _require(isinstance(names, list) and all(isinstance(name, str) for name in names), "names of arguments")
    _require(
        all(isinstance(part, np.ndarray) and part.dtype == np.int64 for part in arrays.values()),
        "arrays of int64",
    )
    count = len(arrays["kinds"].ravel())
    _require(count <= MOST, f"at most {MOST} accesses in a call")
    shapes = {
        "programs": (count, 3),
        "kinds": (count,),
        "arguments": (count,),
        "masked": (count,),
        "lengths": (count,),
    }
    _require(all(arrays[key].shape == shape for key, shape in shapes.items()), "one entry for every access")
    _require(arrays["shapes"].ndim == 2 and len(arrays["shapes"]) == count, "one shape for every access")
    lengths, offsets = arrays["lengths"], arrays["offsets"]
    _require(
        bool(((lengths >= 0) & (lengths <= offsets.size)).all()) and offsets.shape == (int(lengths.sum()),),
        "as many offsets as there are lengths",
    )
    for key, end in (("kinds", len(KINDS)), ("arguments", len(names))):
        _require(bool(((arrays[key] >= 0) & (arrays[key] < end)).all()), f"{key} that exist")
    ends = np.cumsum(lengths)
    accesses = tuple(
        Access(
            program=tuple(map(int, arrays["programs"][i])),  # type: ignore[arg-type]
            kind=KINDS[arrays["kinds"][i]],  # type: ignore[arg-type]
            argument=names[arrays["arguments"][i]],
            offsets=offsets[ends[i] - lengths[i] : ends[i]],
            shape=tuple(map(int, arrays["shapes"][i])),
            masked=int(arrays["masked"][i]),
        )
        for i in range(count)
    )
    return answer, accesses


def _require(holds: bool, needed: str) -> None:
    if not holds:
        raise ProtocolError(needed, "something else")
