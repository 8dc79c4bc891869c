"""The learner's code as a check sees it: a function that can be called, in whichever process it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ringlab_course.checking.accesses import Access
    from ringlab_course.checking.faults import Faults
    from ringlab_course.mesh.examine import Examined


@dataclass(frozen=True)
class Measured:
    """A call's answer, and the peak of memory in bytes that the call used beyond its arguments."""

    answer: Any
    peak_bytes: int


@dataclass(frozen=True)
class Recorded:
    """A call's answer and the `Access`es of its Triton kernels, in the order in which they happened.

    The process that runs the kernels records the accesses. For a sandboxed submission this is its own worker.
    So a check that compares values is reliable, but a check that counts accesses relies on the submission's
    honesty.
    """

    answer: Any
    accesses: tuple[Access, ...]


class Subject(Protocol):
    """One stage's function, callable by checks.

    Arguments and answers are arrays (NumPy or torch), numbers, strings, booleans, None, and tuples,
    lists and dicts of these. Other values cannot be sent to a sandboxed worker.
    effort: the name of the quantity that `efforts` counts.
    """

    function: str
    effort: str

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return the answer of the learner's function. Raises: NotWritten, Crashed."""

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        """Return the answer with the peak of memory that the call used. Raises: NotWritten, Crashed."""

    def record(self, *args: Any, **kwargs: Any) -> Recorded:
        """Return the answer with the accesses of the call's Triton kernels. Raises: NotWritten, Crashed."""

    def examine(self, *args: Any, **kwargs: Any) -> Examined:
        """Return the examination of the learner's JAX program on a mesh.

        The arguments are those of `ringlab_course.mesh.examine` without the program.
        Raises: NotWritten, Crashed; Failure if JAX cannot run here.
        """

    def run_ring(
        self,
        world_size: int,
        *per_rank: Sequence[Any],
        faults: Faults | None = None,
        gradient: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the Outcome (results, trace, memory) of the learner's program on every rank.

        Each of `per_rank` holds `world_size` entries, one for each rank; `kwargs` go to all ranks. `faults`
        describes the network. If a rank was killed, nothing is raised for the ranks that fail as a
        consequence. The result of each such rank is an `Ended`, and there is no trace and no memory. With
        `gradient`, each result is a pair: the answer, and its gradient with respect to the rank's first
        argument, or None if no gradient flows.

        Raises: NotWritten, Crashed (also for a deadlock or a mismatched message).
        """

    def efforts(self, world_size: int, *per_rank: Sequence[Any], **kwargs: Any) -> tuple[Any, list[float]]:
        """Return the Outcome of one run and how much each rank computes in it, to compare the ranks.

        The arguments are those of `run_ring`.
        """

    def texts(self, functions: Sequence[str]) -> dict[str, str]:
        """Return, by name, the source of each of these functions of the submission, including decorators.

        The source is read before any code of the submission runs. Functions without a source are left out.
        """

    def alone(self, module: str, functions: Sequence[str]) -> Subject:
        """Return a subject for the same function with only `functions` and the public names of `module`.

        Nothing else in the submission, such as a decorator or another helper of the same name, has an effect
        on this subject.
        """

    def other(self, function: str) -> Subject:
        """Return a subject for another function of the same submission, one of the stage's helpers."""
