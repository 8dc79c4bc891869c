"""Runs a training step once in float64, three times in its own dtype and once on P ranks, and records each run."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringlab.comm.processes.connect import connect
from ringlab.comm.processes.launch import launch
from ringlab.comm.ring import Ring
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.kinds.calls import around
from ringlab.conformance.kinds.recording import Plan, Recorder, Recording, same
from ringlab.conformance.kinds.step_cases import VOCABULARY
from ringlab.conformance.run.caller_state import kept_modes
from ringlab.conformance.run.folder import leave
from ringlab.conformance.run.loading import VIRTUAL, named
from ringlab.conformance.run.torchrun.rendezvous import Rendezvous, World, connected
from ringlab.conformance.run.troubles import described
from ringlab.conformance.target.calling import call
from ringlab.errors import BackendError, CommError, RinglabError, TransportTimeout


def _program(
    ring: Ring, target: Any, over_ring: bool, plan: Plan, dtype: torch.dtype | None, name: str, folder: str
) -> None:
    """Make one rank's run, and leave its recording in the folder, even if the step raises an error."""
    function = named(target) if isinstance(target, str) else target
    truth = None if name == TRUTH else _left(Path(folder), TRUTH, 0)
    recorder = Recorder(plan, ring.rank, dtype, truth, in_reverse=name == REVERSED)
    try:
        given = {**plan.given(), **around(ring if over_ring else None, ring.rank, ring.world_size)}
        with kept_modes(), recorder.watching():
            recorder.ends(call(function, (), given))
    except Exception as error:
        recorder.found.error = str(described(error))
        raise
    finally:
        leave(Path(folder) / f"{name}-{ring.rank}", recorder.found)


TRUTH, PLAIN, AGAIN, REVERSED, RANKS = "truth", "plain", "again", "reversed", "ranks"
SILENT = "it ended without a word"


def _left(folder: Path, name: str, rank: int) -> Recording:
    path = folder / f"{name}-{rank}"
    if not path.exists():
        return Recording(error=SILENT)
    found: Recording = pickle.loads(path.read_bytes())
    return found


