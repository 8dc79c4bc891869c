"""A recorder of writes into memory that ringlab did not allocate itself.

An operator's result may be kept by other code, such as a selective checkpoint, and a caller's tensor belongs
to the caller. So ringlab writes only into memory that it allocated: by `empty`, `zeros` and the like, or as a
copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringlab.comm.protocol import Comm, Tensors, Work, Wrapper
from ringlab.comm.ring import Ring

ALLOCATE = ("empty", "zeros", "full", "new_empty", "new_zeros", "new_full", "clone", "_to_copy")
"""Operators, without an ending _like or _strided, whose result is memory that belongs to their caller."""


class Writes:
    """The storages that ringlab allocated, on all ranks, and the writes into any other storage."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.own: set[int] = set()
        self.foreign: list[str] = []

    def watch(self, program: Callable[..., Any], ring: Ring, *args: Any) -> Any:
        """Run the program and return its result. The program must not use operators of `ALLOCATE` itself."""
        with _Mode(self):
            return program(Ring(_Watched(ring.comm, self)), *args)

    def note(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Record `what` if it writes into memory that ringlab did not allocate."""
        with self.lock:
            if any(t.numel() and t.untyped_storage()._cdata not in self.own for t in tensors):
                self.foreign.append(what)


class _Mode(TorchDispatchMode):
    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self.writes = writes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [value for name, value in _named(func, args, kwargs) if name.is_write]
        self.writes.note(str(func), [x for x in tree_leaves(written) if isinstance(x, Tensor)])
        result = func(*args, **kwargs)
        given, made = _storages((args, kwargs)), _storages(result)
        name = func._schema.name.removeprefix("aten::").removesuffix("_like").removesuffix("_strided")
        with self.writes.lock:
            if name in ALLOCATE:
                self.writes.own |= made - given
            else:
                self.writes.own -= made - given  # the key of a freed storage may be used again
        return result


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield argument.alias_info, value


def _storages(values: Any) -> set[int]:
    return {x.untyped_storage()._cdata for x in tree_leaves(values) if isinstance(x, Tensor)}


class _Watched(Wrapper):
    """A transport that notes received tensors as written, and also tensors that are handed over."""

    def __init__(self, comm: Comm, writes: Writes) -> None:
        super().__init__(comm)
        self.writes = writes

    def exchange(self, *, send: Tensors = (), receive: Tensors = (), tag: str = "", **peers: Any) -> Work:
        self.writes.note(f"receive {tag}", receive)
        return self.inner.exchange(send=send, receive=receive, tag=tag, **peers)

    def hand_over(self, *, send: Tensors, receive: Tensors, tag: str = "", **peers: Any) -> Work:
        self.writes.note(f"give up {tag}", send)
        self.writes.note(f"receive {tag}", receive)
        return self.inner.hand_over(send=send, receive=receive, tag=tag, **peers)

    def relay(self, *, hops: int, send: Tensors, receive: Tensors, tag: str = "", **peers: Any) -> Work:
        if hops:
            self.writes.note(f"give up {tag}", send)
        self.writes.note(f"receive {tag}", receive)
        return self.inner.relay(hops=hops, send=send, receive=receive, tag=tag, **peers)
