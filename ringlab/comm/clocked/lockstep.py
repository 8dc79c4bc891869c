"""The times of many ranks that all do the same operations, computed for all at once from one rank's log.

Ranks may have blocks of different lengths (`Blocks`). Then their operations are the same, but the bytes of
their messages differ. Nothing is kept for each operation of each rank, so memory does not grow with the
square of the number of ranks. The times are equal to those of `timeline.evaluate`, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int

from ringlab.comm.clocked.log import COMPUTE, POST, Forms, Log, Messages, Program
from ringlab.comm.clocked.timeline import Links, Timeline
from ringlab.comm.trace import Trace
from ringlab.errors import CommError

Times: TypeAlias = Float[np.ndarray, " P"]
Seconds: TypeAlias = Callable[[str], Times]
"""A function from a label to the seconds that each rank's computation with this label takes."""
_LINKS = 16
"""The number of distances whose links are remembered. A ring has one distance, an all-gather P − 1."""
_NEVER = (np.inf, -np.inf)
"""Departure and arrival for an exchange without a message."""


@dataclass(frozen=True)
class Lockstep(Timeline):
    """A timeline of all ranks in which the operations of only some ranks are kept.

    The fields of `Timeline` contain only the operations of the `kept` ranks. The other fields are for all
    ranks.
    """

    kept: tuple[int, ...]
    bytes_sent: int
    all_ends: Times
    all_busy_s: Times
    all_waited_s: Times

    @property
    def makespan_s(self) -> float:
        """Return the seconds until the last rank ends."""
        return float(self.all_ends.max())

    @property
    def ends_of_ranks(self) -> Times:
        """Return the time at which each rank ended."""
        return self.all_ends

    @property
    def busy_s(self) -> Times:
        """Return the seconds for which each rank computed."""
        return self.all_busy_s

    @property
    def waited_s(self) -> Times:
        """Return the seconds for which each rank waited for messages."""
        return self.all_waited_s

    def strip(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (begins, kinds, ends) of the operations of `rank`. Raises: CommError for a rank that is not kept."""
        self._check([rank])
        return super().strip(rank)

    def trace(self, ranks: Sequence[int] | None = None) -> Trace:
        """Return the events of these ranks. Raises: CommError unless all are kept."""
        self._check(range(self.program.world_size) if ranks is None else ranks)
        return super().trace(ranks)

    def _check(self, ranks: Sequence[int]) -> None:
        if not {*ranks} <= {*self.kept}:
            got = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
            raise CommError(f"ranks among {', '.join(map(str, self.kept))}, whose operations are kept", got)


@dataclass(frozen=True)
class Blocks:
    """The blocks of tokens that messages carry.

    lengths: the number of tokens in each rank's block. sent, received: for each exchange, how many ranks behind this
    rank the owner of the sent, or received, block is.
    """

    lengths: Int[np.ndarray, " P"]
    sent: Int[np.ndarray, " exchanges"]
    received: Int[np.ndarray, " exchanges"]


def evaluate_alike(
    log: Log,
    forms: Forms,
    P: int,
    network: Links,
    seconds: Seconds,
    keep: Sequence[int] = (),
    blocks: Blocks | None = None,
) -> Lockstep | None:
    """Return the times of `P` ranks that repeat rank 0's operations, with peers at the same distances.

    keep: ranks whose operations are kept. blocks: None if all blocks have the same length. The result is
    None if the ranks cannot continue together, because sender and receiver post a message in different
    exchanges, or because a message is awaited before it is sent.
    Raises: CommError if sends and receives do not fit together.
    """
    moved = _Moved(log, forms, blocks)
    if (pairs := _pairs(log, moved, P)) is None:
        return None
    return _Lockstep(log, forms, P, network, pairs, moved).run(seconds, tuple(keep))


class _Moved:
    """The forms that each exchange sends and receives: one for each rank, or a single one for all ranks."""

    def __init__(self, log: Log, forms: Forms, blocks: Blocks | None) -> None:
        self.log, self.blocks = log, blocks
        if blocks is None:
            return
        lengths, self.which = np.unique(blocks.lengths, return_inverse=True)
        known = {*log.sent, *log.received} - {-1}
        self.by_length = {
            form: np.array([forms.of_tokens(form, tokens) for tokens in lengths.tolist()]) for form in known
        }

    def sent(self, exchange: int) -> Int[np.ndarray, " ranks"]:
        """Return the forms that ranks send, or −1 if they send nothing."""
        return self._of(self.log.sent[exchange], exchange, sending=True)

    def received(self, exchange: int) -> Int[np.ndarray, " ranks"]:
        """Return the forms that ranks receive, or −1 if they receive nothing."""
        return self._of(self.log.received[exchange], exchange, sending=False)

    def _of(self, form: int, exchange: int, sending: bool) -> Int[np.ndarray, " ranks"]:
        if form < 0 or self.blocks is None:
            return np.array([form])
        behind = (self.blocks.sent if sending else self.blocks.received)[exchange]
        return self.by_length[form][np.roll(self.which, behind)]


@dataclass(frozen=True)
class _Pairs:
    """For each exchange, the distances to its peers, and the exchanges at the other ends of its messages.

    ahead, behind: how many ranks ahead the exchange sends, and from how many ranks behind it receives; 0
    means no message. receive: the exchange that receives the sent message. send: the exchange that sends the
    received message.
    """

    ahead: list[int]
    behind: list[int]
    receive: list[int]
    send: list[int]


def _pairs(log: Log, moved: _Moved, P: int) -> _Pairs | None:
    ahead = [to % P if form >= 0 else 0 for to, form in zip(log.to, log.sent, strict=True)]
    behind = [-source % P if form >= 0 else 0 for source, form in zip(log.source, log.received, strict=True)]
    receive, send = [-1] * len(ahead), [-1] * len(ahead)
    of_distance: dict[int, list[int]] = {}
    for exchange, distance in enumerate(behind):
        if distance:
            of_distance.setdefault(distance, []).append(exchange)
    for exchange, distance in enumerate(ahead):
        if distance:
            left = of_distance.get(distance)
            if not left:
                raise CommError("as many sends as receives between each pair of ranks", "different numbers")
            receive[exchange] = left.pop(0)
            send[receive[exchange]] = exchange
            of_receivers = moved.received(receive[exchange])
            if not np.array_equal(moved.sent(exchange), np.roll(of_receivers, -distance)):
                raise CommError(
                    "the same form at both ends of every message", "models whose messages do not fit"
                )
    if any(of_distance.values()):
        raise CommError("as many sends as receives between each pair of ranks", "different numbers")
    fits = all(sent == received for sent, received in enumerate(receive) if received >= 0)
    return _Pairs(ahead, behind, receive, send) if fits else None


class _Lockstep:
    """The state of all ranks at one operation, with the messages that are under way."""

    def __init__(self, log: Log, forms: Forms, P: int, network: Links, pairs: _Pairs, moved: _Moved) -> None:
        self.log, self.forms, self.P, self.network, self.pairs = log, forms, P, network, pairs
        self.moved, self.bytes_sent = moved, 0
        self.labels, self.nbytes = list(forms.labels), forms.nbytes()
        self.ranks = np.arange(P)
        self.links: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.time, self.busy_s, self.waited_s = np.zeros(P), np.zeros(P), np.zeros(P)
        self.port_free = np.zeros((1, P))
        self.under_way: dict[int, tuple[Times, Times]] = {}
        """Departures and arrivals by sender, of the exchanges that are not waited for yet."""

    def run(self, seconds: Seconds, keep: tuple[int, ...]) -> Lockstep:
        chosen = list(keep)
        ends, lengths, messages = [], [], dict[int, np.ndarray]()
        for code in self.log.codes:
            kind, number = code & 3, code >> 2
            if kind == COMPUTE:
                taken = seconds(self.labels[self.log.labels[number]])
                self.time = self.time + taken
                self.busy_s += taken
                lengths.append(taken[chosen])
            elif kind == POST:
                self._post(number)
            else:
                messages[number] = self._wait(number)[:, :, chosen]
            ends.append(self.time[chosen])
        program, both = self._program(keep, messages)
        of_rank = np.array(ends).T.ravel(), np.array(lengths).reshape(len(lengths), len(keep)).T.ravel()
        times = self.time, self.busy_s, self.waited_s
        return Lockstep(program, self.forms, *of_rank, both, keep, self.bytes_sent, *times)

    def _link(self, distance: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return port, bytes per second and latency of each rank's messages to the rank at this distance."""
        found = self.links.get(distance)
        if found is None:
            if len(self.links) >= _LINKS:
                self.links.clear()
            to = (self.ranks + distance) % self.P
            port = np.broadcast_to(self.network.port(self.ranks, to), (self.P,))
            rate = np.broadcast_to(self.network.bytes_per_s(self.ranks, to), (self.P,))
            latency = np.broadcast_to(self.network.latency_s(self.ranks, to), (self.P,))
            found = self.links[distance] = port, rate, latency
            missing = int(port.max()) + 1 - len(self.port_free)
            self.port_free = np.pad(self.port_free, ((0, max(0, missing)), (0, 0)))
        return found

    def _post(self, number: int) -> None:
        """Begin the sends of this exchange, whose receivers post it at the same operation."""
        distance = self.pairs.ahead[number]
        if distance:
            port, rate, latency = self._link(distance)
            ready = np.maximum(self.time, np.roll(self.time, -distance))
            departure = np.maximum(ready, self.port_free[port, self.ranks])
            nbytes = self.nbytes[self.moved.sent(number)]
            self.bytes_sent += int(nbytes.sum()) * (self.P // len(nbytes))
            free = departure + nbytes / rate
            self.port_free[port, self.ranks] = free
            self.under_way[number] = departure, free + latency

    def _wait(self, number: int) -> np.ndarray:
        """Wait for the messages of this exchange.

        Return their (out or in, departure or arrival) for every rank.
        """
        none = np.full(self.P, _NEVER[0]), np.full(self.P, _NEVER[1])
        out = self.under_way.pop(number, none)
        distance = self.pairs.behind[number]
        into = tuple(np.roll(times, distance) for times in out) if distance else none
        before, self.time = self.time, np.maximum(self.time, np.maximum(out[1], into[1]))
        self.waited_s += self.time - before
        return np.array([out, into])

    def _program(
        self, keep: tuple[int, ...], messages: dict[int, np.ndarray]
    ) -> tuple[Program, Float[np.ndarray, "messages 2"]]:
        """Return the operations of the kept ranks, and the messages that their exchanges send and receive."""
        log, count = self.log, len(keep)
        codes, posts, computes = np.array(log.codes), len(log.to), len(log.labels)
        kinds = (codes & 3).astype(np.int8)
        each = np.where(kinds == COMPUTE, computes, posts)
        nbytes = np.append(self.nbytes, 0)
        own = np.array(keep, np.int32)[:, None]
        chosen = list(keep)

        def of_kept(forms: Callable[[int], np.ndarray]) -> Int[np.ndarray, "ranks exchanges"]:
            of_all = [np.broadcast_to(forms(exchange), (self.P,))[chosen] for exchange in range(posts)]
            return np.array(of_all, np.int64).reshape(posts, count).T

        sent, received = of_kept(self.moved.sent), of_kept(self.moved.received)

        def peers(of_first: Sequence[int], forms: np.ndarray) -> np.ndarray:
            return np.where(forms >= 0, (np.array(of_first) + own) % self.P, -1).ravel()

        length = np.zeros(self.P, np.int64)
        length[list(keep)] = len(codes)
        program = Program(
            starts=np.concatenate([[0], np.cumsum(length)]),
            kinds=np.tile(kinds, count),
            refs=((codes >> 2) + np.arange(count)[:, None] * each).ravel(),
            post_rank=np.repeat(own.ravel(), posts),
            to=peers(log.to, sent),
            source=peers(log.source, received),
            sent_bytes=nbytes[sent.ravel()],
            received_bytes=nbytes[received.ravel()],
            labels=np.tile(np.array(log.labels), count),
            forms_sent=sent.ravel(),
            forms_received=received.ravel(),
        )
        rows = np.array([messages[number] for number in range(posts)]).reshape(posts, 2, 2, count)
        both = np.concatenate([rows.transpose(3, 0, 1, 2).reshape(-1, 2), [_NEVER]])
        index = np.arange(2 * posts * count).reshape(-1, 2)
        out, into = (
            np.where(forms.ravel() >= 0, index[:, side], -1) for side, forms in enumerate((sent, received))
        )
        vars(program)["messages"] = Messages(np.zeros(0, int), np.zeros(0, int), out, into)
        return program, both
