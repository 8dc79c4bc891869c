"""The operations of the ranks of a clocked cluster, as one log per rank and as arrays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab.comm.protocol import Tensors

COMPUTE, POST, WAIT = 0, 1, 2


class Log:
    """The operations of one rank as codes 4·n + kind. n is the number of the exchange or computation."""

    def __init__(self) -> None:
        self.codes = array("q")
        self.labels, self.seconds = array("i"), array("d")
        self.to, self.source = array("i"), array("i")
        self.sent, self.received = array("i"), array("i")

    def send_to(self, peer: int, number: int) -> int:
        """Return the index of the exchange that made the `number`-th send to `peer`."""
        return [i for i, to in enumerate(self.to) if to == peer][number]

    def receive_from(self, peer: int, number: int) -> int:
        """Return the index of the exchange that posted the `number`-th receive from `peer`."""
        return [i for i, source in enumerate(self.source) if source == peer][number]


@dataclass(frozen=True)
class Form:
    """The form of the tensors of one exchange in one direction: tag, shapes and dtypes."""

    tag: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that are sent."""
        return sum(
            int(np.prod(shape)) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def tensors(self) -> list[Tensor]:
        """Return tensors of this form, without memory."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in pairs]


class _Numbers(dict[Any, int]):
    """A dictionary that numbers its keys in the order in which they are first looked up."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class Forms:
    """Numbers for forms and for labels. Equal forms have the same number, and so do equal labels.

    messages: the number of each form, by its tag and the number of its shapes and dtypes.
    labels: the number of each label of a computation.
    """

    def __init__(self) -> None:
        self.messages, self.labels = _Numbers(), _Numbers()
        self._shapes: dict[Any, int] = {}
        self._tensors: list[tuple[tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]] = []
        self._forms: list[Form] = []

    def __getitem__(self, number: int) -> Form:
        if len(self._forms) < len(self.messages):
            new = islice(self.messages, len(self._forms), None)
            self._forms += [Form(tag, *self._tensors[form]) for tag, form in new]
        return self._forms[number]

    def form(self, tensors: Tensors) -> int:
        """Return the number of the shapes and dtypes of `tensors`."""
        if len(tensors) == 2:
            first, second = tensors
            return self._number((first.shape, second.shape), (first.dtype, second.dtype))
        return self._number(tuple(t.shape for t in tensors), tuple(t.dtype for t in tensors))

    def _number(self, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> int:
        found = self._shapes.get((shapes, dtypes))
        if found is None:
            found = self._shapes[shapes, dtypes] = len(self._tensors)
            self._tensors.append((tuple(map(tuple, shapes)), dtypes))
        return found

    def of_tokens(self, number: int, tokens: int) -> int:
        """Return the number of form `number` after axis −2 of each tensor is set to `tokens`."""
        given = self[number]
        shapes = tuple((*shape[:-2], tokens, shape[-1]) for shape in given.shapes)
        return self.messages[given.tag, self._number(shapes, given.dtypes)]

    def nbytes(self) -> np.ndarray:
        """Return the bytes of each form."""
        return np.array([self[number].nbytes for number in range(len(self.messages))], dtype=np.int64)


@dataclass(frozen=True)
class Program:
    """The operations of all ranks, rank after rank, as arrays.

    starts: the index of each rank's first operation, and as the last entry the number of all operations.
    kinds: COMPUTE, POST or WAIT.
    refs: the number of the computation or exchange, counted over all ranks.
    labels contains a value for each computation. The other arrays contain a value for each exchange: its
    rank, its peers (−1 for none), bytes and forms.
    """

    starts: np.ndarray
    kinds: np.ndarray
    refs: np.ndarray
    post_rank: np.ndarray
    to: np.ndarray
    source: np.ndarray
    sent_bytes: np.ndarray
    received_bytes: np.ndarray
    labels: np.ndarray
    forms_sent: np.ndarray
    forms_received: np.ndarray

    @staticmethod
    def of(logs: Sequence[Log], forms: Forms) -> Program:
        """Return the logs of all ranks as arrays."""

        def joined(name: str) -> np.ndarray:
            return np.concatenate([np.array(getattr(log, name)) for log in logs])

        starts = np.cumsum([0, *(len(log.codes) for log in logs)])
        posts = np.cumsum([0, *(len(log.to) for log in logs)])
        computes = np.cumsum([0, *(len(log.labels) for log in logs)])
        kinds, refs = np.empty(starts[-1], np.int8), np.empty(starts[-1], np.int32)
        # Convert one rank's log at a time, because all ranks together have millions of operations.
        for rank, log in enumerate(logs):
            codes, own = np.array(log.codes), slice(starts[rank], starts[rank + 1])
            kinds[own] = codes & 3
            refs[own] = (codes >> 2) + np.where(kinds[own] == COMPUTE, computes[rank], posts[rank])
        # The last entry is 0 bytes. Index −1, which means no tensors, selects it.
        nbytes = np.append(forms.nbytes(), 0)
        sent, received = joined("sent"), joined("received")
        return Program(
            starts=starts,
            kinds=kinds,
            refs=refs,
            post_rank=np.repeat(np.arange(len(logs), dtype=np.int32), np.diff(posts)),
            to=np.where(sent >= 0, joined("to"), np.int32(-1)),
            source=np.where(received >= 0, joined("source"), np.int32(-1)),
            sent_bytes=nbytes[sent],
            received_bytes=nbytes[received],
            labels=joined("labels"),
            forms_sent=sent,
            forms_received=received,
        )

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.starts) - 1

    @cached_property
    def messages(self) -> Messages:
        """Return the messages.

        The n-th send from one rank to another and their n-th receive are one message.
        """
        sends, receives = (np.flatnonzero(peers >= 0).astype(np.int32) for peers in (self.to, self.source))
        # Exchanges are in the order of ranks and, for each rank, of posting. Sorting is stable, so the
        # exchanges of a pair stay in the order of posting.
        sends = sends[np.lexsort((self.to[sends], self.post_rank[sends]))]
        receives = receives[np.lexsort((self.post_rank[receives], self.source[receives]))]
        order = np.argsort(sends, kind="stable")  # restores the order of ranks and posting
        sends, receives = sends[order], receives[order]
        count = len(self.to)
        outgoing, incoming = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
        outgoing[sends] = incoming[receives] = np.arange(len(sends), dtype=np.int32)
        return Messages(sends, receives, outgoing, incoming)


@dataclass(frozen=True)
class Messages:
    """The exchanges of each message and the messages of each exchange, as arrays of numbers.

    sends, receives: for each message, the exchange that sends it and the exchange that receives it. outgoing,
    incoming: for each exchange, the message that it sends and the message that it receives, or −1.
    """

    sends: np.ndarray
    receives: np.ndarray
    outgoing: np.ndarray
    incoming: np.ndarray
