"""The two sides of a check under torchrun: `Lead` on rank 0, and `follow` on the other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ringlab.conformance.run.isolation import START_SECONDS, Isolated
from ringlab.conformance.run.loading import TargetSpec
from ringlab.conformance.run.run import HUNG, RAISED, Ran, RankResult, Run, Trouble, join
from ringlab.conformance.run.torchrun.rendezvous import End, Job, Order, Rendezvous, World, connected
from ringlab.conformance.run.torchrun.watchdog import STOPPED, Watchdog
from ringlab.conformance.run.troubles import returned_in
from ringlab.conformance.target.claims import Claims
from ringlab.errors import BackendError, TransportTimeout

LOST = "lost"
"""The kind of trouble of a rank whose process or machine no longer exists."""
_POLL = 0.02
_PATIENCE = 60.0
_FAREWELL = 10.0
_LONGEST = 400  # the most characters of one rank's trouble if several ranks have one


class Lead:
    """Rank 0's side: it provides the `source` of runs, and in the end sends its exit status to all ranks."""

    def __init__(self, world: World) -> None:
        self.world, self._rendezvous = world, connected(world)
        self._watchdog: Watchdog | None = None
        self._said = 0

    def source(self, spec: TargetSpec, limit: float) -> Source:
        """Return the source of runs of a target on torchrun's ranks.

        Raises: BackendError if a rank needs its own GPU and has none; TransportTimeout if a rank does not
        answer.
        """
        if spec.device not in ("cpu", "cuda"):
            raise BackendError(
                "--device cpu or cuda", repr(spec.device), "under torchrun each rank has a GPU of its own"
            )
        spec = replace(spec, transport="gloo" if spec.device == "cpu" else "nccl")
        self.say(Job(spec, limit))
        self._watchdog = Watchdog(self.world, self._rendezvous, spec, limit)
        lacks = [self._lack_of(rank) for rank in range(self.world.size)]
        if any(lacks):
            needed = "NCCL, and a GPU for each rank of a machine"
            raise BackendError(needed, "; ".join(filter(None, lacks)), "--device cpu, or fewer processes")
        return Source(self, self._watchdog, self._rendezvous)

    def _lack_of(self, rank: int) -> str:
        try:
            return str(self._rendezvous.read(f"lack/{rank}", START_SECONDS))
        except TransportTimeout as error:
            needed, got = f"all ranks of torchrun within {START_SECONDS:g} s", f"no word from rank {rank}"
            remedy = "run the same command on all of them, or unset TORCHELASTIC_RUN_ID to run it alone"
            raise TransportTimeout(needed, got, remedy) from error

    def say(self, what: Job | Order | End) -> None:
        """Send the next job, order or end to all ranks."""
        self._rendezvous.put(f"order/{self._said}", what)
        self._said += 1

    def end(self, status: int) -> None:
        """End all ranks with this exit status; return when they have received it, or after 10 seconds."""
        if self._watchdog is not None:
            self._watchdog.close()
        limit = time.monotonic() + _FAREWELL
        with suppress(RuntimeError):  # torchrun has ended, and its store with it
            self.say(End(status))
            while self._rendezvous.count("ended") < self.world.size - 1 and time.monotonic() < limit:
                time.sleep(_POLL)


def follow(world: World) -> int:
    """Make this rank's part of the runs that rank 0 orders; return the exit status, which is rank 0's."""
    rendezvous, number = connected(world), 0
    watchdog: Watchdog | None = None
    while True:
        try:
            said = rendezvous.read(f"order/{number}", _PATIENCE)
        except TransportTimeout:
            continue  # rank 0 may judge for a while; if it had ended, torchrun would have ended this process
        number += 1
        if isinstance(said, Job):
            watchdog = Watchdog(world, rendezvous, said.spec, said.limit)
        elif isinstance(said, Order) and watchdog is not None:
            watchdog.make(said)
        else:
            if watchdog is not None:
                watchdog.close()
            rendezvous.count("ended", 1)
            return int(said.status)


