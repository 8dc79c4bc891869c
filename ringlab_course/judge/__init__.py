"""The judge: grades notebooks in a process that never runs a learner's code.

sandbox    the bubblewrap command lines and the limits of a worker; `probe` tests whether the sandbox works
fork_server  the program in a sandbox that forks workers; `namespace` isolates each worker
spawn      starts a worker: forked, in its own sandbox, or without a sandbox; `servers` keeps fork servers
process    a worker as the judge sees it
channel    the worker's end of the socket that carries frames (`checking.protocol`)
worker     the program inside the sandbox: answers calls, but does not decide whether answers are right
judge_comm the transport of a rank inside a worker: every message goes to the judge
exchanges  reads and checks each message of a rank, and counts its bytes
network    the judge as the network between the ranks of a ring program, with a virtual clock for each
session    the workers of one submission
deadline   the end of a call's time, extended while the submission waits for a processor
allowance  limits on all workers' processor time and memory; `processes` reads both, and ends leftovers
removal    makes the code that a submission may not call (`checking.forbidden`) unreachable in a worker
records    loads and stores of Triton kernels, which a worker reports and the judge cannot verify
judge      grades a notebook and returns a report; `right_helpers` grades stages again with the reference's helpers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["GradeReport", "grade", "grade_many", "probe"]

if TYPE_CHECKING:
    from ringlab_course.judge.judge import GradeReport as GradeReport
    from ringlab_course.judge.judge import grade as grade
    from ringlab_course.judge.judge import grade_many as grade_many
    from ringlab_course.judge.probe import probe as probe


def __getattr__(name: str) -> Any:
    # Imported when first used, because a worker imports this package too and should not load the judge.
    if name == "probe":
        from ringlab_course.judge.probe import probe

        return probe
    if name in __all__:
        from ringlab_course.judge import judge

        return getattr(judge, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
