"""What the ranks of a clocked cluster did, in the order in which each did it, and nothing about time."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringlab.comm.memory import MemoryReport
from ringlab.comm.timeline import COMPUTE, Links, Program, Timeline, evaluate
from ringlab.comm.waiting import Half
from ringlab.errors import RinglabError, WorldSizeError


class Log:
    """The operations of one rank: codes 4·n + kind, n counting exchanges or computations."""

    def __init__(self) -> None:
        self.codes = array("q")
        self.labels, self.seconds = array("i"), array("d")
        self.to, self.source = array("i"), array("i")
        self.sent, self.received = array("i"), array("i")

    def send_to(self, peer: int, number: int) -> int:
        """Return which exchange made the `number`-th send to `peer`."""
        return [i for i, to in enumerate(self.to) if to == peer][number]

    def receive_from(self, peer: int, number: int) -> int:
        """Return which exchange posted the `number`-th receive from `peer`."""
        return [i for i, source in enumerate(self.source) if source == peer][number]


@dataclass(frozen=True)
class Form:
    """What is known of the tensors of one exchange in one direction: tag, shapes and dtypes."""

    tag: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes on the wire."""
        return sum(
            int(np.prod(shape)) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def tensors(self) -> list[Tensor]:
        """Return tensors of this form, without memory."""
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in pairs]


class _Numbers(dict[Any, int]):
    """A number for every key, in the order in which they are first asked for."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class Forms:
    """Numbers for forms and labels, equal where these are equal.

    messages: the number of the messages under (tag, number of their shapes and dtypes).
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

    def form(self, tensors: Sequence[Tensor]) -> int:
        """Return a number for the shapes and dtypes of `tensors`."""
        key: Any
        if len(tensors) == 2:
            first, second = tensors
            key = first.shape, second.shape, first.dtype, second.dtype
        else:
            key = tuple((t.shape, t.dtype) for t in tensors)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = len(self._tensors)
            self._tensors.append((tuple(tuple(t.shape) for t in tensors), tuple(t.dtype for t in tensors)))
        return found

    def nbytes(self) -> np.ndarray:
        """Return the bytes of each form."""
        return np.array([self[number].nbytes for number in range(len(self.messages))], dtype=np.int64)


@dataclass(eq=False)
class Posted:
    """An exchange of one rank, as errors name it."""

    rank: int
    tag: str
    index: int
    to: int | None
    source: int | None
    open_ends: list[Half] = field(default_factory=list)
    posted: float = 0.0
    arrival: float = 0.0
    error: RinglabError | None = None
    done: bool = False


def ends(log: Log, forms: Forms, rank: int, index: int, sending: bool) -> list[Half]:
    """Return the ends of messages that the `index`-th exchange of `rank` posted in one direction."""
    to, source = log.to[index], log.source[index]
    number = (log.sent if sending else log.received)[index]
    if number < 0:
        return []
    work, peer = posted(log, forms, rank, index), to if sending else source
    tensors = forms[number].tensors()
    return [Half(work, rank, peer, tensor, place, sending) for place, tensor in enumerate(tensors)]


def posted(log: Log, forms: Forms, rank: int, index: int, open_ends: Sequence[Half] = ()) -> Posted:
    """Return the `index`-th exchange of `rank`."""
    to, source = log.to[index], log.source[index]
    number = max(log.sent[index], log.received[index])
    tag = forms[number].tag if number >= 0 else ""
    return Posted(rank, tag, index, to if to >= 0 else None, source if source >= 0 else None, list(open_ends))


class Recording:
    """All ranks' operations, their results and their memory; `clock` says when everything happened."""

    def __init__(
        self, logs: Sequence[Log], forms: Forms, results: list[Any], memory: list[MemoryReport]
    ) -> None:
        self.logs, self.forms, self.results, self.memory = logs, forms, results, memory
        self.P = len(logs)
        self.program = self._flat()

    def __repr__(self) -> str:
        return f"Recording(P={self.P}, {len(self.program.kinds)} operations)"

    def clock(
        self, network: Links, *, slow: Mapping[int, float] | None = None, jitter: float = 0.0, seed: int = 0
    ) -> Timeline:
        """Return when each operation happens on `network`, in virtual seconds.

        slow: how many times longer the computations of a rank take.
        jitter: standard deviation of the logarithm of a random factor of mean 1 on every
            computation; a rank's factors depend on `seed`, its number and nothing else.
        Raises: DeadlockError where sends wait for receives that are posted only after them;
        WorldSizeError for a slow rank that is not there.
        """
        return evaluate(self, network, self._seconds(slow or {}, jitter, seed))

    def blocked(self, rank: int, post: int, sending: bool, receiving: bool) -> Posted:
        """Return the exchange `post`, counted over all ranks, with those of its ends that wait."""
        index = post - int(np.searchsorted(self.program.post_rank, rank))
        log, forms = self.logs[rank], self.forms
        waiting = ends(log, forms, rank, index, True) if sending else []
        waiting += ends(log, forms, rank, index, False) if receiving else []
        return posted(log, forms, rank, index, waiting)

    def _seconds(self, slow: Mapping[int, float], jitter: float, seed: int) -> np.ndarray:
        """The seconds of all computations, rank by rank."""
        factors = np.ones(self.P)
        for rank, factor in slow.items():
            if not 0 <= rank < self.P:
                raise WorldSizeError(f"slow ranks from 0 to {self.P - 1}", f"rank {rank}")
            factors[rank] = factor
        parts = []
        for rank, log in enumerate(self.logs):
            seconds = np.array(log.seconds) * factors[rank]
            if jitter:
                draws = np.random.default_rng([seed, rank]).standard_normal(len(seconds))
                seconds = seconds * np.exp(jitter * draws - jitter**2 / 2)
            parts.append(seconds)
        return np.concatenate(parts)

    def _flat(self) -> Program:
        """All logs as arrays, rank after rank; references count over all ranks."""

        def joined(name: str) -> np.ndarray:
            return np.concatenate([np.array(getattr(log, name)) for log in self.logs])

        codes = joined("codes").astype(np.int64)
        rank_of = np.repeat(np.arange(self.P), [len(log.codes) for log in self.logs])
        posts = np.cumsum([0, *(len(log.to) for log in self.logs)])
        computes = np.cumsum([0, *(len(log.labels) for log in self.logs)])
        kinds, refs = (codes % 4).astype(np.int8), codes // 4
        refs += np.where(kinds == COMPUTE, computes[rank_of], posts[rank_of])
        nbytes = np.append(self.forms.nbytes(), 0)  # -1, no tensors, is the last
        sent, received = joined("sent").astype(np.int64), joined("received").astype(np.int64)
        return Program(
            starts=np.cumsum([0, *(len(log.codes) for log in self.logs)]),
            kinds=kinds,
            refs=refs,
            post_rank=np.repeat(np.arange(self.P), np.diff(posts)),
            to=np.where(sent >= 0, joined("to"), -1),
            source=np.where(received >= 0, joined("source"), -1),
            sent_bytes=nbytes[sent],
            received_bytes=nbytes[received],
            labels=joined("labels"),
            forms_sent=sent,
            forms_received=received,
        )
