"""`train`: the same function on one process, on virtual ranks in a notebook, under launch and under torchrun."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.optim import AdamW, Optimizer

import ringlab
from ringlab.agreement import agree
from ringlab.blocks import known
from ringlab.comm.ring import Ring
from ringlab.errors import BackendError, DeviceError, RinglabError, TrainingError
from ringlab.layout import get_layout
from ringlab.mask import Mask
from ringlab.nn import checkpoint, mesh
from ringlab.nn.checkpoint import Progress
from ringlab.nn.context import Context
from ringlab.nn.loss import loss_share, next_tokens, sum_gradients, summed, valid_tokens
from ringlab.nn.mesh import Degrees
from ringlab.nn.text import Text, batches, library
from ringlab.nn.transformer import ModelConfig, Transformer
from ringlab.schedules import get_schedule


@dataclass(frozen=True)
class Recipe:
    """The model, the data and the hyperparameters: `batch` sequences of S bytes a step, `steps` steps in all.

    `layout`, `schedule` and `block` choose how attention is spread over the ranks. They and `save_every` may
    change between the runs that share a checkpoint, and so may `steps`, to no fewer than are done; the other
    fields may not.
    `save_every`: steps between checkpoints; the last step is saved too.

    Raises: LayoutError for an unknown layout; BackendError for an unknown block; BackendError or
        WorldSizeError for an invalid schedule; MaskError for a window below 1; TrainingError for sizes below
        1, or rates that are negative or not finite.

    >>> Recipe(window=32).mask.window
    32
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    S: int = 256
    batch: int = 2
    steps: int = 200
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    window: int | None = None
    layout: str = "zigzag"
    schedule: str = "ring"
    block: str = "auto"
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in ("S", "batch", "steps", "save_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise TrainingError(f"{name}= at least 1, an integer", f"{value}")
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:  # NaN is not between them
                raise TrainingError(f"{name}= at least 0 and finite", f"{value!r}")
        if self.block not in (*known(), "auto"):
            raise BackendError(f"a block among {', '.join(known())} or auto", repr(self.block))
        # One process without a ring refuses what these refuse, too.
        _ = get_layout(self.layout, self.S, 1), self.mask, get_schedule(self.schedule)

    @property
    def mask(self) -> Mask | None:
        """Return the mask, None for the plain causal mask."""
        return None if self.window is None else Mask(window=self.window)

    def lasting(self) -> dict[str, object]:
        """Return the fields, by name, that a run must share with the checkpoint that it resumes from."""
        passing = ("layout", "schedule", "block", "steps", "save_every")
        said = {name: value for name, value in asdict(self).items() if name not in passing}
        how_computed = ("feed_forward_block", "recompute")
        return said | {"model": {k: v for k, v in said["model"].items() if k not in how_computed}}


def training_step(
    model: Transformer,
    optimizer: Optimizer,
    tokens: Int[Tensor, "B S"],
    context: Context | None = None,
    replicas: Ring | None = None,
) -> float:
    """Return the loss of one step on `tokens`, whole sequences, in nats per token, the same on every rank.

    `replicas`: the ring of ranks that have other sequences, None if there are none.

    Raises: TrainingError if no token of the batch counts; the errors of `ring_attention`.

    >>> model = Transformer(ModelConfig(layers=1))
    >>> loss = training_step(model, AdamW(model.parameters()), torch.arange(8)[None])
    >>> 5 < loss < 6  # ln 256 = 5.55 before the first step
    True
    """
    ring, mask = (None, None) if context is None else (context.ring, context.mask)
    labels = next_tokens(tokens, mask)  # before the sequence is sharded
    if context is not None:
        tokens, labels = context.shard(tokens), context.shard(labels)
    count = valid_tokens(labels, ring, replicas)  # of all ranks
    share = loss_share(model(tokens, context), labels, count)
    share.backward()
    if not checkpoint.is_sharded(model):  # FSDP has summed them already
        sum_gradients(model, ring, replicas)
    optimizer.step()
    optimizer.zero_grad()
    return float(summed(share.detach().double(), ring, replicas))


def train(
    ring: Ring | None,
    recipe: Recipe,
    folder: str | Path | None = None,
    degrees: Degrees | None = None,
    text: Text | None = None,
    device: str = "cpu",
) -> list[float]:
    """Return the loss of every step, in nats per byte, the same on all ranks.

    `ring`: None for an ordinary model on one process. With `folder`, training resumes from the last
    checkpoint there, whatever world size and layout wrote it, and saves its own. `degrees`: data and tensor
    parallelism besides the ring; without them all ranks share each sequence. With `degrees`, FSDP shards the
    model over processes; virtual ranks hold it whole. `device`: "cuda" if the transport carries CUDA tensors.

        train(None, recipe)                             one process
        VirtualCluster(4).run(train, recipe)            four virtual ranks: .results[0]
        launch(train, 4, recipe, "runs/first")          four processes, with checkpoints
        with connect() as ring: train(ring, recipe)     under torchrun

    Raises: before the first exchange of data, on the rank concerned, TrainingError, DeviceError,
        WorldSizeError, ShapeError or BackendError for an invalid recipe, device, degrees or checkpoint;
        AgreementError on all other ranks, and on all ranks if versions, texts or checkpoints differ between them.

    >>> losses = train(None, Recipe(S=32, batch=1, steps=2, model=ModelConfig(width=16, hidden=16, layers=1)))
    >>> [5 < loss < 6 for loss in losses]
    [True, True]
    """
    if not (ring is None or isinstance(ring, Ring)):
        raise TrainingError(
            "train(ring, recipe) with a ringlab.Ring, or None", f"a {type(ring).__name__} first"
        )
    text, folder = text or library(), None if folder is None else Path(folder)
    _agree(ring, recipe, folder, degrees, text, device)
    sequence, replicas = ring, None
    model = Transformer(recipe.model, recipe.seed).to(device)
    if degrees is not None and ring is not None:
        sequence, replicas = mesh.rings(ring, degrees)
        if mesh.of_processes(ring.world_size):
            mesh.parallelize(model, mesh.build(degrees, torch.device(device).type))
    optimizer = AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    progress = (checkpoint.load(folder, model, optimizer) if folder else None) or Progress()
    progress.recipe, progress.text = asdict(recipe), text.digest
    context = None if sequence is None else _context(sequence, recipe)
    for number, tokens in batches(text, recipe.S, recipe.batch, recipe.seed, progress.next_batch):
        if progress.step >= recipe.steps:
            break
        rows = tokens if replicas is None else tokens[replicas.rank :: replicas.world_size]
        progress.losses.append(training_step(model, optimizer, rows.to(device), context, replicas))
        context = context and replace(context, validate=False)  # the ranks have compared their calls once
        progress.step, progress.next_batch = progress.step + 1, number + 1
        if folder and (progress.step % recipe.save_every == 0 or progress.step == recipe.steps):
            checkpoint.save(folder, model, optimizer, progress, ring)
    return progress.losses


def _context(ring: Ring, recipe: Recipe) -> Context:
    layout = get_layout(recipe.layout, recipe.S, ring.world_size)
    return Context(ring, layout, recipe.mask, recipe.schedule, recipe.block)


def _agree(
    ring: Ring | None, recipe: Recipe, folder: Path | None, degrees: Degrees | None, text: Text, device: str
) -> None:
    """Check before any work that all ranks can run, and with the same arguments. Raises: as `train`."""
    said, error = "", None
    try:
        said = _checked(ring, recipe, folder, degrees, text, device)
    except RinglabError as raised:
        error = raised
    if ring is not None:
        agree(ring.comm, said, error)
    elif error is not None:
        raise error


def _checked(
    ring: Ring | None, recipe: Recipe, folder: Path | None, degrees: Degrees | None, text: Text, device: str
) -> str:
    """Return a text that must be equal on all ranks."""
    if not isinstance(recipe, Recipe):
        raise TrainingError("train(ring, recipe) with a ringlab.nn.Recipe", f"a {type(recipe).__name__}")
    kind = str(device).partition(":")[0]  # a torch.device will do
    if kind not in ("cpu", "cuda"):
        raise DeviceError("device= cpu or cuda", repr(device))
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"a GPU, for device={device!r}", f"torch {torch.__version__}, which sees none")
    config = recipe.model
    if degrees is not None:
        if recipe.batch % degrees.dp:
            raise TrainingError(f"a batch that dp={degrees.dp} divides", f"batch={recipe.batch}")
        sizes = config.heads, config.kv_heads, config.hidden
        mesh.check(degrees, 1 if ring is None else ring.world_size, sizes)
    if ring is None and recipe.window is not None:
        raise TrainingError(
            "a ring, for a window", "ring=None", "VirtualCluster(1).run(train, recipe) has a ring of one rank"
        )
    where = checkpoint.latest(folder) if folder else None
    if where is not None:
        _check_same(checkpoint.read_progress(where), recipe, text)
    versions = f"Python {platform.python_version()} torch {torch.__version__} ringlab {ringlab.__version__}"
    return f"{versions} text #{text.digest} from {where and where.name} {degrees} {recipe}"


def _flat(said: dict[str, Any]) -> dict[str, object]:
    """The model's sizes beside the other fields, so that an error can name only those that differ."""
    rest = {name: value for name, value in said.items() if name != "model"}
    return rest | {f"model.{name}": value for name, value in said["model"].items()}


def _check_same(progress: Progress, recipe: Recipe, text: Text) -> None:
    """Raise TrainingError where a checkpoint is of another recipe or text."""
    made = Recipe(**progress.recipe | {"model": ModelConfig(**progress.recipe["model"])})
    before, now = _flat(made.lasting()), _flat(recipe.lasting())
    other = [f"{name}={before[name]!r}, now {now[name]!r}" for name in now if before[name] != now[name]]
    if progress.step > recipe.steps:
        other.append(f"{progress.step} steps done already, now steps={recipe.steps}")
    if progress.text != text.digest:
        other.append(f"text #{progress.text}, now #{text.digest} ({text.name})")
    if other:
        raise TrainingError(
            "the recipe and text that the checkpoint was made with",
            "; ".join(other),
            "use another folder to start anew",
        )
