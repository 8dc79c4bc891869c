"""`ringlab train`: train the small transformer on one process, on virtual ranks or under torchrun.

The options define a recipe. Each step adds a line to log.jsonl and advances the progress on stderr. A summary
is printed at the end.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer
from rich.table import Table
from rich.text import Text

from ringlab.cli.output import (
    Json,
    check_writable,
    finish,
    people,
    print_json,
    progress_bar,
    reporting_errors,
    stderr,
)
from ringlab.errors import RinglabError, TrainingError

if TYPE_CHECKING:
    from ringlab.comm.ring import Ring
    from ringlab.nn import Degrees, Recipe, Step
    from ringlab.nn import text as nn_text
    from ringlab.nn.checkpoint import Progress

DATA, MODEL, OPTIMIZER, RANKS, OUT = "Data", "Model", "Optimizer", "Ranks", "Output"


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


TextFile = Annotated[
    Path | None,
    _option(DATA, "Learn this file's bytes instead of Python's standard library.", metavar="FILE"),
]
Tokens = Annotated[int | None, _option(DATA, "Bytes of a sequence; 256 by default.")]
Batch = Annotated[int | None, _option(DATA, "Sequences of a step; 2 by default.")]
MicroBatches = Annotated[
    int | None, _option(DATA, "Parts into which a batch is split to save memory; 1 by default.")
]
Seed = Annotated[int | None, _option(DATA, "Seed of weights and batches; 0 by default.")]
Width = Annotated[int | None, _option(MODEL, "Width of the residual stream; 64 by default.")]
Layers = Annotated[int | None, _option(MODEL, "Layers; 2 by default.")]
Heads = Annotated[int | None, _option(MODEL, "Query heads; 4 by default.")]
KvHeads = Annotated[int | None, _option(MODEL, "Key/value heads; 2 by default.")]
Hidden = Annotated[int | None, _option(MODEL, "Width of the feed-forward; 192 by default.")]
Window = Annotated[int | None, _option(MODEL, "A sliding window: the tokens that each row sees.")]
Recompute = Annotated[
    bool | None, _option(MODEL, "Compute activations again in backward, to save memory.", "--recompute")
]
Steps = Annotated[int | None, _option(OPTIMIZER, "Updates of the weights; 200 by default.")]
Rate = Annotated[float | None, _option(OPTIMIZER, "Peak learning rate; 0.003 by default.")]
Warmup = Annotated[int | None, _option(OPTIMIZER, "Steps until the peak; a tenth of all steps by default.")]
Decay = Annotated[
    str | None,
    _option(OPTIMIZER, "The rate after the warm-up; cosine by default.", metavar="constant|cosine|linear"),
]
FinalRate = Annotated[
    float | None, _option(OPTIMIZER, "Learning rate at which a decay ends; 0.0 by default.")
]
Clip = Annotated[
    float | None, _option(OPTIMIZER, "Largest norm of the whole gradient; 1.0 by default; inf for none.")
]
WeightDecay = Annotated[float | None, _option(OPTIMIZER, "AdamW's weight decay; 0.01 by default.")]
Precision = Annotated[
    str | None,
    _option(
        OPTIMIZER,
        "Dtype of forward and backward; weights and optimizer keep float32 at least. float32 by default.",
        metavar="float64|float32|bfloat16",
    ),
]
Ranks = Annotated[
    int | None,
    _option(RANKS, "Virtual ranks that share each sequence; without it, an ordinary model.", min=1),
]
DataParallel = Annotated[
    int | None,
    _option(RANKS, "Ranks, or rings of ranks, that take different sequences. On processes, FSDP shards the model.", "--dp"),
]  # fmt: skip
TensorParallel = Annotated[
    int | None, _option(RANKS, "Ranks that share the heads; on processes only.", "--tp")
]
LayoutName = Annotated[str | None, _option(RANKS, "The layout of the tokens; zigzag by default.", "--layout")]
Schedule = Annotated[
    str | None, _option(RANKS, "How queries meet keys, as for `ringlab simulate`; ring by default.")
]
Device = Annotated[
    str, _option(RANKS, "cpu, or cuda: one GPU, or under torchrun one a rank.", metavar="cpu|cuda")
]
Folder = Annotated[Path, _option(OUT, "Folder for checkpoints, log.jsonl and loss.png.", metavar="FOLDER")]
Resume = Annotated[
    bool, _option(OUT, "Continue from the folder's last checkpoint, if there is one, with its recipe.", "--resume")
]  # fmt: skip
SaveEvery = Annotated[int | None, _option(OUT, "Steps between checkpoints; 100 by default.")]
Until = Annotated[int | None, _option(OUT, "Stop after this step, with a checkpoint to resume from.")]


def train(
    text: TextFile = None,
    tokens: Tokens = None,
    batch: Batch = None,
    micro_batches: MicroBatches = None,
    seed: Seed = None,
    width: Width = None,
    layers: Layers = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    hidden: Hidden = None,
    window: Window = None,
    recompute: Recompute = None,
    steps: Steps = None,
    learning_rate: Rate = None,
    warmup: Warmup = None,
    decay: Decay = None,
    final_learning_rate: FinalRate = None,
    clip: Clip = None,
    weight_decay: WeightDecay = None,
    precision: Precision = None,
    ranks: Ranks = None,
    dp: DataParallel = None,
    tp: TensorParallel = None,
    layout: LayoutName = None,
    schedule: Schedule = None,
    device: Device = "cpu",
    folder: Folder = Path("runs/train"),
    resume: Resume = False,
    save_every: SaveEvery = None,
    until: Until = None,
    as_json: Json = False,
) -> None:
    """Train a small transformer over a ring, and write its loss curve.

    Under torchrun, it trains on torchrun's processes.
    """
    sizes = {"width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": hidden,
             "recompute": recompute}  # fmt: skip
    fields = {"S": tokens, "batch": batch, "micro_batches": micro_batches, "seed": seed, "window": window,
              "steps": steps, "learning_rate": learning_rate, "warmup": warmup, "decay": decay,
              "final_learning_rate": final_learning_rate, "clip": clip, "weight_decay": weight_decay,
              "precision": precision, "layout": layout, "schedule": schedule, "save_every": save_every}  # fmt: skip
    request = Request(
        sizes=_given(sizes), fields=_given(fields), text=text, folder=folder, resume=resume, until=until,
        dp=dp, tp=tp, device=device, ranks=ranks,
    )  # fmt: skip
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if torchrun and int(os.environ["RANK"]) > 0:
        _follow(request)
    with reporting_errors(as_json):
        report = _under_torchrun(request) if torchrun else _here(request)
    print_json(report) if as_json else show(report)
    finish(True)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _here(request: Request) -> dict[str, Any]:
    """Run on virtual ranks, or without a ring if neither `ranks` nor a window is given.

    A window needs a ring, so it runs on one virtual rank if `ranks` is not given.
    """
    from ringlab.comm.virtual.cluster import VirtualCluster

    if request.ranks is None and "window" not in request.fields:
        return request.run(None)
    report: dict[str, Any] = VirtualCluster(request.ranks or 1, memory=False).run(request.run).results[0]
    return report


def _under_torchrun(request: Request) -> dict[str, Any]:
    from ringlab.comm.processes.connect import connect

    with connect("nccl" if request.device == "cuda" else "gloo") as ring:
        return request.run(ring)


def _follow(request: Request) -> NoReturn:
    """Run as a rank other than 0. It prints nothing, because rank 0 quotes its errors."""
    try:
        _under_torchrun(request)
    except RinglabError:
        raise typer.Exit(1) from None
    finish(True)


DEFAULTS: dict[str, Any] = {"learning_rate": 3e-3, "decay": "cosine", "clip": 1.0}
"""Fields of the recipe whose defaults differ for the command; `warmup` is a tenth of the steps."""


@dataclass(frozen=True)
class Request:
    """The options of `ringlab train`.

    sizes: the model's options that were passed. fields: the recipe's other options that were passed.
    """

    sizes: dict[str, Any]
    fields: dict[str, Any]
    text: Path | None
    folder: Path
    resume: bool
    until: int | None
    dp: int | None
    tp: int | None
    device: str
    ranks: int | None = None

    def run(self, ring: Ring | None) -> dict[str, Any]:
        """Train as one rank, and return the report; rank 0 writes the log and the figure.

        Raises: as `train`; TrainingError if the folder contains a checkpoint and `resume` is not set, if the
            text is not the checkpoint's text, or if the number of ranks does not fit `ranks` and the degrees;
            CostError if the folder cannot be written.
        """
        from ringlab.nn import train

        recipe, text, before = self._agreed(ring)
        degrees = None if ring is None else self._degrees(ring.world_size)
        last = min(recipe.steps, self.until or recipe.steps)
        begin, done = time.perf_counter(), 0 if before is None else before.step
        with Journal(self.folder / "log.jsonl", done, last, recipe.steps) as journal:
            losses = train(
                ring, recipe, self.folder, degrees, text, self.device, until=self.until, report=journal
            )
        seconds = time.perf_counter() - begin
        files = {"log": str(self.folder / "log.jsonl"), "checkpoints": str(self.folder)}
        if ring is None or ring.rank == 0:
            files |= self._draw(losses, recipe, text)
        steps = max(0, len(losses) - done)
        return {
            "ok": True,
            "recipe": recipe.unusual(),
            "text": f"{text.name}, {len(text):,} bytes, #{text.digest}",
            "ranks": 1 if ring is None else ring.world_size,
            "transport": "none" if ring is None else type(ring.comm).__name__,
            "degrees": None if degrees is None else {"dp": degrees.dp, "cp": degrees.cp, "tp": degrees.tp},
            "resumed_from": done or None,
            "steps": len(losses),
            "of": recipe.steps,
            "seconds": seconds,
            "bytes_per_second": steps * recipe.batch * recipe.S / seconds,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "losses": losses,
            "files": files,
        }

    def recipe(self, before: Progress | None) -> Recipe:
        """Return the recipe. Options that were not passed come from the checkpoint, or are the defaults.

        Raises: as `Recipe`.
        """
        from ringlab.nn import ModelConfig, Recipe

        if before is not None:
            made = Recipe.of(before.recipe)
            return replace(made, model=replace(made.model, **self.sizes), **self.fields)
        fields = {**DEFAULTS, **self.fields}
        fields.setdefault("warmup", fields.get("steps", Recipe.steps) // 10)
        return Recipe(ModelConfig(**self.sizes), **fields)

    def _agreed(self, ring: Ring | None) -> tuple[Recipe, nn_text.Text, Progress | None]:
        """Return the recipe, the text and the earlier progress, once every rank has them.

        Raises: as `run`.
        """
        from ringlab.rank_agreement import agree

        made, error = None, None
        try:
            self._check_ranks(1 if ring is None else ring.world_size)
            made = self._made()
        except RinglabError as raised:
            error = raised
        if ring is not None:
            agree(ring.comm, "" if made is None else repr(made[0].unusual()), error)
        elif error is not None:
            raise error
        assert made is not None  # otherwise an error was raised
        return made

    def _check_ranks(self, there_are: int) -> None:
        """Raise TrainingError if the number of ranks is not `ranks`, or is 1 and the degrees need more."""
        if self.ranks not in (None, there_are):
            got = f"--ranks {self.ranks}"
            raise TrainingError(
                f"--ranks {there_are}, the number of torchrun's processes", got, "leave --ranks out"
            )
        given = {name: n for name, n in (("--dp", self.dp), ("--tp", self.tp)) if n is not None}
        asked, needed = " ".join(f"{name} {n}" for name, n in given.items()), math.prod(given.values())
        if min(given.values(), default=1) < 1:
            raise TrainingError("--dp and --tp of at least 1", asked)
        if there_are == 1 < needed:
            started = f"torchrun --nproc-per-node={needed} -m ringlab train {asked}"
            virtual = "" if given.get("--tp", 1) > 1 else f"--ranks {needed}, or "
            raise TrainingError(f"at least {needed} ranks, for {asked}", "1 rank", virtual + started)

    def _made(self) -> tuple[Recipe, nn_text.Text, Progress | None]:
        from ringlab.nn import checkpoint
        from ringlab.nn.text import from_file, library

        where = checkpoint.latest(self.folder)
        if where is not None and not self.resume:
            got = f"{self.folder}, which has {where.name}"
            raise TrainingError("a folder without a training", got, "--resume to go on, or another --folder")
        before = None if where is None else checkpoint.read_progress(where)
        recipe = self.recipe(before)
        check_writable("--folder", self.folder / "log.jsonl", make_folder=True)
        text = library() if self.text is None else from_file(self.text)
        if before is not None and before.text != text.digest:
            needed = f"the text #{before.text} that the checkpoint was trained on"
            raise TrainingError(needed, f"#{text.digest}, {text.name}", "--text with that file")
        return recipe, text, before

    def _degrees(self, ranks: int) -> Degrees | None:
        from ringlab.nn import Degrees

        if self.dp is None and self.tp is None:
            return None
        dp, tp = self.dp or 1, self.tp or 1
        return Degrees(dp, max(1, ranks // max(1, dp * tp)), tp)

    def _draw(self, losses: list[float], recipe: Recipe, text: nn_text.Text) -> dict[str, str]:
        """Write the figure if matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return {}
        from ringlab.viz import training
        from ringlab.viz.style import png

        rates = [recipe.rate(step) for step in range(len(losses))]
        path = self.folder / "loss.png"
        path.write_bytes(png(training.figure(losses, rates, f"Training on {text.name}")))
        return {"figure": str(path)}


