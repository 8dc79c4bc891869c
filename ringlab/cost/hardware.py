"""Hardware as data: peak FLOP/s, memory and links, each with its published source.

The tables are TOML (`tables/hardware.toml`), and users add their own in the same form:

    [mine]
    title = "Eight cards under my desk"
    ranks_per_node = 8
    memory = "24 GB"
    memory_bandwidth = "1008 GB/s"
    source = "the data sheet, page 2"
    flops = { bfloat16 = "165 TFLOP/s", float32 = "82 TFLOP/s" }
    inside = { name = "PCIe 4", bandwidth = "25 GB/s", latency = "10 us", source = "assumed" }
    between = { name = "Ethernet", bandwidth = "10 Gb/s", latency = "50 us", source = "assumed" }
    host = { name = "PCIe 4", bandwidth = "25 GB/s", latency = "10 us", memory = "32 GB", source = "assumed" }

Every quantity has its unit; a bare number is refused. A rank is one accelerator.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from ringlab.cost import toml_file, units
from ringlab.cost.sizes import ELEMENT_BYTES
from ringlab.cost.toml_file import Table, check_values, key
from ringlab.errors import CostError

TABLES = Path(__file__).parent / "tables"
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Link:
    """A link between two ranks: bytes per second in ONE direction per rank, latency in seconds.

    Raises: CostError for a bandwidth that is not above zero, or a negative latency.
    """

    name: str
    bytes_per_s: float = key("bandwidth", unit="bytes/s")
    latency_s: float = key("latency", unit="seconds", zero=True)
    source: str = key()

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class Host(Link):
    """The link between a rank and its host, and one rank's share of the host's memory in bytes.

    Raises: CostError for values that a `Link` refuses, or for memory that is not above zero.
    """

    memory_bytes: float = key("memory", unit="bytes")


@dataclass(frozen=True)
class Reached:
    """Fractions of the dense peak that kernels reach; 1.0, an upper bound, if no fraction is published.

    Raises: CostError for a fraction that is not above 0 and at most 1.
    """

    attention_forward: float = key(unit="percent", default=1.0)
    attention_backward: float = key(unit="percent", default=1.0)
    linear: float = key(unit="percent", default=1.0)
    source: str = key(default="theoretical: the whole peak", required=True)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class MeasuredBlock:
    """Coefficients of the time of a block, fitted by calibration for one dtype, pass and head dim.

    seconds = per_launch_s + per_score_s · score elements · heads + per_row_s · query rows · heads

    per_step_s: seconds of a ring step apart from its tiles.
    largest_causal: the most rows of the squares into which the block cuts causal tiles, each computed whole;
    None if it does not cut them.
    kernel_tile: rows and keys of the kernel's own tiles, each computed whole unless it is entirely masked;
    None if only visible scores take time. It has no effect if largest_causal is given.
    Raises: CostError for an unknown pass or dtype, negative times, or sizes below one.
    """

    dtype: str = key(among=tuple(ELEMENT_BYTES))
    pass_: str = key("pass", among=("forward", "backward"))
    per_launch_s: float = key("per_launch", unit="seconds", zero=True)
    per_score_s: float = key("per_score", unit="seconds", zero=True)
    per_row_s: float = key("per_row", unit="seconds", zero=True)
    D: int = key()
    source: str = key()
    largest_causal: int | None = None
    kernel_tile: int | None = None
    per_step_s: float = key("per_step", unit="seconds", zero=True, default=0.0)

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True)
class Hardware:
    """Accelerators in nodes, with the peak FLOP/s by dtype and memory of a rank, and the links inside and between nodes.

    host: the link to the host's memory, None if it is unknown.

    Raises: CostError for values that are not above zero.
    """

    name: str
    title: str
    ranks_per_node: int
    memory_bytes: float = key("memory", unit="bytes")
    memory_bytes_per_s: float = key("memory_bandwidth", unit="bytes/s")
    flops_per_s: Mapping[str, float] = key("flops", unit="FLOP/s", among=tuple(ELEMENT_BYTES), hash=False)
    inside: Link = key()  # noqa: RUF009  a field, as dataclasses.field makes
    between: Link = key()  # noqa: RUF009
    source: str = key()
    reached: Reached = Reached()
    block_times: tuple[MeasuredBlock, ...] = ()
    host: Host | None = None

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def label(self) -> str:
        """Return the name of the hardware as it is written in running text.

        Built-in names with a digit are upper-cased (H100, TPU-V4); other built-in names and user-defined names are
        unchanged.
        """
        spelled = self.name in hardware_names() and any(map(str.isdigit, self.name))
        return self.name.upper() if spelled else self.name

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s. Raises: CostError for a dtype that the hardware does not compute in."""
        if dtype not in self.flops_per_s:
            needed = f"a dtype that {self.name} computes in: {', '.join(self.flops_per_s)}"
            raise CostError(needed, repr(dtype), f"for example {next(iter(self.flops_per_s))}")
        return self.flops_per_s[dtype]

    def link(self, source_rank: int, to_rank: int) -> Link:
        """Return the link between two ranks: `inside` if both are in one node, otherwise `between`."""
        same = source_rank // self.ranks_per_node == to_rank // self.ranks_per_node
        return self.inside if same else self.between


