"""The rules by which a ring program uses its ring. The notebook and the judge enforce the same rules."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from ringlab.errors import CommError
from ringlab_course.checking.protocol import ITEMSIZE, LIMITS

KEPT = ("a ring of an earlier run", "use the ring that your function is given, and keep none")
COMPUTING = ("a call from inside ring.compute", "exchange before or after ring.compute(...), not inside it")
"""The fault and its remedy, as `in_a_thread` returns them."""


def misuse(what: str, rank: int, got: str, remedy: str) -> CommError:
    """Return the error for a call of the method `what` from outside the ring's own program."""
    return CommError(f"{what} from the program of rank {rank} itself", got, remedy)


def in_a_thread() -> tuple[str, str]:
    """Return the fault and the remedy if this thread uses the ring of another thread."""
    got = f"a call from the thread '{threading.current_thread().name}'"
    return got, "let the function's own thread exchange: ring.post returns at once, and work.wait() waits"


def require_messages(tensors: Sequence[Tensor]) -> None:
    """Return None if these tensors can be sent and received. Raises: CommError."""
    got = f"{len(tensors)} of them" if len(tensors) > LIMITS.arrays else ""
    for tensor in tensors:
        if dtype_name(tensor) not in ITEMSIZE:
            got = f"a tensor of {dtype_name(tensor)}"
        elif tensor.ndim > LIMITS.dimensions:
            got = f"a tensor of {tensor.ndim} dimensions"
    if got:
        needed = f"at most {LIMITS.arrays} tensors of at most {LIMITS.dimensions} dimensions, {', '.join(ITEMSIZE)}"
        raise CommError(needed, got, "convert what you exchange")


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")