BARS = "▁▂▃▄▅▆▇█"
_LINES = 10  # lines of progress if stderr is not a terminal


class Journal:
    """The `report` function of a training, which writes each step to a JSONL file and shows progress.

    The file is opened at the first step. The steps of an earlier run before that step are kept. Later steps
    are removed, because a run that was killed after its last checkpoint makes these steps again.
    """

    def __init__(self, path: Path, done: int, last: int, steps: int) -> None:
        self.path, self.done, self.last, self.steps = path, done, last, steps
        self.begin = time.perf_counter()
        self.file: TextIO | None = None
        self.bar = progress_bar()

    def __enter__(self) -> Journal:
        return self

    def __call__(self, step: Step) -> None:
        """Record a finished step."""
        if self.file is None:
            self._open(step.number)
        assert self.file is not None
        line = {**asdict(step), "seconds": round(time.perf_counter() - self.begin, 3)}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        said = f"step {step.number} of {self.steps}, loss {step.loss:.3f}"
        self.bar.update(self.task, completed=step.number, description=said)
        every = max(1, self.last // _LINES)
        if not stderr.is_terminal and (step.number % every == 0 or step.number == self.last):
            stderr.print(said, highlight=False, soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            self.bar.stop()
            self.file.close()

    def _open(self, first: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        old = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in old if _number(line) < first]
        self.path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self.file = self.path.open("a", encoding="utf-8")
        self.bar.start()
        self.task = self.bar.add_task("train", total=self.last, completed=self.done)


def _number(line: str) -> float:
    """Return the number of the step of a line, or infinity for a line that a killed run did not finish."""
    try:
        return float(json.loads(line)["number"])
    except (KeyError, TypeError, ValueError):
        return float("inf")


def sparkline(losses: list[float], width: int = 60) -> str:
    """Return the curve as a row of bars. Each bar is the mean of equally many steps.

    >>> sparkline([5.5, 4.0, 3.0, 2.8], width=4)
    '█▄▁▁'
    """
    count = min(width, len(losses))
    edges = [round(part * len(losses) / count) for part in range(count + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[int((mean - low) * scale)] for mean in means)


def show(report: dict[str, Any]) -> None:
    """Print the summary for people."""
    table = Table.grid(padding=(0, 2))
    ranks, degrees = report["ranks"], report["degrees"]
    where = (
        "one process, without a ring" if report["transport"] == "none" else f"{ranks} rank{'s' * (ranks > 1)}"
    )
    split = "" if degrees is None else ": " + " × ".join(f"{name} {size}" for name, size in degrees.items())
    resumed = f", resumed after step {report['resumed_from']}" if report["resumed_from"] else ""
    rows = {
        "steps": f"{report['steps']} of {report['of']}{resumed}",
        "ranks": where + split,
        "text": report["text"],
        "recipe": ", ".join(f"{name} {value}" for name, value in report["recipe"].items()),
        "loss": f"{report['first_loss']:.3f} → {report['last_loss']:.3f} nats per byte",
        "": sparkline(report["losses"]),
        "time": f"{report['seconds']:.1f} s, {report['bytes_per_second']:,.0f} bytes of text a second",
        "files": ", ".join(report["files"].values()),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    people.print(table, highlight=False)
