"""Handles: numbers by which a compiled graph refers to objects that are not tensors, such as a ring.

Operators of torch take tensors and numbers. Every object of a class derived from `Handled` gets a number when it is
made, and a graph of torch.compile reads that number at each call. `object_of` finds the object again while the graph
runs. The table of objects is weak, so a number does not keep its object alive.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from ringlab.errors import BackendError

_numbers = count(2)  # torch.compile would make a separate graph for each of the numbers 0 and 1
_objects: WeakValueDictionary[int, Any] = WeakValueDictionary()


class Handled:
    """A base class whose objects have a number, `handle`, that no other object of this process has.

    Copies and unpickled objects get numbers of their own.
    """

    handle: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a new object with the next number."""
        made = super().__new__(cls)
        object.__setattr__(made, "handle", next(_numbers))
        _objects[made.handle] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, which are all but the number."""
        return {name: value for name, value in vars(self).items() if name != "handle"}


def handle_of(value: Any) -> int:
    """Return the number of the object, or 0 for None and for a name."""
    return value.handle if isinstance(value, Handled) else 0


def object_of(handle: int) -> Any:
    """Return the object with this number, or None for 0.

    Raises: BackendError if the object no longer exists.

    >>> from ringlab.layout import zigzag
    >>> layout = zigzag(8, 2)
    >>> object_of(layout.handle) is layout
    True
    """
    found = _objects.get(handle)
    if found is None and handle:
        raise BackendError(
            f"the object with handle {handle}, to which a compiled graph refers",
            "the object no longer exists",
            "keep the arguments of a compiled call, run a graph in the process that made it, and copy no saved integers in hooks",
        )
    return found
