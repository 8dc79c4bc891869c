"""`train`, which runs on one process, on virtual ranks in a notebook, under launch and under torchrun."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from torch.optim import AdamW, Optimizer

import ringlab
from ringlab.comm.ring import Ring
from ringlab.errors import DeviceError, RinglabError, TrainingError
from ringlab.layout import get_layout
from ringlab.nn import checkpoint, mesh
from ringlab.nn.checkpoint import Progress
from ringlab.nn.clipping import clip_gradients
from ringlab.nn.context import Context
from ringlab.nn.loss import loss_share, next_tokens, sum_gradients, summed, valid_tokens
from ringlab.nn.mesh import Degrees
from ringlab.nn.precision import PRECISIONS, computing_in, master_dtype
from ringlab.nn.recipe import Recipe, flat
from ringlab.nn.text import Text, batch, batches, library
from ringlab.nn.transformer import Transformer
from ringlab.rank_agreement import agree
from ringlab.upload import upload


@dataclass(frozen=True)
class Step:
    """A finished step: its number from 1, loss in nats per byte, learning rate, and the gradient's norm.

    `norm`: the norm before clipping, or None if the recipe does not clip.

    >>> steps = []
    >>> _ = train(None, Recipe(S=32, batch=1, steps=2, warmup=2), report=steps.append)
    >>> [(step.number, step.learning_rate, step.norm) for step in steps]
    [(1, 0.0005, None), (2, 0.001, None)]
    """

    number: int
    loss: float
    learning_rate: float
    norm: float | None


def training_step(
    model: Transformer,
    optimizer: Optimizer,
    tokens: Int[Tensor, "B S"],
    context: Context | None = None,
    replicas: Ring | None = None,
) -> float:
    """Make one step on `tokens`, whole sequences. Return its loss in nats per token, equal on all ranks.

    `replicas`: the ring of ranks that have other sequences, or None if there are no such ranks.

    Raises: TrainingError if no token of the batch counts; the errors of `ring_attention`.

    >>> model = Transformer(Recipe().model)
    >>> loss = training_step(model, AdamW(model.parameters()), torch.arange(8)[None])
    >>> 5 < loss < 6  # ln 256 = 5.55 before the first step
    True
    """
    return update(model, optimizer, tokens, context, replicas)[0]


def update(
    model: Transformer,
    optimizer: Optimizer,
    tokens: Int[Tensor, "B S"],
    context: Context | None = None,
    replicas: Ring | None = None,
    *,
    dtype: torch.dtype | None = None,
    micro_batches: int = 1,
    clip: float | None = None,
    shards: Ring | None = None,
) -> tuple[float, float | None]:
    """Make one step. Return its loss, as `training_step`, and the gradient's norm (None without `clip`).

    `dtype`: the dtype of the computation, or None for the weights' dtype. `micro_batches`: the number of
    parts into which this rank's rows are split. `clip`: the gradient's largest norm. `shards`: the `ring` for
    `clip_gradients`.

    Raises: as `training_step` and `clip_gradients`, with the weights unchanged.
    """
    ring, mask = (None, None) if context is None else (context.ring, context.mask)
    labels = next_tokens(tokens, mask)  # before sharding the sequence
    if context is not None:
        tokens, labels = context.shard(tokens), context.shard(labels)
    count = valid_tokens(labels, ring, replicas)  # the number of labels on all ranks and in all micro-batches
    rows = -(-len(tokens) // micro_batches)
    loss = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for mine, theirs in zip(tokens.split(rows), labels.split(rows), strict=True):
        with _computing(model, dtype):
            share = loss_share(model(mine, context), theirs, count)
            share.backward()
        loss += share.detach()
        context = context and replace(context, validate=False)  # the ranks have compared their calls once
    if not checkpoint.is_sharded(model):  # FSDP has summed its gradients already
        sum_gradients(model, ring, replicas)
    norm = None if clip is None else clip_gradients(model, clip, shards)
    optimizer.step()
    optimizer.zero_grad()
    return float(summed(loss, ring, replicas)), norm


def train(
    ring: Ring | None,
    recipe: Recipe,
    folder: str | Path | None = None,
    degrees: Degrees | None = None,
    text: Text | None = None,
    device: str = "cpu",
    *,
    until: int | None = None,
    report: Callable[[Step], None] | None = None,
) -> list[float]:
    """Train, and return the loss of every step in nats per byte, which is the same on all ranks.

    `ring`: None means an ordinary model on one process. `folder`: training resumes from the last checkpoint
    in this folder, whatever world size and layout wrote it, and saves its own checkpoints there. `degrees`:
    data and tensor parallelism in addition to the ring. Without `degrees` all ranks share each sequence. With
    `degrees`, FSDP shards the model over processes, but virtual ranks hold the whole model. `device`: "cuda"
    if the transport carries CUDA tensors. `until`: the step of the recipe after which training saves and
    stops. `report`: a function that is called on rank 0 after every step.

        train(None, recipe)                             one process
        VirtualCluster(4).run(train, recipe)            four virtual ranks: .results[0]
        launch(train, 4, recipe, "runs/first")          four processes, with checkpoints
        with connect() as ring: train(ring, recipe)     under torchrun

    Raises: before the first exchange of data, TrainingError, DeviceError, WorldSizeError, ShapeError or
    BackendError on a rank with an invalid recipe, device, degrees or checkpoint, and AgreementError on all
    other ranks; AgreementError on all ranks if their versions, texts or checkpoints differ.

    >>> losses = train(None, Recipe(S=32, batch=1, steps=2))
    >>> [5 < loss < 6 for loss in losses]
    [True, True]
    """
    if not (ring is None or isinstance(ring, Ring)):
        raise TrainingError(
            "train(ring, recipe) with a ringlab.Ring, or None",
            f"a {type(ring).__name__} as the first argument",
        )
    text, folder = text or library(), None if folder is None else Path(folder)
    _agree(ring, recipe, folder, degrees, text, device, until)
    sequence, replicas, dtype = ring, None, PRECISIONS[recipe.precision]
    model = Transformer(recipe.model, recipe.seed).to(device, master_dtype(recipe.precision))
    if degrees is not None and ring is not None:
        sequence, replicas = mesh.rings(ring, degrees)
        if mesh.of_processes(ring.world_size):
            mesh.parallelize(model, mesh.build(degrees, torch.device(device).type), dtype)
    optimizer = AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    progress = (checkpoint.load(folder, model, optimizer) if folder else None) or Progress()
    progress.recipe, progress.text = asdict(recipe), text.digest
    context = None if sequence is None else _context(sequence, recipe)
    shards = ring if checkpoint.is_sharded(model) else None
    last = min(recipe.steps, until or recipe.steps)
    for number, tokens in batches(text, recipe.S, recipe.batch, recipe.seed, progress.next_batch):
        if progress.step >= last:
            break
        rows = tokens if replicas is None else tokens[replicas.rank :: replicas.world_size]
        rate = recipe.rate(progress.step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, norm = update(
            model,
            optimizer,
            upload(rows, torch.device(device)),
            context,
            replicas,
            dtype=dtype,
            micro_batches=recipe.micro_batches,
            clip=recipe.clip,
            shards=shards,
        )
        progress.losses.append(loss)
        context = context and replace(context, validate=False)  # the ranks have compared their calls once
        progress.step, progress.next_batch = progress.step + 1, number + 1
        if report and (ring is None or ring.rank == 0):
            report(Step(progress.step, loss, rate, norm))
        if folder and (progress.step % recipe.save_every == 0 or progress.step == last):
            checkpoint.save(folder, model, optimizer, progress, ring)
    return progress.losses


def _computing(model: Transformer, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Return the context in which `model` computes in `dtype`.

    With FSDP, which itself casts the parameters, the context does nothing.
    """
    from torch.distributed.fsdp import FSDPModule

    own = dtype is None or dtype == next(model.parameters()).dtype or isinstance(model, FSDPModule)
    return nullcontext() if own or dtype is None else computing_in(dtype, model)