class Source:
    """Runs of a target on torchrun's ranks (see `ringlab.conformance.run.source.Source`)."""

    def __init__(self, lead: Lead, watchdog: Watchdog, rendezvous: Rendezvous) -> None:
        self.lead, self.watchdog, self.rendezvous, self.spec = lead, watchdog, rendezvous, watchdog.spec
        self.skipped: set[Run] = set()
        self.number, self.generation, self.P, self.whole = 0, 0, 0, False
        self.lost: Trouble | None = None

    def claims(self) -> Claims | Trouble:
        """Return the target's claims, with no more ranks than torchrun started, or the reason why there is no target.

        Raises: BackendError if the target claims only larger numbers of ranks.
        """
        with Isolated(self.watchdog.spec, self.watchdog.limit) as reader:
            found = reader.claims()
        if isinstance(found, Trouble):
            return found
        ranks = tuple(P for P in found.ranks if P <= self.lead.world.size)
        if not ranks:
            needed = (
                f"torchrun with as many processes as the target has ranks, {', '.join(map(str, found.ranks))}"
            )
            raise BackendError(
                needed, f"{self.lead.world.size} processes", f"torchrun --nproc-per-node {min(found.ranks)}"
            )
        return replace(found, ranks=ranks, can_die=False)

    def skip(self, run: Run) -> None:
        """Skip a run that no check needs any more."""
        self.skipped.add(run)

    def made(self, runs: Sequence[Run]) -> Iterator[Ran]:
        """Yield the outcome of each run that was not skipped, in order."""
        for run in runs:
            if run not in self.skipped:
                yield self._ran(run)

    def _ran(self, run: Run) -> Ran:
        if self.lost is not None:
            return Ran(run, trouble=self.lost)
        if not self.whole or run.P != self.P:
            self.generation += 1
        order = Order(self.number, self.generation, run)
        self.number, self.P = self.number + 1, run.P
        since = time.monotonic()
        self.lead.say(order)
        self.watchdog.make(order)
        parts = self._parts(order)
        for name in ("failed", "over"):
            self.rendezvous.store.delete_key(f"count/{name}/{order.number}")
        self.whole = not run.ends and all(part.trouble is None for _, part in parts)
        if all(part.trouble is None for _, part in parts):
            return join(run, [part for _, part in parts])
        results = [part for _, part in parts]
        seconds = time.monotonic() - since
        returned = returned_in(run, results)
        return Ran(run, trouble=of_all(parts), seconds=seconds, returned=returned, stopped=_waiting(results))

    def _parts(self, order: Order) -> list[tuple[int, RankResult]]:
        """Return each rank's result, and its place in the order of failures (0 if it did not fail)."""
        end = time.monotonic() + self.watchdog.longest(order.run.P)
        parts = []
        for rank in range(order.run.P):
            name = f"part/{order.number}/{rank}"
            try:
                parts.append(self.rendezvous.read(name, end - time.monotonic()))
                self.rendezvous.forget(name)
            except TransportTimeout:
                self.lost = Trouble(LOST, f"the process of rank {rank} does not answer")
                parts.append((order.run.P, RankResult(trouble=self.lost)))
        return parts


def of_all(parts: Sequence[tuple[int, RankResult]]) -> Trouble:
    """Return the troubles of all ranks as one trouble, the most informative first, then by time.

    parts: each rank's place in the order of failures, and its result.

    >>> found = [RankResult(trouble=Trouble("raised", text)) for text in ("no peer", "my fault")]
    >>> str(of_all([(2, found[0]), (1, found[1]), (0, RankResult())]))
    'raised: rank 1: my fault; rank 0: no peer'
    """
    found = [
        (_WEIGHT.get(part.trouble.kind, 0), place, rank, part.trouble)
        for rank, (place, part) in enumerate(parts)
        if part.trouble is not None
    ]
    found.sort(key=lambda each: each[:3])
    kind = found[0][3].kind
    by_text: dict[str, list[int]] = {}
    for *_, rank, trouble in found:
        by_text.setdefault(trouble.text if trouble.kind == kind else str(trouble), []).append(rank)
    if len(by_text) == 1 and len(found) == len(parts):
        return Trouble(kind, next(iter(by_text)))
    told = [f"{_ranks(ranks)}: {text[:_LONGEST]}" for text, ranks in by_text.items()]
    return Trouble(kind, "; ".join(told))


_WEIGHT = {RAISED: 1, HUNG: 1, STOPPED: 2}
"""Troubles that are caused by another rank's trouble are the least informative, and have the largest weight.

A crash, a missing package and a wrong result have the weight 0."""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _waiting(results: Sequence[RankResult]) -> tuple[int, ...]:
    """Return the ranks that still ran after others had died or hung; () if any rank raised an error.

    See `troubles.stopped_in`.
    """
    kinds = [result.trouble.kind if result.trouble else "" for result in results]
    return () if RAISED in kinds else tuple(rank for rank, kind in enumerate(kinds) if kind == STOPPED)