@dataclass
class Runs:
    """Makes the runs of a target, and reads the recordings that they left in the folder."""

    target: Any
    over_ring: bool
    transport: str
    limit: float
    folder: Path

    def alone(self, plan: Plan) -> tuple[Recording, Recording]:
        """Return the truth and the plain run, with the larger error of two orders of summing for each tensor.

        Raises: BackendError if they fail, or if a second plain run differs from the first.
        """
        plan = replace(plan, P=1)
        truth = self._one(plan, TRUTH, torch.float64)
        if truth.positions is None:
            seen = len(truth.settings)
            got = f"none in the inputs of {seen} modules" if seen else "a step that calls no module"
            needed = f"token ids ({plan.rows}, tokens) in the input of a module"
            raise BackendError(needed, got, "give the name of the step's layout: --layout")
        dtype = torch.float32 if truth.dtype == torch.float64 else None
        plain, again = (self._one(plan, name, dtype) for name in (PLAIN, AGAIN))
        _check_repeated(plain, again)
        return truth, _with_larger_errors(truth, plain, self._one(plan, REVERSED, dtype))

    def on_ranks(self, plan: Plan) -> list[Recording]:
        """Return the recordings of all ranks; if a rank's step raises an error, its recording ends there.

        Raises: the error of the launch, if no rank has left a recording.
        """
        try:
            self._start(plan, RANKS, None)
        except Exception:  # a recording holds the error
            if not any((self.folder / f"{RANKS}-{rank}").exists() for rank in range(plan.P)):
                raise
        return [_left(self.folder, RANKS, rank) for rank in range(plan.P)]

    def of_torchrun(self, plan: Plan, place: World) -> tuple[Recording, Recording, list[Recording]]:
        """Return the truth, the plain run and all ranks' recordings, on each process that torchrun started.

        Recordings are sent through torchrun's store, which still works after the step has failed on a rank.

        Raises: BackendError if the runs on one process fail; TransportTimeout if not all processes connect.
        """
        rank, store = place.rank, connected(place)
        if rank == 0:
            store.put("alone", self._tried_alone(plan))
        said = store.read("alone", 4 * self.limit)
        if isinstance(said, Exception):
            raise said
        truth, plain = said
        leave(self.folder / f"{TRUTH}-0", truth)
        try:
            with connect("gloo" if self.transport == VIRTUAL else self.transport, timeout=self.limit) as ring:
                _program(ring, self.target, self.over_ring, plan, None, RANKS, str(self.folder))
        except Exception:  # a recording holds the error
            if not (self.folder / f"{RANKS}-{rank}").exists():
                raise
        store.put(str(rank), _left(self.folder, RANKS, rank))
        return truth, plain, [self._sent(store, each) for each in range(plan.P)]

    def _tried_alone(self, plan: Plan) -> tuple[Recording, Recording] | RinglabError:
        try:
            return self.alone(plan)
        except RinglabError as error:
            return error
        except Exception as error:
            return BackendError("a run on one process", str(described(error)))

    def _sent(self, store: Rendezvous, rank: int) -> Recording:
        """Return a rank's recording, or a SILENT one if it does not arrive in time."""
        try:
            found: Recording = store.read(str(rank), 2 * self.limit)
        except TransportTimeout:
            return Recording(error=SILENT)
        return found

    def _one(self, plan: Plan, name: str, dtype: torch.dtype | None) -> Recording:
        try:
            self._start(plan, name, dtype)
        except Exception as error:
            cause = next(
                (
                    each
                    for each in _causes(error)
                    if isinstance(each, RinglabError) and not isinstance(each, CommError)
                ),
                None,
            )
            if cause is not None:
                raise cause from None
            what = "in float64, as the truth" if name == TRUTH else "in its own dtype"
            more = (
                f"give the model {plan.ids} token ids, which so many tokens need"
                if plan.ids > VOCABULARY
                else ""
            )
            got = str(described(error))
            raise BackendError(f"a step that runs on one process, {what}", got, more) from error
        return _left(self.folder, name, 0)

    def _start(self, plan: Plan, name: str, dtype: torch.dtype | None) -> None:
        arguments = self.target, self.over_ring, plan, dtype, name, str(self.folder)
        if self.over_ring and (self.transport == VIRTUAL or plan.P == 1):
            VirtualCluster(plan.P, memory=False).run(_program, *arguments)
        else:
            launch(_program, plan.P, *arguments, timeout=self.limit, transport=self.transport, memory=False)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _with_larger_errors(truth: Recording, plain: Recording, other: Recording) -> Recording:
    """Return the plain recording; a tensor of `other` replaces the plain one if its error against the truth is larger.

    A sum of numbers may be exact by luck in one order, and ranks add up their terms in orders of their own.
    """

    def chosen(name: str) -> dict[Any, Tensor]:
        true, its, others = (getattr(each, name) for each in (truth, plain, other))
        return {key: _worse(true.get(key), x, others.get(key)) for key, x in its.items()}

    changes: dict[str, Any] = {name: chosen(name) for name in ("values", "gradients", "weight_gradients")}
    return replace(plain, **changes)


def _worse(true: Tensor | None, x: Tensor, y: Tensor | None) -> Tensor:
    if true is None or y is None or not x.is_floating_point() or not true.shape == x.shape == y.shape:
        return x
    first, second = ((each.double() - true.double()).abs().nan_to_num(0.0, 0.0, 0.0) for each in (x, y))
    return y if x.numel() and second.max() > first.max() else x


def _check_repeated(plain: Recording, again: Recording) -> None:
    """Raise BackendError unless two runs on one process have the same weights and outputs, bit by bit."""
    weight = next((name for name, x in plain.weights.items() if not same(x, again.weights.get(name))), None)
    if weight is not None:
        needed, got = (
            "a step that makes the same weights at each call",
            f"different values of {weight} in a second call",
        )
        raise BackendError(needed, got, "call torch.manual_seed(0) before the weights are made")
    output = next((key for key, x in plain.values.items() if not same(x, again.values.get(key))), None)
    if output is not None:
        needed, got = "a step that computes the same at each call", f"{output} differs in a second call"
        remedy = "leave dropout and other random choices off: model.eval(), attention_dropout=0.0"
        raise BackendError(needed, got, remedy)
