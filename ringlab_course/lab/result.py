"""The result file of a lab: what ran, where and with which settings, and whether it finished.

The file is written again after every case, so that an aborted run keeps its measurements. Settings that
cannot be measured are refused, with their names, before any rank starts. Ranks gather their data as JSON over
the transport that the lab measures.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ringlab
from ringlab.bench.device import commit, machine, source
from ringlab.blocks import known
from ringlab.comm.protocol import CONTROL, Comm
from ringlab.errors import LabError

LABS = {"l1": "bandwidth and overlap", "l2": "layouts and scaling", "l3": "make it faster"}
FORMAT = 1


@dataclass
class ResultFile:
    """One run's results at `path`. `header` describes the run; cases are added as they are measured."""

    path: Path
    header: Mapping[str, Any]
    cases: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Mapping[str, Any]) -> None:
        """Add a case, and write the file."""
        self.cases.append(dict(case))
        self.write()

    def write(self, *, finished: bool = False, ended_by: str = "") -> None:
        """Write the results so far; `ended_by` is the error that ended the run early."""
        whole = {**self.header, "finished": finished, "ended_by": ended_by, "cases": self.cases}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        made.write_text(json.dumps(_plain(whole), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        made.replace(self.path)


def reserve(path: Path) -> Path:
    """Create an empty file and return its path: `path`, or a name such as l1-2.json beside it if `path` exists.

    So no run overwrites the results of another run. Raises: LabError if no file can be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            free = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
            with suppress(FileExistsError):
                free.open("x").close()
                return free
    except OSError as error:
        raise LabError(f"a file that can be written at {path}", f"{error.strerror}", "--output") from None
    raise LabError(f"a free name such as {path}", "999 numbered files of this name exist already", "--output")


def blame(
    path: Path,
    cause: str,
    stacks: Mapping[str, str] | None = None,
    header: Mapping[str, Any] | None = None,
) -> None:
    """Write the cause, as the starting process knows it, into the results of a run that did not finish.

    stacks: the stack of each rank, by rank. header: the header of a file that is still empty; without it the
    file stays empty.
    """
    if header is not None and not path.stat().st_size:
        ResultFile(path, header).write()
    try:
        found = load(path)
    except LabError:  # no rank has begun
        return
    file = ResultFile(path, {k: v for k, v in found.items() if k != "cases"}, found["cases"])
    if stacks:
        file.header = {**file.header, "stacks": dict(stacks)}
    if not found["finished"]:
        file.write(ended_by=cause)


def _plain(value: Any) -> Any:
    """Return data with NaN and infinities as strings, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def header(
    lab: str, settings: Mapping[str, Any], ranks: list[dict[str, Any]], transport: str
) -> dict[str, Any]:
    """Return the description of a run in its results: lab, settings, ranks, machine, versions and label."""
    return {
        "format": FORMAT,
        "lab": lab,
        "title": LABS[lab],
        "label": label(transport, ranks),
        "transport": transport,
        "settings": dict(settings),
        "ranks": ranks,
        "machine": machine(),
        "code": {"ringlab": ringlab.__version__, "commit": commit(), "source": source()},
    }


def label(transport: str, ranks: list[dict[str, Any]]) -> str:
    """Return in words what was measured, and clearly whether GPUs were used."""
    devices = sorted({str(rank["device"]) for rank in ranks})
    if not ranks:
        return f"{transport}: ended before all ranks had connected"
    hosts = len({rank["host"] for rank in ranks})
    where = f"{hosts} machine{'s' if hosts > 1 else ''}"
    if all(rank["kind"] == "cpu" for rank in ranks):
        return f"{len(ranks)} {transport} processes on the CPU of {where}: no GPU took part"
    return f"{len(ranks)} ranks over {transport} on {where}, {', '.join(devices)}"


def load(path: Path) -> dict[str, Any]:
    """Return the results in a file.

    Raises: LabError for a file without results of a lab, or with those of another format.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LabError(f"a lab's result file at {path}", f"{type(error).__name__}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("lab"), str) or found["lab"] not in LABS:
        raise LabError(f"a result of one of the labs {', '.join(LABS)} in {path}", "something else")
    if found.get("format") != FORMAT:
        needed = f"format {FORMAT} in {path}"
        raise LabError(needed, repr(found.get("format")), "read it with the ringlab that wrote it")
    for name, kind in (
        ("cases", list),
        ("settings", dict),
        ("ranks", list),
        ("machine", dict),
        ("label", str),
        ("title", str),
        ("finished", bool),
    ):
        if not isinstance(found.get(name), kind):
            raise LabError(f"{name} in {path}", repr(found.get(name))[:60])
    return found


def load_all(paths: Iterable[Path]) -> tuple[dict[Path, dict[str, Any]], dict[Path, str]]:
    """Return the results of files and folders by path, and the invalid files, each with the reason.

    Raises: LabError if there is no file.
    """
    files = sorted({file for path in paths for file in (path.rglob("*.json") if path.is_dir() else [path])})
    if not files:
        raise LabError(
            "result files, or folders with some", "none", "ringlab lab l1 --output results/l1.json"
        )
    found: dict[Path, dict[str, Any]] = {}
    others: dict[Path, str] = {}
    for file in files:
        try:
            found[file] = load(file)
        except LabError as error:
            others[file] = f"needed: {error.needed}; got: {error.got}"
    return found, others


def gather(comm: Comm, value: Any, device: torch.device | str = "cpu") -> list[Any]:
    """Return every rank's `value`, which must be data for JSON, in rank order."""
    said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    count = torch.tensor([len(said)], device=device)
    lengths = [int(each) for each in comm.all_gather(count, tag=CONTROL + "lengths")]
    heard = comm.all_gather(said, [(length,) for length in lengths], tag=CONTROL + "said")
    return [json.loads(bytes(each.cpu().numpy()).decode()) for each in heard]


DTYPES = ("float32", "bfloat16", "float16")


def expect_attention(H: int, D: int, dtype: str, rounds: int, seed: int, block: str = "auto") -> None:
    """Raise LabError unless heads, head dim, dtype, rounds, seed and block are valid."""
    if dtype not in DTYPES:
        raise LabError(f"one of the dtypes {', '.join(DTYPES)}", repr(dtype), "--dtype")
    if min(H, D) < 1:
        raise LabError(
            "at least one head, and a head dim of at least 1", f"H={H}, D={D}", "--heads, --head-dim"
        )
    if rounds < 1:
        raise LabError("at least one round", str(rounds), "--rounds")
    if not 0 <= seed < 2**62:
        raise LabError("a seed from 0 to 2⁶² − 1", str(seed), "--seed")
    if block not in (*known(), "auto"):
        raise LabError(f"one of the blocks {', '.join(known())} or auto", repr(block), "--block")


def expect_ranks(P: int) -> None:
    """Raise LabError for fewer than two ranks."""
    if P < 2:
        raise LabError(
            "at least two ranks, for an exchange", str(P), "--ranks 2, or torchrun --nproc-per-node 2"
        )