def hardware(name_or_file: str | Path) -> Hardware:
    """Return built-in hardware by name, or from a file: "mine.toml", or "mine.toml:name" if the file has several entries.

    Raises: CostError for an unknown name, with the nearest ones; for an invalid file, with the line.
    """
    return pick(name_or_file, "hardware", _built_in(), read_hardware)


def hardware_names() -> tuple[str, ...]:
    """Return the names of the built-in hardware."""
    return tuple(_built_in())


def read_hardware(path: str | Path) -> dict[str, Hardware]:
    """Return all hardware that a TOML file describes, by name. Raises: CostError with file, line and key."""
    return read_entries(path, lambda name, table: table.read(Hardware, name=name))


def write_hardware(path: str | Path, hardware: Hardware) -> None:
    """Write `hardware` as TOML that `read_hardware` reads back equal, replacing the whole file.

    Raises: CostError if the file cannot be written, or a name or text would not be read back; the old file
        is then unchanged.
    """
    check_name(hardware.name)
    place = Path(path).resolve()  # replace the file that a symbolic link points at
    beside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        header = f"[{json.dumps(hardware.name, ensure_ascii=False)}]"
        beside.write_text(toml_file.written(header, hardware, ("name",)) + "\n", encoding="utf-8")
        if read_hardware(beside) != {hardware.name: hardware}:
            raise CostError("hardware that its own file describes", f"{hardware}")
        os.replace(beside, place)
    except OSError as error:
        raise CostError(f"a file that can be written at {path}", str(error.strerror)) from None
    finally:
        with suppress(OSError):
            beside.unlink()


def check_name(name: str) -> None:
    """Check the name of hardware. Raises: CostError for a name that a file cannot contain."""
    if not _nameable(name):
        raise CostError(f"hardware with {_NAMEABLE}", units.shown(name), f"nearest: {_plain(name)}")


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip("-") or "this-machine"


_NAMEABLE = "a name of at most 64 letters, digits, '-', '_' or '.'"


def _nameable(name: str) -> bool:
    return 1 <= len(name) <= 64 and name.isprintable() and not any(mark in name for mark in ":/\\ ")


def read_entries(path: str | Path, entry: Callable[[str, Table], _Entry]) -> dict[str, _Entry]:
    """Return entry(name, table) of every table in the file. Raises: CostError for a file without tables."""
    whole = toml_file.read(path)
    if not whole.values:
        whole.refuse(None, "at least one table, begun with [name]", "an empty file")
    for name in whole.values:
        if not _nameable(name):
            whole.refuse(name, _NAMEABLE, remedy=f'for example ["{_plain(name)}"]')
    return {name: entry(name, whole.table(name)) for name in whole.values}


def pick(
    name_or_file: str | Path,
    what: str,
    built_in: Mapping[str, _Entry],
    read: Callable[[str | Path], dict[str, _Entry]],
) -> _Entry:
    """Return the built-in entry of this name, or an entry from a file.

    Raises: CostError for an unknown name, with the nearest names, or if a file has several entries and no
    name is given.
    """
    text = str(name_or_file)
    if isinstance(name_or_file, str) and ".toml" not in text:
        return _named(text, what, built_in)
    path, _, name = (
        text.rpartition(":") if not text.endswith(".toml") and ".toml:" in text else (text, "", "")
    )
    entries = read(path or text)
    if name:
        return _named(name, f"{what} in {path}", entries)
    if len(entries) > 1:
        raise CostError(
            f"the name of the {what} in {text}", ", ".join(entries), f"write {text}:{next(iter(entries))}"
        )
    return next(iter(entries.values()))


def _named(name: str, what: str, entries: Mapping[str, _Entry]) -> _Entry:
    if name in entries:
        return entries[name]
    near = toml_file.close(name, list(entries))
    remedy = f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(entries)}"
    raise CostError(f"a known {what}", units.shown(name), f"{remedy}; or a TOML file of your own")


@lru_cache(maxsize=1)
def _built_in() -> dict[str, Hardware]:
    return read_hardware(TABLES / "hardware.toml")
