"""Calls of a training step as data: the batch of each call, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ringlab.comm.ring import Ring
from ringlab.conformance.kinds.calls import around, unusual
from ringlab.conformance.kinds.memory import laid
from ringlab.conformance.target.calling import call, required
from ringlab.errors import BackendError
from ringlab.temporary import TemporaryFolder

IGNORE = -100
VOCABULARY, LENGTH, SEQUENCES = 32, 48, 4
IDS_OF_A_ROW = 16
TOKENS, LABELS, MASK = ("tokens", "input_ids"), ("labels",), ("attention_mask",)
BY_TOKEN = ("position_ids", "segment_ids", "document_ids")
PACKED = ("cu_seqlens", *BY_TOKEN)
OPTIONS = {
    "micro_batches": ("micro_batches", "accumulation_steps", "gradient_accumulation_steps"),
    "replicas": ("replicas", "data_parallel", "dp"),
    "recompute": ("recompute", "gradient_checkpointing"),
    "evaluate": ("evaluate", "evaluation"),
    "steps": ("steps", "num_steps", "max_steps"),
    "checkpoint": ("checkpoint", "checkpoint_folder"),
}
"""The parameter names by which a function may take each option."""
PADDING = -1
"""The value of `Case.changed` for all tokens of the padding."""
_OPTIONS = tuple(name for each in OPTIONS.values() for name in each)
GIVEN = {*TOKENS, *LABELS, *MASK, *PACKED, *_OPTIONS}


@dataclass(frozen=True)
class Case:
    """One call of the step.

    Tokens. ids, lowest: the batch is drawn from the token ids from `lowest` to `ids` − 1. only: the token of
    which the whole batch consists. repeated: whether each sequence repeats `IDS_OF_A_ROW` ids, each time in
    another order. changed: a token that gets another value in all rows, or PADDING. by: the difference of a
    changed token's id.

    Labels. labels: the labels that count. They are "all"; "late", those in the last quarter of each sequence
    but the first; "early", those that are not in the last quarter, and all of the first sequence; or a tuple of
    row · S + position.

    Documents. documents: the lengths of packed documents, one row after the other. lengths: the lengths of
    sequences that are padded to S. left: whether the padding comes first. alone: if it is not None, the batch
    has only the documents or sequences with the numbers from `alone` on. group: how many these are.

    Calls. steps: the number of steps with this batch. resumed: whether the first call ends after one step, and
    a second call makes the others from its checkpoint. checkpoint: the folder for checkpoints. began: another
    number of ranks, which made the first step and its checkpoint, or 0. loss: the kind of mean, a key of
    `ringlab.conformance.kinds.step.LOSSES`; it changes no call. memory: how tensors lie in memory, a key of
    `ringlab.conformance.kinds.memory.LAID`.
    """

    P: int
    S: int = LENGTH
    B: int = SEQUENCES
    labels: str | tuple[int, ...] = "all"
    changed: int | None = None
    documents: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    left: bool = False
    alone: int | None = None
    micro_batches: int = 1
    replicas: int = 1
    recompute: bool = False
    evaluate: bool = False
    steps: int = 1
    resumed: bool = False
    checkpoint: str | None = None
    again: bool = False
    loss: str = "tokens"
    only: int | None = None
    ids: int = VOCABULARY
    by: int = 1
    began: int = 0
    group: int = 1
    lowest: int = 0
    repeated: bool = False
    memory: str = ""

    def __str__(self) -> str:
        return ", ".join([f"P={self.P}", *unusual(self, Case(self.P))])

    @property
    def plain(self) -> Case:
        """Return the case that has the same result, computed at once on one rank."""
        at_once: dict[str, Any] = {"P": 1, "micro_batches": 1, "replicas": 1, "recompute": False}
        return replace(self, **at_once, resumed=False, again=False, memory="")

    @property
    def padding(self) -> Bool[np.ndarray, "B S"]:
        """Return a mask of the padding."""
        lengths = np.array(self.lengths or (self.S,) * self.B)[:, None]
        places = np.arange(self.S)
        return places < self.S - lengths if self.left else places >= lengths


@dataclass
class Result:
    """One rank's loss and gradients by name, in float64.

    epsilon: the unit of last place of the gradients' dtype. returned: whether there are gradients to check.
    changed: the inputs that the call changed. metrics: other numbers that it reports, by name.
    """

    loss: float
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    epsilon: float = float(np.finfo(np.float32).eps)
    returned: bool = True
    changed: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def room(self) -> float:
        """Return the largest allowed difference of another loss from this one."""
        return self.room_of(self.loss)

    def room_of(self, number: float) -> float:
        """Return the largest allowed difference of another call's number from this one."""
        return 64 * self.epsilon * max(abs(number), 1e-3)


