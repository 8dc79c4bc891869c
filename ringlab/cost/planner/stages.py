"""The stages of a pipeline: the layers of each stage, its share of the vocabulary, and its activations.

Layers are distributed evenly. If their number is not a multiple of the number of stages, stages between the
first and the last have one more layer, because the first also looks words up and the last also computes the
loss (as in arXiv 2407.21783, section 3.3.2).

Micro-batches alternate one forward and one backward. The first of pp stages then holds the activations of up
to pp micro-batches. With `interleave` chunks of layers on every stage, a micro-batch passes each stage
`interleave` times. This divides the bubble by `interleave`, but more activations are held (arXiv 2104.04473,
section 2.2).

If a model's layers differ, a stage is taken to have its share of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringlab.cost.models import Model


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline: `layers` layers of the model, and `matrices` of its embedding and its head.

    name: "first", "second" or "last"; "" if one stage is the whole model. chunks_held: the most chunks whose
    activations the stage holds at once; each stage has `interleave` chunks.
    """

    name: str
    model: Model
    layers: int
    matrices: int
    computes_loss: bool
    chunks_held: int = 1
    interleave: int = 1

    @property
    def parameters(self) -> int:
        """Return the weights of this stage; the norm after the last layer belongs to the last stage."""
        return self.rank_parameters(1) + self.expert_parameters

    def rank_parameters(self, tp: int) -> int:
        """Return the weights on one of `tp` ranks without experts, as `Model.rank_parameters` counts them."""
        it = self.model
        matrices = self._share(sum(kind.layers * kind.rank_common_parameters(tp) for kind in it.kinds))
        vocabulary = self.matrices * -(-it.vocabulary // tp) * it.d_model
        norms = (2 * self.layers + int(self.computes_loss)) * it.d_model
        return matrices + vocabulary + norms

    @property
    def expert_parameters(self) -> int:
        """Return the weights of this stage's experts."""
        return self._share(self.model.expert_parameters)

    def _share(self, of_all_layers: int) -> int:
        return -(-of_all_layers * self.layers // self.model.layers)

    @property
    def layers_held(self) -> int:
        """Return the number of layers whose activations the stage holds at once, once for each micro-batch."""
        return -(-self.layers * self.chunks_held // self.interleave)


def stages(model: Model, pp: int = 1, interleave: int = 1, micro_batches: int = 1) -> tuple[Stage, ...]:
    """Return the stages that can need most memory: the first, the second and the last of pp.

    Stages between the second and the last hold no more layers than the second, and fewer micro-batches.
    """
    if pp == 1:
        return (Stage("", model, model.layers, 1 if model.tied_embeddings else 2, True),)
    least, more = divmod(model.layers, pp)
    found = []
    for name, index in (("first", 0), ("second", 1), ("last", pp - 1)):
        if name == "second" and pp == 2:
            continue
        extra = {"first": more == pp - 1, "second": more > 0, "last": False}[name]
        held = chunks_held(index, pp, interleave, micro_batches)
        matrices = 0 if name == "second" else 1
        found.append(Stage(name, model, least + extra, matrices, name == "last", held, interleave))
    return tuple(found)


def chunks_held(stage: int, pp: int, interleave: int, micro_batches: int) -> int:
    """Return the most chunks of layers whose activations stage `stage` of pp holds at once.

    The stage runs this number of forwards before its first backward; from then on each backward frees the
    memory that the next forward takes. The first stage holds pp micro-batches, or pp + (pp − 1) / interleave
    with chunks.
    Source: arXiv 2205.05198, section 4.2.3.
    """
    before = pp - 1 - stage if interleave == 1 else 2 * (pp - 1 - stage) + (interleave - 1) * pp
    return min(interleave * micro_batches, before + 1)


def largest_layers(found: tuple[Stage, ...]) -> int:
    """Return the number of layers of the fullest stage."""
    return max(stage.layers for stage in found)
