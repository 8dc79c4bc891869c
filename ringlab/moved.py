"""Old names of modules, importable until 0.3: importing one warns and names the new module."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Container, Sequence
from types import ModuleType
from typing import Any

_ROOMS = {
    "virtual": "threads turns waiting streams",
    "clocked": "recording timeline",
    "processes": "launch children connect distributed carriers parts board symmetric windows",
    "wrappers": "traced faulty strict",
}
_COURSE = {
    "checking": "answers contract growth reports subject",
    "notebook": "predictions progressfile",
    "builder": "execution lint sources",
}
_FIGURES = (
    "courier_view course_ring decision_map decision_rules error_curves kernel_access kill_matrix layout_tiles "
    "layout_view load_mosaic loss_curves memory_ledger online_softmax overlap_view papers profiler_lanes ring_step "
    "ring_view side_by_side tile_scan"
)
MOVED = {
    "ringlab.bench.four_ranks": "ringlab_course.bench.four_ranks",
    "ringlab.bench.judge": "ringlab_course.bench.judge",
    "ringlab.bench.lanes": "ringlab.viz.lanes",
    "ringlab.blocks.triton.accesses": "ringlab_course.checking.accesses",
    "ringlab.comm.lanes": "ringlab.comm.processes.background",
    "ringlab.comm.journal": "ringlab.comm.processes.board",
    "ringlab.comm.live": "ringlab.comm.processes.board",
    "ringlab.comm.outcome": "ringlab.comm.trace",
    "ringlab.comm.transports": "ringlab.comm.processes.connect",
    "ringlab.comm.wire": "ringlab.comm.processes.parts",
    "ringlab.comm.worker": "ringlab.comm.processes.rank_process",
    "ringlab.conformance.plain_ring": "ringlab.plain_ring",
    "ringlab.cost.network": "ringlab.cost.simulate",
    "ringlab.cost.overlap": "ringlab.cost.traffic",
    "ringlab.course": "ringlab_course",
    "ringlab.course.builder": "ringlab_course.builder.build",
    "ringlab.course.capstone": "ringlab_course.notebook.capstone",
    "ringlab.course.clinic.committed": "ringlab_course.notebook.committed",
    "ringlab.course.clinic.examine": "ringlab_course.clinic.case",
    "ringlab.course.clinic.visit": "ringlab_course.notebook.visit",
    "ringlab.course.corpus": "ringlab_course.notebook.corpus",
    "ringlab.course.extras": "ringlab_course.checking.requirements",
    "ringlab.course.faults": "ringlab_course.checking.faults",
    "ringlab.course.frontend": "ringlab.viz.frontend",
    "ringlab.course.in_process": "ringlab_course.checking.virtual_ranks",
    "ringlab.course.kernels": "ringlab_course.checking.requirements",
    "ringlab.course.mesh.text": "ringlab_course.mesh.compiled",
    "ringlab.lab": "ringlab_course.lab",
    "ringlab.nn.feed_forward": "ringlab.nn.transformer",
    "ringlab.nn.rotary": "ringlab.nn.attention",
    "ringlab.schedules.trade": "ringlab.schedules.all_to_all",
    "ringlab.viz.courier_frames": "ringlab_course.figures.courier_view",
    "ringlab.viz.error_runs": "ringlab_course.figures.error_curves",
    "ringlab.viz.load_data": "ringlab_course.figures.load_mosaic",
    "ringlab.viz.machines": "ringlab_course.figures.papers",
    "ringlab.viz.ring_frames": "ringlab_course.figures.ring_view",
    **{f"ringlab.course.{name}": f"ringlab_course.{room}.{name}" for room, names in _COURSE.items() for name in names.split()},
    **{f"ringlab.viz.{name}": f"ringlab_course.figures.{name}" for name in _FIGURES.split()},
    **{f"ringlab.comm.{name}": f"ringlab.comm.{room}.{name}" for room, names in _ROOMS.items() for name in names.split()},
}  # fmt: skip
"""A module that moved takes the modules inside it along, unless they are listed themselves."""
_LEFT = {
    "ringlab.comm.recording.Form": "ringlab.comm.clocked.log",
    "ringlab.comm.timeline.Messages": "ringlab.comm.clocked.log",
    "ringlab.course.contract.Crashed": "ringlab_course.checking.failures",
    "ringlab.course.contract.NotWritten": "ringlab_course.checking.failures",
}
"""Names that did not move along with their module, and the module in which they are now."""


def new_name(name: str) -> str:
    """Return the present name of the module `name`: `name` itself if it has not moved."""
    before, after = name, ""
    while before not in MOVED and "." in before:
        before, _, last = before.rpartition(".")
        after = f".{last}{after}"
    return MOVED[before] + after if before in MOVED else name


def notices(names: Container[str] = sys.modules) -> list[str]:
    """Return a line for each old name among `names` (by default those imported so far) that gives the new one."""
    return [_notice(name) for name in MOVED if name in names]


def _notice(name: str) -> str:
    return f"{name} is now {MOVED[name]}: write that; the old name goes in 0.3."


class _Moved(ModuleType):
    """A module under its old name: all that it holds is looked up in its new place."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # `Finder` finds the modules inside it as well; nothing is loaded a second time

    def __getattr__(self, name: str) -> Any:
        old = f"{self.__name__}.{name}"
        place = importlib.import_module(_LEFT.get(old) or new_name(self.__name__))
        if old in MOVED and name not in getattr(place, "__all__", ()):  # it did not move along with this one
            return importlib.import_module(old)
        return getattr(place, name)


class Finder:
    """Finds and loads a module under its old name, and warns about it.

    By its methods alone: the base classes in `importlib.abc` would bring tempfile and zlib into every import of ringlab.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that leads to the module's new place, or None for all other modules."""
        if not fullname.startswith("ringlab.") or new_name(fullname) == fullname:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module under its old name. Raises: ModuleNotFoundError, which says more, if there is no new one."""
        place = new_name(spec.name)
        try:
            importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # something that the module in its new place imports is missing
            above = max((name for name in MOVED if f"{spec.name}.".startswith(f"{name}.")), key=len)
            raise ModuleNotFoundError(
                f"No module named {spec.name!r}: {above} is now {MOVED[above]}, and docs/architecture.md lists its modules",
                name=error.name,
            ) from None
        if spec.name in MOVED:  # others moved along with one that has warned
            warnings.warn(_notice(spec.name), FutureWarning, stacklevel=2)
        return _Moved(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module in its new place has been imported already."""


def install() -> None:
    """Make the old names importable; they are looked up after all others."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
