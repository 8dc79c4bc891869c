"""Calls of a training step, as data: the batch that each is given, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from ringlab.comm.ring import Ring
from ringlab.conformance.target import call, required
from ringlab.errors import BackendError

IGNORE = -100
VOCABULARY, LENGTH, SEQUENCES = 32, 48, 4
TOKENS = ("tokens", "input_ids")
PACKED = ("cu_seqlens", "position_ids", "segment_ids", "document_ids")
OPTIONS = {
    "micro_batches": ("micro_batches", "accumulation_steps", "gradient_accumulation_steps"),
    "replicas": ("replicas", "data_parallel", "dp"),
    "recompute": ("recompute", "gradient_checkpointing"),
    "evaluate": ("evaluate", "evaluation"),
}
"""The names under which a function may take each option."""


@dataclass(frozen=True)
class Case:
    """One call. labels: those that count, "all", "late" (of the last quarter), or these positions of the first sequence.

    changed: a token with another value. documents: packed ones, by length; document: the one that is given, alone.
    """

    P: int
    S: int = LENGTH
    B: int = SEQUENCES
    labels: str | tuple[int, ...] = "all"
    changed: int | None = None
    documents: tuple[int, ...] = ()
    document: int | None = None
    micro_batches: int = 1
    replicas: int = 1
    recompute: bool = False
    evaluate: bool = False
    again: bool = False

    def __str__(self) -> str:
        usual = Case(self.P)
        extra = [f"{key} {value}" for key, value in vars(self).items() if value != vars(usual)[key]]
        return ", ".join([f"P={self.P}", *extra])

    @property
    def plain(self) -> Case:
        """Return the case that has the same result, in one piece on one rank."""
        return replace(self, P=1, micro_batches=1, replicas=1, recompute=False, evaluate=False, again=False)


@dataclass
class Result:
    """One rank's loss and gradients by name, in float64; epsilon: of the gradients' dtype."""

    loss: float
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    epsilon: float = float(np.finfo(np.float32).eps)

    @property
    def room(self) -> float:
        """Return by how much another loss may differ from this one."""
        return math.sqrt(self.epsilon) * max(abs(self.loss), 1e-3)


def batch(case: Case, seed: int) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """Return the tokens and labels of a case: the same for equal cases, and those of a document alone the same as packed."""
    draw = np.random.default_rng([case.S, case.B, seed])
    tokens = torch.from_numpy(draw.integers(0, VOCABULARY, (case.B, case.S)))
    labels = tokens.clone()
    if isinstance(case.labels, tuple):
        labels[:] = IGNORE
        for place in case.labels:
            labels[0, place] = tokens[0, place]
    elif case.labels == "late":
        labels[:, : -case.S // 4] = IGNORE
        labels[0] = IGNORE
    bounds = [0, *np.cumsum(case.documents).tolist()]
    labels[:, [start for start in bounds[:-1] if start < case.S]] = IGNORE
    if case.changed is not None:
        tokens[:, case.changed] = (tokens[:, case.changed] + 1) % VOCABULARY
    if case.document is not None:
        own = slice(*bounds[case.document : case.document + 2])
        return tokens[:, own], labels[:, own]
    return tokens, labels


def _packed(lengths: Sequence[int], B: int) -> dict[str, Tensor]:
    """Documents of these lengths under each name that a function may take them by."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(length) for length in lengths])
    rows = {"position_ids": places, "segment_ids": ids, "document_ids": ids}
    whole = {name: x.expand(B, -1) for name, x in rows.items()}
    return {"cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), **whole}


def result(function: Callable[..., Any], case: Case, ring: Ring | None, rank: int, seed: int) -> Result:
    """Return this rank's result of a case. Raises: the function's own error; BackendError for what is no result."""
    tokens, labels = batch(case, seed)
    known: dict[str, Any] = {
        **dict.fromkeys(TOKENS, tokens), "labels": labels, "ring": ring, "comm": ring and ring.comm,
        "rank": rank, "world_size": case.P,
    }  # fmt: skip
    if ring is None:
        known["group"] = torch.distributed.group.WORLD
    if case.documents and case.document is None:
        known |= _packed(case.documents, case.B)
    elif not required(function).isdisjoint(PACKED):
        known |= _packed(tokens.shape[1:], case.B)
    known |= {name: getattr(case, option) for option, names in OPTIONS.items() for name in names}
    given = call(function, (), known)
    loss, gradients = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
    try:
        loss = float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BackendError("a loss, or (loss, gradients)", type(loss).__name__) from error
    if case.evaluate:
        return Result(loss)
    found = {name: x for name, x in _named(gradients).items() if x is not None}
    low = next((str(x.dtype) for x in found.values() if torch.finfo(x.dtype).bits < 32), None)
    if low:
        raise BackendError("gradients in float32 or float64", low, "build the model in float32 for the check")
    epsilon = max((torch.finfo(x.dtype).eps for x in found.values()), default=Result(0.0).epsilon)
    return Result(loss, {name: x.detach().double().cpu().numpy() for name, x in found.items()}, epsilon)


def _named(gradients: Any) -> dict[str, Tensor | None]:
    if isinstance(gradients, nn.Module):
        return {name: weight.grad for name, weight in gradients.named_parameters()}
    if isinstance(gradients, Mapping):
        return dict(gradients)
    if isinstance(gradients, Sequence):
        return {f"gradient {index}": each for index, each in enumerate(gradients)}
    raise BackendError("gradients as a mapping, a sequence or a model", type(gradients).__name__)
