"""Checkpoints by torch.distributed.checkpoint, from which any world size can resume.

A crash during a save leaves the previous checkpoint intact.

    folder/
    ├── step-00000100/      parameters and optimizer, as torch writes them; progress.json
    ├── step-00000200/
    ├── .writing-…          an unfinished checkpoint; the next save removes it
    └── latest              the name of the last complete checkpoint, replaced atomically
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ringlab.comm.ring import Ring
from ringlab.errors import TrainingError
from ringlab.nn import loss

_WRITING = ".writing-"


@dataclass
class Progress:
    """The progress of a training run: finished steps, number of the next batch, losses, recipe and text."""

    step: int = 0
    next_batch: int = 0
    losses: list[float] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    text: str = ""


def save(folder: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, ring: Ring | None) -> Path:
    """Save a checkpoint, and return its folder once it is complete. All ranks of `ring` must call `save`.

    Rank 0 writes replicated parameters. If FSDP or DTensor shards the parameters, each rank writes its
    shards, into one folder to which all ranks must be able to write.
    """
    import torch.distributed.checkpoint as dcp  # imported here, because it takes half a second

    first, sharded = ring is None or ring.rank == 0, is_sharded(model)
    name = _free_name(folder, progress.step) if first else ""
    unfinished = folder / f"{_WRITING}{progress.step:08d}"
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_WRITING}*"):
            shutil.rmtree(left)
        unfinished.mkdir()
    _meet(ring)
    if sharded or first:
        with _quiet():
            dcp.save(_state(model, optimizer), checkpoint_id=unfinished, no_dist=not sharded)
    _meet(ring)
    if first:
        _write(unfinished / "progress.json", json.dumps(asdict(progress)))
        unfinished.rename(folder / name)
        _write(folder / ".latest", name)
        os.replace(folder / ".latest", folder / "latest")
    _meet(ring)
    return folder / (folder / "latest").read_text()


def load(folder: Path, model: nn.Module, optimizer: Optimizer) -> Progress | None:
    """Load the last complete checkpoint in `folder` into `model` and `optimizer`, and return its progress.

    The result is None if there is no checkpoint. Every rank reads the parts that it needs, however many ranks
    wrote the checkpoint. torch reads a checkpoint's metadata with pickle, which can run any code, so load
    only checkpoints that you trust.

    Raises: TrainingError if `latest` names a checkpoint that is missing or unreadable.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    where = latest(folder)
    if where is None:
        return None
    progress = read_progress(where)
    with _quiet():
        state = _state(model, optimizer)
        try:
            dcp.load(state, checkpoint_id=where, no_dist=not is_sharded(model))
        except (dcp.CheckpointException, OSError, RuntimeError, ValueError) as error:
            raise _unusable(where, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        parameters, moments = state["model"], state["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    return progress


def latest(folder: Path) -> Path | None:
    """Return the folder of the last complete checkpoint in `folder`, or None if there is no checkpoint.

    Raises: TrainingError if the checkpoint that the file `latest` names is missing.
    """
    pointer = folder / "latest"
    if folder.exists() and not folder.is_dir():
        raise TrainingError("a folder for checkpoints", f"a file at {folder}", "another path")
    if not pointer.exists():
        return None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch(r"step-[0-9]+(\.[0-9]+)?", name):
        raise _unusable(folder / "…", f"its text is {name[:40]!r}, which is not the name of a checkpoint")
    where = folder / name
    if not where.is_dir():
        raise _unusable(where, "no such folder")
    return where


def read_progress(where: Path) -> Progress:
    """Return the progress of the checkpoint `where`. Raises: TrainingError if it cannot be read."""
    try:
        return Progress(**json.loads((where / "progress.json").read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise _unusable(where, f"progress.json: {error}") from error


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters are sharded over several ranks."""
    return any(map(loss.is_sharded, model.parameters()))


def _state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def _unusable(where: Path, why: str) -> TrainingError:
    others = sorted(path.name for path in where.parent.glob("step-*") if path != where)
    remedy = f"write one of {', '.join(others)} into {where.parent / 'latest'}" if others else "start anew"
    return TrainingError(f"the checkpoint {where}, which `latest` names", why, remedy)


def _free_name(folder: Path, step: int) -> str:
    """Return a name that no checkpoint has, because a complete checkpoint must never be overwritten."""
    name, again = f"step-{step:08d}", 0
    while (folder / name).exists():
        again += 1
        name = f"step-{step:08d}.{again}"
    return name


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _meet(ring: Ring | None) -> None:
    if ring is not None:
        ring.barrier()


def _quiet() -> warnings.catch_warnings:
    """Return a context without torch's warnings about the missing process group and about deprecations."""
    return warnings.catch_warnings(action="ignore")