def length(P: int, least: int = LENGTH) -> int:
    """Return the smallest length of at least `least` tokens that any layout can divide among P ranks."""
    return -(-least // (2 * P)) * 2 * P


def batch(case: Case, seed: int) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """Return the tokens and labels of a case, which are the same for equal cases.

    A document or sequence alone has the same tokens and labels as in the batch.
    """
    draw = np.random.default_rng([case.S, case.B, seed])
    tokens = torch.from_numpy(
        _repeated(case, draw) if case.repeated else draw.integers(case.lowest, case.ids, (case.B, case.S))
    )
    tokens = tokens if case.only is None else torch.full_like(tokens, case.only)
    labels = tokens.clone()
    if isinstance(case.labels, tuple):
        chosen = list(case.labels)
        labels = torch.full_like(tokens, IGNORE)
        labels.view(-1)[chosen] = tokens.view(-1)[chosen]
    elif case.labels == "late":
        labels[:, : -case.S // 4] = IGNORE
        labels[0] = IGNORE
    elif case.labels == "early":
        labels[1:, -case.S // 4 :] = IGNORE
    bounds = [0, *np.cumsum(case.documents).tolist()]
    labels.view(-1)[[start for start in bounds[:-1] if start < labels.numel()]] = IGNORE
    if case.lengths:
        labels[torch.from_numpy(case.padding)] = IGNORE
    if case.left:
        labels[torch.arange(case.B), torch.from_numpy(case.padding.sum(1))] = IGNORE
    if case.changed is not None:
        which = torch.from_numpy(case.padding) if case.changed == PADDING else (slice(None), case.changed)
        tokens[which] = (tokens[which] + case.by) % case.ids
    if case.alone is None:
        return tokens, labels
    if case.group > 1 and case.lengths:
        return tokens[case.alone :][: case.group], labels[case.alone :][: case.group]
    if case.lengths:
        kept = torch.from_numpy(~case.padding[case.alone])
        return tokens[[case.alone]][:, kept], labels[[case.alone]][:, kept]
    own = slice(bounds[case.alone], bounds[min(case.alone + case.group, len(case.documents))])
    return tokens.view(1, -1)[:, own], labels.view(1, -1)[:, own]


def _repeated(case: Case, draw: np.random.Generator) -> Int[np.ndarray, "B S"]:
    """Return a batch whose ids lie many times in each sequence, and so on all ranks."""
    span, rounds = case.ids - case.lowest, -(-case.S // IDS_OF_A_ROW)
    rows = [
        np.concatenate([draw.permutation(IDS_OF_A_ROW) for _ in range(rounds)])[: case.S]
        for _ in range(case.B)
    ]
    return case.lowest + (np.stack(rows) + IDS_OF_A_ROW * np.arange(case.B)[:, None]) % span


def packed(lengths: Sequence[int], rows: int = 1) -> dict[str, Tensor]:
    """Return packed documents of these lengths by each name that a function may use.

    rows: the number of sequences that they fill, one after the other. `cu_seqlens` exists for one row.
    """
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).reshape(rows, -1)
    ids = ids - ids[:, :1]
    places = torch.cat([torch.arange(each) for each in lengths]).reshape(rows, -1)
    found = {"position_ids": places, "segment_ids": ids, "document_ids": ids.clone()}
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return found | ({"cu_seqlens": bounds} if rows == 1 else {})


def given(case: Case, seed: int, packed_only: bool) -> dict[str, Tensor]:
    """Return the tensors of a case by argument name; packed_only: whether each row becomes a packed document."""
    tokens, labels = batch(case, seed)
    documents = _documents(case)
    if packed_only:
        if not documents:
            documents = tokens.shape[1:] * len(tokens)
            labels[:, 0] = IGNORE
        tokens, labels = tokens.reshape(1, -1), labels.reshape(1, -1)
    tensors = {"tokens": tokens, "input_ids": tokens.clone(), "labels": labels}
    if case.lengths and case.alone is None:
        tensors |= dict.fromkeys(MASK, torch.from_numpy(~case.padding).long().reshape(tokens.shape))
    tensors |= packed(documents, len(tokens)) if documents else {}
    return {name: laid(x, case.memory) for name, x in tensors.items()}


def _documents(case: Case) -> tuple[int, ...]:
    """Return the lengths of the packed documents of a call, () for a document or a sequence alone."""
    if case.alone is None:
        return case.documents
    return case.documents[case.alone :][: case.group] if case.group > 1 else ()


def names(case: Case) -> set[str]:
    """Return the names of the arguments that a function gets in a case."""
    lives = {"steps": case.steps > 1, "checkpoint": case.resumed or case.began > 0}
    found = {
        *TOKENS,
        *LABELS,
        *(x for option, names in OPTIONS.items() if lives.get(option, True) for x in names),
    }
    if case.alone is None:
        found |= {*MASK} if case.lengths else set()
    return found | ({*(PACKED if case.B == 1 else BY_TOKEN)} if _documents(case) else set())


def result(function: Callable[..., Any], case: Case, ring: Ring | None, rank: int, seed: int) -> Result:
    """Return this rank's result of a case. Raises: the function's error; BackendError if it is invalid."""
    if not case.resumed:
        return _result(function, case, ring, rank, seed)
    with _folder_of_all(ring, rank) as folder:
        last = replace(case, resumed=False, checkpoint=folder)
        _result(function, replace(last, steps=1), ring, rank, seed)
        return _result(function, last, ring, rank, seed)


@contextmanager
def _folder_of_all(ring: Ring | None, rank: int) -> Iterator[str]:
    """Yield the path of a temporary folder that is the same on all ranks."""
    with TemporaryFolder(prefix="ringlab-check-") if rank == 0 else nullcontext("") as own:
        yield _from_rank_0(ring, own)
        _from_rank_0(ring, "")  # waits for the last rank to leave the folder


def _from_rank_0(ring: Ring | None, text: str) -> str:
    if ring is None:
        texts = [text]
        torch.distributed.broadcast_object_list(texts, 0)
        return texts[0]
    sent = torch.tensor([*text.encode().ljust(_LONGEST_PATH)], dtype=torch.uint8)
    return bytes(ring.all_gather(sent)[0].tolist()).decode().rstrip()


_LONGEST_PATH = 4096


def _result(function: Callable[..., Any], case: Case, ring: Ring | None, rank: int, seed: int) -> Result:
    tensors = given(case, seed, not required(function).isdisjoint(PACKED))
    kept = {name: x.clone() for name, x in tensors.items()}
    options = {name: getattr(case, option) for option, names in OPTIONS.items() for name in names}
    returned = call(function, (), {**tensors, **options, **around(ring, rank, case.P)})
    changed = [name for name, x in tensors.items() if not torch.equal(x, kept[name])]
    several = isinstance(returned, tuple) and len(returned) in (2, 3)
    loss, gradients, *more = returned if several else (returned, None)
    loss = _number(loss, "a loss, or (loss, gradients)")
    metrics = _metrics(more[0]) if more else {}
    if case.evaluate or gradients is None:
        return Result(loss, returned=False, changed=changed, metrics=metrics)
    found = {name: x.detach() for name, x in _named(gradients).items()}
    low = next((str(x.dtype) for x in found.values() if torch.finfo(x.dtype).bits < 32), None)
    if low:
        raise BackendError("gradients in float32 or float64", low, "build the model in float32 for the check")
    epsilon = max((torch.finfo(x.dtype).eps for x in found.values()), default=Result(0.0).epsilon)
    dense = {name: x.to_dense() if x.is_sparse else x for name, x in found.items()}
    return Result(
        loss, {name: x.double().cpu().numpy() for name, x in dense.items()}, epsilon, True, changed, metrics
    )


def _number(value: Any, needed: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BackendError(needed, type(value).__name__) from error


def _metrics(returned: Any) -> dict[str, float]:
    needed = "metrics as a mapping of names to numbers"
    if not isinstance(returned, Mapping):
        raise BackendError(needed, type(returned).__name__)
    return {str(name): _number(value, f"{needed}, of {name} too") for name, value in returned.items()}


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
