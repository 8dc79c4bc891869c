"""A request for a plan, checked before anything is computed."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import filterfalse
from typing import Any

from ringlab.cost.hardware import Hardware, hardware
from ringlab.cost.models import Model, model
from ringlab.cost.planner.ring_time import is_balanced
from ringlab.cost.sizes import Attention, element_bytes
from ringlab.cost.units import nearest, short_count, shown
from ringlab.errors import CostError
from ringlab.layout import get_layout, layout_names

PURPOSES = ("training", "prefill", "decode", "serve")
RECOMPUTATIONS = ("none", "selective", "full")
OFFLOADS = ("activations", "optimizer", "weights")
"""The data that may wait in the host's memory. The field `offload` is "none", or some of these joined by commas."""
SHARINGS = ("copies", "dcp", "helix")
CHUNK = 8192  # default number of a prompt's tokens that are fed at once
LAYOUTS = (*filter(is_balanced, layout_names()[::-1]), *filterfalse(is_balanced, layout_names()))
"""The layouts in the order in which they are tried: those that balance causal work first."""
CHOICES = (
    ("purpose", PURPOSES, False),
    ("recomputation", RECOMPUTATIONS, True),
    ("layout", LAYOUTS, True),
    ("sharing", SHARINGS, True),
)
"""Fields with a fixed set of values: (name, values, whether the field may be left open)."""
MOST_TOKENS = 2**31
MOST_CHUNKS = 4096
"""The most chunks of a prompt, because the time of each is computed."""
MOST_OF_A_COUNT = 2**20
"""The most nodes, GPUs, sequences, degrees, rows and keys of a tile: more is a typing error and would take for ever."""
DEGREES = ("dp", "fsdp", "tp", "cp", "ring", "ulysses", "ep")
"""The degrees that the planner chooses where they are left open; `pp` is 1 unless asked for."""


