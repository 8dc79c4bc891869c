"""The folder through which the processes of a run exchange their results."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from ringlab.conformance.run.run import Ran, Run, join


def rank_path(folder: Path, index: int, rank: int) -> Path:
    """Return the file for one rank's result of run `index`."""
    return folder / f"{index}-{rank}.rank"


def ran_path(folder: Path, index: int) -> Path:
    """Return the file for the outcome of run `index`."""
    return folder / f"{index}.ran"


def begins(folder: Path, index: int) -> None:
    """Record that run `index` has begun."""
    leave(folder / "now", index)


def leave(path: Path, value: Any) -> None:
    """Write a value to a file as a pickle, atomically."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def ranks_left(folder: Path, index: int, P: int) -> list[Any]:
    """Return each rank's result of run `index`, or None for a rank that has written none yet."""
    paths = [rank_path(folder, index, rank) for rank in range(P)]
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]


def any_left(folder: Path, index: int, run: Run) -> bool:
    """Return whether some rank has written a result or an error."""
    return any(rank_path(folder, index, rank).exists() for rank in range(run.P))


def joined(folder: Path, index: int, run: Run) -> Ran | None:
    """Return the outcome of run `index` on processes, or None unless every rank has written a result."""
    parts = ranks_left(folder, index, run.P)
    if any(part is None or part.trouble is not None for part in parts):
        return None
    ran = join(run, parts)
    # Rank 1 has survived the fault, because a process that died would not have written this result.
    ran.spared = run.fault.startswith("dies")
    return ran
