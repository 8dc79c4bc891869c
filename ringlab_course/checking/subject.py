"""The learner's code as a check sees it: something that can be called, wherever it runs."""

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
    """A call's answer and the most bytes it held at once beyond its arguments."""

    answer: Any
    peak_bytes: int


@dataclass(frozen=True)
class Recorded:
    """A call's answer and the `Access`es of its Triton kernels, in the order in which they happened.

    Whoever runs the kernels wrote them down. For a sandboxed submission that is its own worker: what a
    check proves by values is certain; its counts here are only as honest as the submission.
    """

    answer: Any
    accesses: tuple[Access, ...]


class Subject(Protocol):
    """One stage's function, callable by checks.

    Arguments and answers are arrays (NumPy or torch), numbers, strings, booleans, None, and tuples,
    lists and dicts of these: nothing else crosses to a sandboxed worker.
    effort: what `efforts` counts.
    """

    function: str
    effort: str

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the learner's function answers. Raises: NotWritten, Crashed."""

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        """Return the answer with the peak of memory the call held. Raises: NotWritten, Crashed."""

    def record(self, *args: Any, **kwargs: Any) -> Recorded:
        """Return the answer with what the call's Triton kernels read and wrote. Raises: NotWritten, Crashed."""

    def examine(self, *args: Any, **kwargs: Any) -> Examined:
        """Return what came of a JAX program on a mesh; arguments as for `ringlab_course.mesh.examine`, the program left out.

        Raises: NotWritten, Crashed; Failure where JAX cannot run here.
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

        Each of `per_rank` holds `world_size` entries, one for each rank; `kwargs` go to all ranks.
        `faults` says what the network is like. Once a rank was killed nothing is raised for the ranks
        that break off: the result of each that did is an `Ended`, and there is no trace and no memory.
        With `gradient`, a result is a pair: the answer, and its gradient of the rank's first argument, None if none flows.
        Raises: NotWritten, Crashed (a deadlock or a mismatched message too).
        """

    def efforts(self, world_size: int, *per_rank: Sequence[Any], **kwargs: Any) -> tuple[Any, list[float]]:
        """Return the Outcome of one run and how much each rank computes in it, for comparing ranks with each other.

        Arguments as in `run_ring`.
        """

    def texts(self, functions: Sequence[str]) -> dict[str, str]:
        """Return by name the text that defines each of these functions of the submission, decorators included.

        It is read before anything of the submission runs. Those that have no text are left out.
        """

    def alone(self, module: str, functions: Sequence[str]) -> Subject:
        """Return the subject for the same function, defined by the texts of `functions` and the public names of `module` alone.

        Whatever else the submission holds, a decorator or another helper of the same name, has no effect on it.
        """

    def other(self, function: str) -> Subject:
        """Return the subject for another function of the same submission, one of the stage's helpers."""