@dataclass(frozen=True)
class Request:
    """A model, a context and GPUs; the planner chooses the degrees, recomputation and layout that are None.

    `tokens` is the length of one sequence, `batch` the number of sequences of one step over all GPUs.
    dp × tp × cp × pp is the number of GPUs and cp = ring × ulysses; `fsdp` of the dp × cp ranks share one
    copy of parameters, gradients and optimizer state, and `ep` of them the experts of a layer. `reserve` is
    the fraction of the memory that the plan may not use. `logits_chunk` is the number of tokens whose logits
    are held at once (all of a rank's tokens if None), and `ffn_chunk` the number of tokens whose
    feed-forward is computed at once, and again in the backward.
    `pp` is the number of stages of a pipeline, each with `interleave` chunks of layers. With
    `offload` "activations", the activations kept for the backward wait in the host's memory; with "optimizer",
    the moments, the float32 copy and the gradients; with "weights", the weights. "activations,optimizer" is
    both. To serve, there are `batch` sequences of `tokens` tokens each. The model writes `generated` of
    these tokens; the others are a prompt that is fed in chunks of `chunk` tokens. `sharing`: as in
    `serve_request`.
    Raises: CostError for sizes that are not positive integers, unknown names, a dtype that the
        hardware does not compute in, or fields of another purpose.

    >>> request = Request("llama3-8b", 131_072, "h100", nodes=2, ring=8)
    >>> request.gpus, request.command()
    (16, 'ringlab plan --model llama3-8b --tokens 128Ki --hardware h100 --nodes 2 --ring 8')
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
    pp: int = 1
    interleave: int = 1
    offload: str = "none"
    generated: int = 0
    chunk: int = CHUNK
    sharing: str | None = None
    ep: int | None = None
    ffn_chunk: int | None = None

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens, MOST_TOKENS)
        for name in ("nodes", "batch", "pp", "interleave"):
            check_count(name, getattr(self, name))
        for name in ("gpus_per_node", *DEGREES):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("logits_chunk", "ffn_chunk"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), MOST_TOKENS)
        for each in self.tile:
            check_count("tile", each)
        for name, known, open_ in CHOICES:
            value = getattr(self, name)
            if value not in known and not (value is None and open_):
                raise CostError(f"{name} among {', '.join(known)}", shown(value), nearest(value, known))
        if not 0 <= self.reserve < 1:
            needed = "reserve: a fraction of the memory, 0 <= reserve < 1"
            raise CostError(needed, f"{self.reserve}", "--reserve 0.06, the default")
        element_bytes(self.dtype)
        self.machine.peak(self.dtype)
        check_count("nodes × GPUs of a node", self.gpus)
        self.attention  # noqa: B018  raises for heads that cannot be grouped
        check_offload(self)
        check_serving(self)
        check_scans(self)

    def __hash__(self) -> int:  # computed once, since many caches use the hash
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def sized(self) -> Model:
        """Return the requested model."""
        return model(self.model) if isinstance(self.model, str) else self.model

    @cached_property
    def machine(self) -> Hardware:
        """Return the requested hardware, with the requested number of GPUs in a node."""
        found = hardware(self.hardware) if isinstance(self.hardware, str) else self.hardware
        return replace(found, ranks_per_node=self.gpus_per_node) if self.gpus_per_node else found

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.machine.ranks_per_node

    @property
    def stage_gpus(self) -> int:
        """Return the number of GPUs of one stage of the pipeline, or of all GPUs without a pipeline."""
        return self.gpus // self.pp

    @property
    def machine_word(self) -> str:
        """Return the word for one of the machine's ranks: GPU, TPU, or rank if the machine is not built in."""
        name = self.machine.name
        return "TPU" if name.startswith("tpu") else "rank" if name == self.machine.label else "GPU"

    @property
    def usable_bytes(self) -> float:
        """Return the bytes of one GPU that a plan may use."""
        return self.machine.memory_bytes * (1 - self.reserve)

    @cached_property
    def offloads(self) -> frozenset[str]:
        """Return the names in OFFLOADS of the data that waits in the host's memory."""
        return frozenset(self.offload.split(",")) - {"none"}

    @property
    def training(self) -> bool:
        """Return whether the purpose is training."""
        return self.purpose == "training"

    @property
    def decoding(self) -> bool:
        """Return whether a step generates one new token of every sequence."""
        return self.purpose in ("decode", "serve")

    @cached_property
    def attention(self) -> Attention:
        """Return the sizes of one layer's attention for one sequence, on all GPUs together."""
        return self.sized.attention(B=1, dtype=self.dtype, causal=self.causal)

    def but(self, **changes: Any) -> Request:
        """Return this request with some fields changed. Raises: CostError for fields that the class refuses."""
        return replace(self, **changes)

    def command(self) -> str:
        """Return the command line of this request, without options that are left open or at their defaults."""
        words = ["ringlab plan", f"--model {_name(self.model)}", f"--tokens {short_count(self.tokens)}"]
        words += [f"--hardware {_name(self.hardware)}", f"--nodes {self.nodes}"]
        if self.purpose != "training":
            words.append(f"--inference {self.purpose}")
        if not self.causal:
            words.append("--no-causal")
        skipped = {"model", "tokens", "hardware", "nodes", "purpose", "causal", "tile"}
        skipped |= {"logits_chunk", "ffn_chunk", "generated", "chunk"}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in skipped and value != field.default:
                words.append(f"--{field.name.replace('_', '-')} {value}")
        if self.tile != (128, 128):
            words.append(f"--tile {self.tile[0]}x{self.tile[1]}")
        counts = {"logits-chunk": self.logits_chunk, "ffn-chunk": self.ffn_chunk, "generated": self.generated}
        counts["chunk"] = self.chunk if self.chunk != CHUNK else None
        words += [f"--{name} {short_count(count)}" for name, count in counts.items() if count]
        return " ".join(words)


