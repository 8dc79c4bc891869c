"""Calls of a training step as data: the batch of each call, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.calls import around, unusual
from ringlab.conformance.target.calling import call, required
from ringlab.errors import BackendError

IGNORE = -100
VOCABULARY, LENGTH, SEQUENCES = 32, 48, 4
TOKENS, LABELS = ("tokens", "input_ids"), ("labels",)
PACKED = ("cu_seqlens", "position_ids", "segment_ids", "document_ids")
OPTIONS = {
    "micro_batches": ("micro_batches", "accumulation_steps", "gradient_accumulation_steps"),
    "replicas": ("replicas", "data_parallel", "dp"),
    "recompute": ("recompute", "gradient_checkpointing"),
    "evaluate": ("evaluate", "evaluation"),
}
"""The parameter names by which a function may take each option."""
_OPTIONS = tuple(name for each in OPTIONS.values() for name in each)
GIVEN = {*TOKENS, *LABELS, *PACKED, *_OPTIONS}


@dataclass(frozen=True)
class Case:
    """One call of the step.

    labels: the labels that count: "all", "late" (of the last quarter), or a tuple of row · S + position.
    changed: a token that gets another value in all rows. documents: the lengths of packed documents.
    document: the number of the only document in the batch.
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
        return ", ".join([f"P={self.P}", *unusual(self, Case(self.P))])

    @property
    def plain(self) -> Case:
        """Return the case that has the same result, computed at once on one rank."""
        return replace(self, P=1, micro_batches=1, replicas=1, recompute=False, again=False)


@dataclass
class Result:
    """One rank's loss and gradients by name, in float64.

    epsilon: the unit of last place of the gradients' dtype. returned: whether there are gradients to check.
    changed: the inputs that the call changed.
    """

    loss: float
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    epsilon: float = float(np.finfo(np.float32).eps)
    returned: bool = True
    changed: list[str] = field(default_factory=list)

    @property
    def room(self) -> float:
        """Return the largest allowed difference of another loss from this one."""
        return 64 * self.epsilon * max(abs(self.loss), 1e-3)


def length(P: int, least: int = LENGTH) -> int:
    """Return the smallest length of at least `least` tokens that any layout can divide among P ranks."""
    return -(-least // (2 * P)) * 2 * P


def batch(case: Case, seed: int) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """Return the tokens and labels of a case, which are the same for equal cases.

    A document alone has the same tokens and labels as in its packed sequence.
    """
    draw = np.random.default_rng([case.S, case.B, seed])
    tokens = torch.from_numpy(draw.integers(0, VOCABULARY, (case.B, case.S)))
    labels = tokens.clone()
    if isinstance(case.labels, tuple):
        chosen = list(case.labels)
        labels = torch.full_like(tokens, IGNORE)
        labels.view(-1)[chosen] = tokens.view(-1)[chosen]
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


def packed(lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return documents of these lengths, packed into one sequence, by each name that a function may use."""
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(each) for each in lengths])
    rows = {"position_ids": places[None], "segment_ids": ids[None], "document_ids": ids[None].clone()}
    return {"cu_seqlens": torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), **rows}


def given(case: Case, seed: int, packed_only: bool) -> dict[str, Tensor]:
    """Return the tensors of a case by argument name; packed_only: whether rows become documents too."""
    tokens, labels = batch(case, seed)
    lengths = case.documents if case.document is None else ()
    if packed_only and not lengths:
        lengths = tokens.shape[1:] * len(tokens)
        labels[:, 0] = IGNORE
        tokens, labels = tokens.reshape(1, -1), labels.reshape(1, -1)
    tensors = {"tokens": tokens, "input_ids": tokens.clone(), "labels": labels}
    return tensors | (packed(lengths) if lengths else {})


def names(case: Case) -> set[str]:
    """Return the names of the arguments that a function gets in a case."""
    return {*TOKENS, *LABELS, *(PACKED if case.documents and case.document is None else ()), *_OPTIONS}


def result(function: Callable[..., Any], case: Case, ring: Ring | None, rank: int, seed: int) -> Result:
    """Return this rank's result of a case. Raises: the function's error; BackendError if it is invalid."""
    tensors = given(case, seed, not required(function).isdisjoint(PACKED))
    kept = {name: x.clone() for name, x in tensors.items()}
    options = {name: getattr(case, option) for option, names in OPTIONS.items() for name in names}
    returned = call(function, (), {**tensors, **options, **around(ring, rank, case.P)})
    changed = [name for name, x in tensors.items() if not torch.equal(x, kept[name])]
    loss, gradients = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    try:
        loss = float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BackendError("a loss, or (loss, gradients)", type(loss).__name__) from error
    if case.evaluate or gradients is None:
        return Result(loss, returned=False, changed=changed)
    found = {name: x.detach() for name, x in _named(gradients).items()}
    low = next((str(x.dtype) for x in found.values() if torch.finfo(x.dtype).bits < 32), None)
    if low:
        raise BackendError("gradients in float32 or float64", low, "build the model in float32 for the check")
    epsilon = max((torch.finfo(x.dtype).eps for x in found.values()), default=Result(0.0).epsilon)
    dense = {name: x.to_dense() if x.is_sparse else x for name, x in found.items()}
    return Result(loss, {name: x.double().cpu().numpy() for name, x in dense.items()}, epsilon, True, changed)


def _named(gradients: Any) -> dict[str, Tensor]:
    if isinstance(gradients, nn.Module):
        named: Mapping[str, Any] = {name: weight.grad for name, weight in gradients.named_parameters()}
    elif isinstance(gradients, Mapping):
        named = gradients
    elif isinstance(gradients, Sequence):
        named = {f"gradient {index}": each for index, each in enumerate(gradients)}
    else:
        raise BackendError("gradients as a mapping, a sequence or a model", type(gradients).__name__)
    weights = [name for name, x in named.items() if isinstance(x, nn.Parameter)]
    if weights:
        raise BackendError("gradients", f"{weights[0]} as a weight", "return the model, or weight.grad")
    found = {name: x for name, x in named.items() if x is not None}
    if not found:
        raise BackendError("gradients", "None for every weight", "leave out zero_grad() before the return")
    return found
