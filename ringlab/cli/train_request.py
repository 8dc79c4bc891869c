"""The request of `ringlab train`: the recipe that its options make, and the training on one rank."""

from __future__ import annotations

import importlib.util
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlab.cli.output import check_writable
from ringlab.cli.train_output import Journal
from ringlab.errors import RinglabError, TrainingError

if TYPE_CHECKING:
    from ringlab.comm.ring import Ring
    from ringlab.nn import Degrees, Recipe
    from ringlab.nn.checkpoint import Progress
    from ringlab.nn.text import Text

DEFAULTS: dict[str, Any] = {"learning_rate": 3e-3, "decay": "cosine", "clip": 1.0}
"""Fields of the recipe whose defaults differ for the command; `warmup` is a tenth of the steps."""


@dataclass(frozen=True)
class Request:
    """The options of `ringlab train`; `sizes` and `fields` hold those of the model and the recipe that were given."""

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
        """Return the report of the training, of which this is one rank; rank 0 writes the log and the figure.

        Raises: as `train`; TrainingError if the folder holds a checkpoint and `resume` is not set, the text is not that
            of the checkpoint, or there are other ranks than `ranks` or the degrees ask for; CostError if the folder cannot
            be written.
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
        """Return the recipe of the options; those not given are the checkpoint's, or the defaults without one.

        Raises: as `Recipe`.
        """
        from ringlab.nn import ModelConfig, Recipe

        if before is not None:
            made = Recipe.of(before.recipe)
            return replace(made, model=replace(made.model, **self.sizes), **self.fields)
        fields = {**DEFAULTS, **self.fields}
        fields.setdefault("warmup", fields.get("steps", Recipe.steps) // 10)
        return Recipe(ModelConfig(**self.sizes), **fields)

    def _agreed(self, ring: Ring | None) -> tuple[Recipe, Text, Progress | None]:
        """Return recipe, text and the progress made before, once every rank has them. Raises: as `run`."""
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
        assert made is not None  # or an error was raised
        return made

    def _check_ranks(self, there_are: int) -> None:
        """Raise TrainingError if there are other ranks than `ranks`, or one alone and degrees that need more."""
        if self.ranks not in (None, there_are):
            got = f"--ranks {self.ranks}"
            raise TrainingError(
                f"--ranks {there_are}, as many as torchrun's processes", got, "leave --ranks out"
            )
        given = {name: n for name, n in (("--dp", self.dp), ("--tp", self.tp)) if n is not None}
        asked, needed = " ".join(f"{name} {n}" for name, n in given.items()), math.prod(given.values())
        if min(given.values(), default=1) < 1:
            raise TrainingError("--dp and --tp of at least 1", asked)
        if there_are == 1 < needed:
            started = f"torchrun --nproc-per-node={needed} -m ringlab train {asked}"
            virtual = "" if given.get("--tp", 1) > 1 else f"--ranks {needed}, or "
            raise TrainingError(f"at least {needed} ranks, for {asked}", "one", virtual + started)

    def _made(self) -> tuple[Recipe, Text, Progress | None]:
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

    def _draw(self, losses: list[float], recipe: Recipe, text: Text) -> dict[str, str]:
        """Write the figure if matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            return {}
        from ringlab.viz import training
        from ringlab.viz.style import png

        rates = [recipe.rate(step) for step in range(len(losses))]
        path = self.folder / "loss.png"
        path.write_bytes(png(training.figure(losses, rates, f"Training on {text.name}")))
        return {"figure": str(path)}