def check_count(name: str, value: object, most: int = MOST_OF_A_COUNT) -> None:
    """Check a count. Raises: CostError unless `value` is an integer from 1 to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        remedy = f"{name} from 1 to {most:,}"
        raise CostError(f"{name} >= 1, an integer", f"{name}={shown(value)}", remedy)
    if value > most:
        got = f"{value:,}" if value < 10**30 else shown(value)
        raise CostError(f"{name} <= {most:,}", got, f"{name} of {most} at most")


def check_offload(request: Request) -> None:
    """Check the fields `offload` and `ffn_chunk`.

    Raises: CostError for inference, a value not in OFFLOADS, or hardware without a link to its host.
    """
    for name in () if request.offload == "none" else request.offload.split(","):
        if name not in OFFLOADS:
            needed = f"offload among {', '.join(OFFLOADS)}, joined by commas, or none"
            raise CostError(needed, shown(request.offload), nearest(name, OFFLOADS))
    if request.ffn_chunk is not None and not request.training:
        got, remedy = f"ffn_chunk={request.ffn_chunk} for {request.purpose}", "leave --ffn-chunk out"
        raise CostError("ffn_chunk for training only", got, remedy)
    if request.offload == "none":
        return
    if not request.training:
        got = f"offload={request.offload} for {request.purpose}"
        remedy = "leave --offload out: without a backward no activations are kept"
        raise CostError("offload for training only", got, remedy)
    if request.machine.host is None:
        machine = request.machine.name
        raise CostError("hardware with a host link", f"{machine} has none", 'a table "host" in its TOML file')


def check_scans(request: Request) -> None:
    """Check the field `layout`. Raises: CostError if states of linear layers would change ranks at every token."""
    if request.layout is not None and not passes_states(request, request.layout):
        needed = (
            f"a layout in which a rank owns consecutive tokens, for the linear layers of {request.sized.name}"
        )
        raise CostError(needed, f"layout={request.layout}", "--layout zigzag, or --layout contiguous")


def passes_states(request: Request, layout: str) -> bool:
    """Return whether a model's linear layers, if it has any, can pass their states under a layout."""
    return get_layout(layout, 16, 2).step == 1 or not any(it.linear for it in request.sized.kinds)


def check_serving(request: Request) -> None:
    """Check the fields of serving. Raises: CostError for another purpose, or a request that cannot be served."""
    if request.purpose != "serve":
        for name, least in (("generated", 0), ("chunk", CHUNK), ("sharing", None)):
            if getattr(request, name) != least:
                got = f"{name}={getattr(request, name)} for {request.purpose}"
                raise CostError(f"{name} for serve only", got, "--inference serve")
        return
    check_count("chunk", request.chunk, MOST_TOKENS)
    check_chunks(request.tokens, request.generated, request.chunk)
    if not request.causal:
        needed = "a causal model to serve: new tokens attend to those before them"
        raise CostError(needed, "causal=False", "leave --no-causal out")
    if request.fsdp not in (None, 1):
        remedy = "--sharing dcp and --sharing helix share the weights over the ranks of a sequence"
        raise CostError("serve without fsdp", f"fsdp={request.fsdp}", remedy)


def check_chunks(context: int, generated: int, chunk: int) -> None:
    """Check a context's parts. Raises: CostError without a prompt, or if the prompt has more than MOST_CHUNKS chunks."""
    if not isinstance(generated, int) or isinstance(generated, bool) or not 0 <= generated < context:
        needed = (
            f"generated: an integer from 0 to {context - 1:,}, some of the {context:,} tokens of a sequence"
        )
        raise CostError(needed, shown(generated), "the others are the prompt")
    least = -(-(context - generated) // MOST_CHUNKS)
    if chunk < least:
        needed = f"chunk >= {least:,}: at most {MOST_CHUNKS:,} chunks of a prompt"
        raise CostError(needed, f"{chunk:,}", f"--chunk {least}")


def _name(thing: Any) -> str:
    return shlex.quote(thing if isinstance(thing, str) else str(thing.name))
