"""A transport that enforces the rules of `Comm.exchange`, for notebooks, the judge and conformance runs.

Between the post and `wait`, receive buffers belong to the transport and sent tensors must not change. A program that
breaks this rule can give correct results on one transport, or in one run, and wrong results in another. Under
this wrapper it fails every time: a buffer contains NaN until `wait` fills it, and a changed tensor raises an
error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringlab.comm.protocol import CONTROL, Comm, Tensors, Work, Wrapper
from ringlab.errors import CommError


class Strict(Wrapper):
    """The transport `comm` with checks that the program does not use tensors that are under way."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self._count = 0

    def exchange(
        self,
        *,
        send: Tensors = (),
        to: int | None = None,
        receive: Tensors = (),
        source: int | None = None,
        tag: str = "",
    ) -> Work:
        """Return the work of a checked exchange.

        Raises: CommError if a receive buffer shares memory with a sent tensor. `wait` raises CommError if a
        sent tensor was written.
        """
        if tag.startswith(CONTROL):  # a control message, without data of the program
            return self.inner.exchange(send=send, to=to, receive=receive, source=source, tag=tag)
        index, self._count = self._count, self._count + 1
        memory = {t.untyped_storage().data_ptr() for t in send if t.numel()}
        if any(t.numel() and t.untyped_storage().data_ptr() in memory for t in receive):
            raise CommError(
                f"receive buffers that share no memory with the sent tensors in exchange {index} of rank {self.rank}",
                "a receive buffer that is also sent",
                "arriving data would overwrite data that is still being sent",
            )
        arriving = tuple(map(torch.empty_like, receive))
        for buffer in receive:
            if buffer.is_floating_point():
                buffer.detach().fill_(float("nan"))
        work = self.inner.exchange(send=send, to=to, receive=arriving, source=source, tag=tag)
        return _StrictWork(work, f"exchange {index} of rank {self.rank}", send, receive)


class _StrictWork(Work):
    def __init__(self, work: Work, name: str, sent: Sequence[Tensor], receive: Tensors) -> None:
        self._work: Work | None = work
        self._name, self._sent, self._receive = name, tuple(sent), tuple(receive)
        self._versions = tuple(map(_version, sent))

    def wait(self) -> tuple[Tensor, ...]:
        if tuple(map(_version, self._sent)) != self._versions:
            raise CommError(
                f"the tensors of {self._name} unchanged until wait",
                "a tensor that was written while it was sent",
                "compute into another tensor",
            )
        if self._work is not None:
            for buffer, arrived in zip(self._receive, self._work.wait(), strict=True):
                buffer.detach().copy_(arrived)
        self._work, self._sent, self._versions = None, (), ()
        return self._receive


def _version(tensor: Tensor) -> int:
    """Return the number of times that the tensor was written in place, directly or through a view."""
    return 0 if tensor.is_inference() else tensor._version
