"""`ringlab train`: train the small transformer on one process, on virtual ranks or under torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ringlab.cli.output import Json, finish, print_json, reporting_errors
from ringlab.cli.train_output import show
from ringlab.cli.train_request import Request
from ringlab.errors import RinglabError

DATA, MODEL, OPTIMIZER, RANKS, OUT = "Data", "Model", "Optimizer", "Ranks", "What is written"


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
LayoutName = Annotated[
    str | None, _option(RANKS, "How tokens lie on the ranks; zigzag by default.", "--layout")
]
Schedule = Annotated[
    str | None, _option(RANKS, "How queries meet keys, as for `ringlab simulate`; ring by default.")
]
Device = Annotated[
    str, _option(RANKS, "cpu, or cuda: one GPU, or under torchrun one a rank.", metavar="cpu|cuda")
]
Folder = Annotated[Path, _option(OUT, "Folder for checkpoints, log.jsonl and loss.png.", metavar="FOLDER")]
Resume = Annotated[
    bool, _option(OUT, "Go on from the folder's last checkpoint, if there is one, with its recipe.", "--resume")
]  # fmt: skip
SaveEvery = Annotated[int | None, _option(OUT, "Steps between checkpoints; 100 by default.")]
Until = Annotated[int | None, _option(OUT, "Stop after this step, with a checkpoint, to go on another time.")]


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
    """Train a small transformer over a ring, and write its loss curve; started by torchrun, on torchrun's processes."""
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
    """Run on virtual ranks, or on this process alone if there is neither `ranks` nor a window, which needs a ring."""
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
    """Run as a rank other than 0, which prints nothing: rank 0 quotes its errors."""
    try:
        _under_torchrun(request)
    except RinglabError:
        raise typer.Exit(1) from None
    finish(True)