def _context(ring: Ring, recipe: Recipe) -> Context:
    layout = get_layout(recipe.layout, recipe.S, ring.world_size)
    return Context(ring, layout, recipe.mask, recipe.schedule, recipe.block)


def _agree(
    ring: Ring | None,
    recipe: Recipe,
    folder: Path | None,
    degrees: Degrees | None,
    text: Text,
    device: str,
    until: int | None,
) -> None:
    """Check, before any work, that all ranks can run and have the same arguments. Raises: as `train`."""
    said, error = "", None
    try:
        said = _checked(ring, recipe, folder, degrees, text, device, until)
    except RinglabError as raised:
        error = raised
    if ring is not None:
        agree(ring.comm, said, error)
    elif error is not None:
        raise error


def _checked(
    ring: Ring | None,
    recipe: Recipe,
    folder: Path | None,
    degrees: Degrees | None,
    text: Text,
    device: str,
    until: int | None,
) -> str:
    """Check this rank's arguments, and return a text that must be equal on all ranks."""
    if not isinstance(recipe, Recipe):
        raise TrainingError("train(ring, recipe) with a ringlab.nn.Recipe", f"a {type(recipe).__name__}")
    kind = str(device).partition(":")[0]  # `device` may be a torch.device
    if kind not in ("cpu", "cuda"):
        raise DeviceError("device= cpu or cuda", repr(device))
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"a GPU, for device={device!r}", f"torch {torch.__version__}, which sees none")
    config = recipe.model
    if degrees is not None:
        if recipe.batch % (degrees.dp * recipe.micro_batches):
            got = f"batch={recipe.batch}, micro_batches={recipe.micro_batches}"
            raise TrainingError(f"a batch divisible by dp={degrees.dp} times micro_batches", got)
        sizes = config.heads, config.kv_heads, config.hidden
        mesh.check(degrees, 1 if ring is None else ring.world_size, sizes)
    if ring is None and recipe.window is not None:
        raise TrainingError(
            "a ring, because the recipe has a window",
            "ring=None",
            "VirtualCluster(1).run(train, recipe) has a ring of one rank",
        )
    batch(text, recipe.S, 1, 0)  # raises for a text that is too short
    if max(text.content) >= config.vocabulary:
        needed = f"a vocabulary above {max(text.content)}, the largest byte of {text.name}"
        raise TrainingError(needed, f"vocabulary={config.vocabulary}", "256 is enough for any bytes")
    if until is not None and until < 1:
        raise TrainingError("until= a step from 1 on", f"{until}")
    where = checkpoint.latest(folder) if folder else None
    if where is not None:
        _check_same(checkpoint.read_progress(where), recipe, text)
    versions = f"Python {platform.python_version()} torch {torch.__version__} ringlab {ringlab.__version__}"
    return f"{versions} text #{text.digest} from {where and where.name} {degrees} until {until} {recipe.unusual()}"


def _check_same(progress: Progress, recipe: Recipe, text: Text) -> None:
    """Raise TrainingError if a checkpoint was made with another recipe or text."""
    before, now = flat(Recipe.of(progress.recipe).lasting()), flat(recipe.lasting())
    # Compare the names that are in both recipes. `steps` may be in only one of them if the decay differs.
    both = [name for name in now if name in before]
    other = [f"{name}={before[name]!r}, now {now[name]!r}" for name in both if before[name] != now[name]]
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
