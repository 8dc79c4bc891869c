"""Makes the recording of many ranks from the recording of a few, if ranks differ only in their neighbours."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from ringlab.comm.clocked.log import Log
from ringlab.comm.clocked.recording import Recording
from ringlab.errors import CommError

Seconds: TypeAlias = Callable[[int, tuple[str, ...]], Float[np.ndarray, " computations"]]
"""A function from (rank, labels of its computations) to the seconds of each computation."""


def replicate_ranks(found: Recording, models: Sequence[int], seconds: Seconds) -> Recording:
    """Return the recording of all ranks, given that of the `models` (see `ClockedCluster.run_alike`).

    Raises: CommError if the messages do not fit together.
    """
    names = list(found.forms.labels)
    labels = {model: tuple(names[number] for number in found.logs[model].labels) for model in set(models)}
    logs = [
        _rotated(found.logs[model], rank - model, found.P, seconds(rank, labels[model]))
        for rank, model in enumerate(models)
    ]
    made = Recording(
        logs,
        found.forms,
        [found.results[model] for model in models],
        [replace(found.memory[model], rank=rank) for rank, model in enumerate(models)],
    )
    _check_messages(made)
    return made


def _rotated(log: Log, by: int, P: int, seconds: Float[np.ndarray, " computations"]) -> Log:
    """Return the operations of the rank that is `by` ranks further on. Equal arrays are shared."""
    made = Log()
    made.codes, made.labels, made.sent, made.received = log.codes, log.labels, log.sent, log.received
    made.to, made.source = (_moved(peers, by, P) for peers in (log.to, log.source))
    made.seconds = array("d")
    made.seconds.frombytes(seconds.astype(np.float64).tobytes())
    if len(made.seconds) != len(log.seconds):
        raise CommError(f"seconds of {len(log.seconds)} computations", f"{len(made.seconds)}")
    return made


def _moved(peers: array[int], by: int, P: int) -> array[int]:
    numbers = np.asarray(peers)
    moved = array("i")
    moved.frombytes(np.where(numbers < 0, -1, (numbers + by) % P).astype(np.int32).tobytes())
    return moved


def _check_messages(made: Recording) -> None:
    """Compare both ends of every message. They were not compared before, because each model ran alone."""
    program = made.program
    sends, receives = (np.bincount(_pairs(made, sending), minlength=made.P**2) for sending in (True, False))
    if not np.array_equal(sends, receives):
        raise CommError("as many sends as receives between each pair of ranks", "different numbers")
    messages = program.messages
    if not np.array_equal(program.forms_sent[messages.sends], program.forms_received[messages.receives]):
        raise CommError("the same form at both ends of every message", "models whose messages do not fit")


def _pairs(made: Recording, sending: bool) -> np.ndarray:
    """Return sender · P + receiver for each message, computed from its send or from its receive."""
    program = made.program
    peers = program.to if sending else program.source
    posts = peers >= 0
    own, peer = program.post_rank[posts], peers[posts]
    return own * made.P + peer if sending else peer * made.P + own
