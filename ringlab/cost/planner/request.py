"""What somebody who sizes a cluster asks for, checked before anything is computed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.models import Model, model
from ringlab.cost.planner.wording import label, short_count
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.units import nearest, shown
from ringlab.errors import CostError
from ringlab.layout import layout_names

PURPOSES = ("training", "prefill", "decode")
RECOMPUTATIONS = ("none", "selective", "full")
LAYOUTS = layout_names()[::-1]
"""In the order in which they are tried: those that share causal work evenly first."""
MOST_TOKENS = 2**31
MOST_OF_A_COUNT = 2**20
"""Nodes, GPUs, sequences, degrees, rows and keys of a tile: more is a slip of the pen, and would take for ever."""
DEGREES = ("dp", "fsdp", "tp", "cp", "ring", "ulysses")


@dataclass(frozen=True)
class Request:
    """A model, a context and GPUs; what is None is left open for the planner to choose.

    `tokens` is the length of one sequence, `batch` the sequences of one step over all GPUs.
    dp × tp × cp are all GPUs and cp = ring × ulysses; `fsdp` of the dp × cp ranks share one copy of
    parameters, gradients and optimizer state. `reserve` is the fraction of the memory that the plan
    may not use. `logits_chunk`: tokens whose logits stand in memory at once (all of a rank's if None).
    Raises: CostError that names the constraint for sizes that are no positive integers, unknown
    names, heads that cannot be split, degrees whose product is not the number of GPUs, and more
    ranks than tokens.
    """

    model: Model | str
    tokens: int
    hardware: Hardware | str
    nodes: int = 1
    gpus_per_node: int | None = None
    batch: int = 1
    purpose: str = "training"
    dtype: str = "bfloat16"
    dp: int | None = None
    fsdp: int | None = None
    tp: int | None = None
    cp: int | None = None
    ring: int | None = None
    ulysses: int | None = None
    recomputation: str | None = None
    layout: str | None = None
    causal: bool = True
    tile: tuple[int, int] = (128, 128)
    logits_chunk: int | None = None
    reserve: float = 0.06

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens, MOST_TOKENS)
        for name in ("nodes", "batch"):
            check_count(name, getattr(self, name))
        for name in ("gpus_per_node", *DEGREES):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.logits_chunk is not None:
            check_count("logits_chunk", self.logits_chunk, MOST_TOKENS)
        for each in self.tile:
            check_count("tile", each)
        for name, known in (("purpose", PURPOSES), ("recomputation", RECOMPUTATIONS), ("layout", LAYOUTS)):
            value = getattr(self, name)
            if value not in known and not (value is None and name != "purpose"):
                raise CostError(f"{name} among {', '.join(known)}", shown(value), nearest(value, known))
        if not 0 <= self.reserve < 1:
            raise CostError("reserve: a fraction of the memory, 0 <= reserve < 1", f"{self.reserve}")
        element_bytes(self.dtype)
        self.machine.peak(self.dtype)
        check_count("nodes × GPUs of a node", self.gpus)
        self.attention  # noqa: B018  heads that cannot be shared out are refused here

    def __hash__(self) -> int:  # many caches ask for it, so it is computed once
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def sized(self) -> Model:
        """Return the model asked for."""
        return model(self.model) if isinstance(self.model, str) else self.model

    @cached_property
    def machine(self) -> Hardware:
        """Return the hardware asked for, with as many GPUs in a node as asked for."""
        found = hardware(self.hardware) if isinstance(self.hardware, str) else self.hardware
        return replace(found, ranks_per_node=self.gpus_per_node) if self.gpus_per_node else found

    @property
    def gpus(self) -> int:
        return self.nodes * self.machine.ranks_per_node

    @property
    def machine_word(self) -> str:
        """Return what one of the machine's ranks is: a GPU, a TPU, or a rank where its name does not tell."""
        name = self.machine.name
        return "TPU" if name.startswith("tpu") else "rank" if name == label(name) else "GPU"

    @property
    def usable_bytes(self) -> float:
        """Return the bytes of one GPU that a plan may use."""
        return self.machine.memory_bytes * (1 - self.reserve)

    @property
    def training(self) -> bool:
        return self.purpose == "training"

    @cached_property
    def attention(self) -> Attention:
        """Return the sizes of one layer's attention for one sequence, on all GPUs together."""
        return self.sized.attention(B=1, dtype=self.dtype, causal=self.causal)

    def but(self, **changes: Any) -> Request:
        """Return this request with some fields changed."""
        return replace(self, **changes)

    def command(self) -> str:
        """Return the command line that asks for this; everything that is left open is left out."""
        words = ["ringlab plan", f"--model {_name(self.model)}", f"--tokens {short_count(self.tokens)}"]
        words += [f"--hardware {_name(self.hardware)}", f"--nodes {self.nodes}"]
        if self.purpose != "training":
            words.append(f"--inference {self.purpose}")
        if not self.causal:
            words.append("--no-causal")
        skipped = {"model", "tokens", "hardware", "nodes", "purpose", "causal", "tile", "logits_chunk"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in skipped and value != field.default:
                words.append(f"--{field.name.replace('_', '-')} {value}")
        if self.tile != (128, 128):
            words.append(f"--tile {self.tile[0]}x{self.tile[1]}")
        if self.logits_chunk is not None:
            words.append(f"--logits-chunk {short_count(self.logits_chunk)}")
        return " ".join(words)


def check_count(name: str, value: object, most: int = MOST_OF_A_COUNT) -> None:
    """Raise CostError unless `value` is an integer from 1 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CostError(f"{name} >= 1, an integer", f"{name}={shown(value)}")
    if value > most:
        raise CostError(f"{name} <= {most:,}", f"{value:,}" if value < 10**30 else shown(value))


def _name(thing: Any) -> str:
    return shlex.quote(thing if isinstance(thing, str) else str(thing.name))
