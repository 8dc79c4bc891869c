"""Four patients modelled on published bugs around a ring: in packing, merging, positions and labels.

Each patient's program is `packed_row.loss`, the loss of a packed row, with one edit from field.md. Its
symptom is measured against the oracle. The tests check the statements of its chart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from ringlab import edits, oracle
from ringlab.comm.virtual.cluster import VirtualCluster
from ringlab.conformance.kinds.step import check_step
from ringlab.conformance.kinds.step_cases import Case, Result, given, result
from ringlab_course.clinic import packed_row
from ringlab_course.clinic.edits import program_of
from ringlab_course.clinic.suite import KillMatrix

CHECKS = (
    "loss", "every label", "uneven labels", "mean of labels", "look-ahead", "ragged", "packed", "documents",
    "odd documents", "other documents", "empty documents",
)  # fmt: skip
"""The checks of `ringlab check --kind step` that need no gradients."""
SOUND = inspect.getsource(packed_row.loss)
_SEED = 0
_ENTRIES = {entry.name: entry for entry in edits.read(Path(__file__).with_name("field.md"))}


@dataclass(frozen=True, eq=False)
class FieldPatient:
    """A loss of a packed row with a published fault, and its chart.

    url: the thread that reports the fault. lessons: the lessons that teach its subject. case: the smallest
    case on which the patient is ill. check: one of CHECKS, which finds the fault. matters: changes of the
    case that make the patient well, by name.
    """

    name: str
    url: str
    lessons: tuple[str, ...]
    case: Case
    check: str
    matters: dict[str, dict[str, Any]]
    returns: ClassVar[tuple[str, ...]] = ("loss",)

    @property
    def complaint(self) -> str:
        """Return the complaint of the program's user."""
        return _ENTRIES[self.name].text.partition("\n\n")[0]

    @property
    def fault(self) -> str:
        """Return the description of the fault."""
        return _ENTRIES[self.name].text.partition("\n\n")[2]

    @cached_property
    def source(self) -> str:
        """Return the text of the patient's program."""
        return edits.apply(_ENTRIES[self.name].hunks, SOUND, f"patient {self.name!r}")

    @cached_property
    def program(self) -> Callable[..., Tensor]:
        """Return the patient's program, which is called as (ring, tokens, labels, cu_seqlens)."""
        return program_of(self.source, self.name, words=packed_row)

    @property
    def chart(self) -> str:
        """Return the chart as text: the fault, the changed lines, the thread and the lessons."""
        sound = SOUND.splitlines()
        changed = [line.strip() for line in self.source.splitlines()[1:] if line not in sound]
        origin = (
            f"made after {self.url}; see lesson{'s' * (len(self.lessons) > 1)} {' and '.join(self.lessons)}"
        )
        return "\n    ".join([f"{self.name}: {self.fault}", *changed, origin])


_THREADS = "https://github.com/{}/issues/{}"
FIELD = {
    each.name: each
    for each in (
        FieldPatient(
            "alder",
            _THREADS.format("ISEEKYAN/Megatron-LM", 111),
            ("18",),
            Case(2, 3, 1, documents=(1, 2)),
            "odd documents",
            {"ranks": {"P": 1}, "documents": {"documents": ()}},
        ),
        FieldPatient(
            "beech",
            _THREADS.format("sgl-project/sglang", 33064),
            ("02", "19"),
            Case(2, 3, 1),
            "loss",
            {"ranks": {"P": 1}},
        ),
        FieldPatient(
            "maple",
            _THREADS.format("sgl-project/sglang", 32098),
            ("14", "18"),
            Case(2, 3, 1),
            "loss",
            {"ranks": {"P": 1}},
        ),
        FieldPatient(
            "spruce",
            _THREADS.format("huggingface/transformers", 48570),
            ("14", "18"),
            Case(2, 2, 1),
            "every label",
            {"ranks": {"P": 1}},
        ),
    )
}
"""The four patients by name. Lesson 16 shows them."""


@dataclass(frozen=True)
class LossFindings:
    """The findings of one run: the loss on each rank, the oracle's loss, and the allowed difference.

    stopped: the reason why the ranks did not end, "" if they did.
    """

    case: Case
    losses: tuple[float, ...]
    true: float
    room: float
    stopped: str = ""

    @property
    def well(self) -> bool:
        """Return whether all ranks ended, each with the true loss. NaN never is the true loss."""
        return not self.stopped and all(abs(loss - self.true) <= self.room for loss in self.losses)

    @property
    def symptom(self) -> str:
        """Return the loss of rank 0 and the true loss as text, or "well"."""
        if self.stopped:
            return f"the ranks did not end: {self.stopped}"
        return "well" if self.well else f"{self.losses[0]:.3f} for {self.true:.3f}"

    def __str__(self) -> str:
        return f"{self.case}: {self.symptom}"


def examine(program: Callable[..., Tensor], case: Case) -> LossFindings:
    """Return the findings of one run of a loss program on virtual ranks."""

    def on_rank(ring: Any) -> Result:
        return result(program, case, ring, ring.rank, _SEED)

    true = true_loss(case)
    room = Result(true, epsilon=float(np.finfo(np.float64).eps)).room
    try:
        ranks = VirtualCluster(case.P, memory=False).run(on_rank).results
    except Exception as error:
        return LossFindings(case, (), true, room, str(error) or type(error).__name__)
    return LossFindings(case, tuple(each.loss for each in ranks), true, room)


@cache
def true_loss(case: Case) -> float:
    """Return the mean loss by the oracle, in float64 NumPy.

    This computation shares only the model's weights with the patients' programs.
    """
    arguments = given(case, _SEED, packed_only=False)
    tokens, labels = arguments["tokens"].numpy(), arguments["labels"].numpy()
    document = np.repeat(np.arange(len(case.documents) or 1), case.documents or case.S)
    x = packed_row.EMBEDDING.numpy()[tokens] @ packed_row.PROJECTION.numpy()
    heads = x.reshape(*tokens.shape, 3, packed_row.HEADS, packed_row.D)
    q, k, v = np.moveaxis(heads, (2, 3), (0, 2))
    places = np.arange(case.S)
    visible = (document[:, None] == document) & (places[:, None] >= places)
    out, _ = oracle.attention(_turned(q), _turned(k), v, mask=visible)
    logits = np.moveaxis(out, 1, 2).reshape(*tokens.shape, -1) @ packed_row.EMBEDDING.numpy().T
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    rows, columns = np.nonzero(labels[:, 1:] != packed_row.IGNORE)
    return float(-log_p[rows, columns, labels[rows, columns + 1]].mean())


def _turned(x: np.ndarray) -> np.ndarray:
    """Return x with rotary positions: each pair (x[i], x[i + D/2]) is rotated as one complex number."""
    real, imaginary = np.split(x, 2, axis=-1)
    turns = np.exp(1j * np.arange(x.shape[-2])[:, None] * packed_row.SPEEDS.numpy())
    turned = (real + 1j * imaginary) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def kill_matrix(
    patients: Iterable[FieldPatient], checks: Sequence[str] = CHECKS, ranks: Sequence[int] = (2,)
) -> KillMatrix:
    """Return the table of which check of a step finds which patient."""
    reports = {each.name: check_step(each.program, only=checks, ranks=ranks) for each in patients}
    findings = {
        name: {finding.name: finding for finding in report.findings} for name, report in reports.items()
    }
    return KillMatrix(tuple(findings), tuple(checks), findings)
