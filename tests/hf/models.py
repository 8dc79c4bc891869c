"""Small transformers models with random weights, and one training step on one process, in float64 or float32.

The module also has the step of such a model over a ring. The processes of a launch import this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ringlab import VirtualCluster, hf
from ringlab.comm.ring import Ring
from ringlab.layout import Layout
from ringlab.mask import Mask
from ringlab.nn import Context, sum_gradients
from ringlab.nn.loss import loss_share, summed

os.environ["HF_HUB_OFFLINE"] = "1"

from torch import nn
from torch.nn import functional as F
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    masking_utils,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

IGNORE = -100
VOCABULARY = 17
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = 5


def llama(**other: Any) -> LlamaConfig:
    return LlamaConfig(**SMALL | other)


def mistral(**other: Any) -> MistralConfig:
    return MistralConfig(**SMALL | {"sliding_window": WINDOW} | other)


def qwen2(**other: Any) -> Qwen2Config:
    """Return a Qwen2 whose first layer sees all keys and whose second layer has a window."""
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    return Qwen2Config(**SMALL | window | other)


def qwen3(**other: Any) -> Qwen3Config:
    """Return a model like qwen2, but with heads wider than hidden_size / heads, and norms of the heads."""
    window = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": 8}
    return Qwen3Config(**SMALL | window | other)


def gemma2(**other: Any) -> Gemma2Config:
    """Return a Gemma 2 with soft caps low enough to bend the scores, and windows in every other layer."""
    caps = {
        "head_dim": 8,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    }
    return Gemma2Config(**SMALL | caps | other)


def gpt_oss(**other: Any) -> GptOssConfig:
    """Return a gpt-oss with sinks, windows in every other layer, and all experts chosen for each token."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return GptOssConfig(**SMALL | experts | rotary | {"head_dim": 8, "sliding_window": WINDOW} | other)


def deepseek_v3(**other: Any) -> DeepseekV3Config:
    """Return a DeepSeek-V3 with latent attention, where v has fewer dims than q and k, without experts."""
    dims = {
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
    }
    experts = {"first_k_dense_replace": SMALL["num_hidden_layers"], "n_routed_experts": 2, "n_group": 1}
    return DeepseekV3Config(**SMALL | dims | experts | {"topk_group": 1, "num_key_value_heads": 4} | other)


FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma2": gemma2,
    "gpt-oss": gpt_oss, "deepseek-v3": deepseek_v3,
}  # fmt: skip


def build(config: PreTrainedConfig, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with fixed weights that are large enough for attention and positions to matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or name.endswith(".sinks"):
                parameter.normal_(0.0, 0.3, generator=generator)
    return model.train().to(dtype)


@dataclass
class Batch:
    """Whole sequences, in the form that a user of transformers has."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    attention_mask: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        named = {"position_ids": self.position_ids, "attention_mask": self.attention_mask}
        return {name: x for name, x in named.items() if x is not None}


def batch_of(S: int, rows: int = 1, seed: int = 0, documents: tuple[int, ...] = ()) -> Batch:
    """Return tokens, and labels of which a third is ignored; `documents` are packed as by the collator."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, S), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, IGNORE)
    labels[:, -1] = ids[:, -1]
    if not documents:
        return Batch(ids, labels)
    positions = torch.cat([torch.arange(n) for n in documents])[None].expand(rows, -1)
    return Batch(ids, labels.masked_fill(positions == 0, IGNORE), positions)


@dataclass
class Step:
    """A loss and the gradients of all parameters."""

    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def values(self) -> dict[str, Tensor]:
        return {"loss": torch.tensor(self.loss, dtype=torch.float64), **self.gradients}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def masks_of(model: nn.Module, batch: Batch) -> Any:
    """Return transformers' masks of the positions, one for each kind of layer.

    Models get these masks ready-made, because gpt-oss makes its own masks without the positions, so that
    documents would see each other.
    """
    config, positions = model.config, batch.position_ids
    positions = torch.arange(batch.input_ids.shape[1])[None] if positions is None else positions
    common = {
        "config": config, "inputs_embeds": model.get_input_embeddings()(batch.input_ids), "past_key_values": None,
        "attention_mask": batch.attention_mask, "position_ids": positions,
    }  # fmt: skip
    makers = {"full_attention": masking_utils.create_causal_mask}
    if getattr(config, "sliding_window", None) is not None:
        makers["sliding_attention"] = masking_utils.create_sliding_window_causal_mask
    masks = {kind: make(**common) for kind, make in makers.items()}
    by_layer = getattr(config, "layer_types", None) and config.model_type != "llama"
    return masks if by_layer else list(masks.values())[-1]


def truth(config: PreTrainedConfig, batch: Batch) -> Step:
    """Return the step of one process, all in float64, including the norms, the softmax and the loss."""
    model = exact(build(config, "eager", torch.float64))
    softmax = F.softmax

    def in_float64(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim)

    F.softmax = in_float64
    try:
        given = batch.given() | {"attention_mask": masks_of(model, batch)}
        logits = model(batch.input_ids, use_cache=False, **given).logits
    finally:
        F.softmax = softmax
    assert logits.dtype == torch.float64
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORE)
    loss.backward()
    return Step(loss.item(), gradients_of(model))


def exact(model: nn.Module) -> nn.Module:
    """Return the model in float64, with norms in float64 as well."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
    return model


def _norm(self: Any, x: Tensor) -> Tensor:
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    # Gemma's weight is an offset from 1
    weight = 1.0 + self.weight if hasattr(self, "_norm") else self.weight
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def errors(step: Step, true: Step) -> dict[str, float]:
    """Return the largest error of each value."""
    values = step.values()
    assert values.keys() == true.values().keys()
    return {name: float((values[name].double() - x).abs().max()) for name, x in true.values().items()}


def bounds(true: Step) -> dict[str, float]:
    """Return the allowed errors of a step in float32, far below those of a wrong mask or of a missing token."""
    return {name: 3e-5 * (1 + float(x.abs().max())) for name, x in true.values().items()}


def sharded(context: Context, batch: Batch) -> dict[str, Any]:
    return hf.shard_batch(context, batch.input_ids, labels=batch.labels, **batch.given())


def step_over(
    ring: Ring,
    config: PreTrainedConfig,
    layout: Layout,
    batch: Batch,
    recompute: bool = False,
    **options: Any,
) -> Step:
    """Run a user's step on one rank, and return the loss of all ranks and the summed gradients."""
    model = build(config, "ringlab")
    if recompute:
        model.gradient_checkpointing_enable()
    with hf.context(ring, layout, _mask(batch), **options) as context:
        loss = model(**sharded(context, batch)).loss
    loss.backward()
    sum_gradients(model, ring)
    return Step(float(summed(loss.detach(), ring)), gradients_of(model))


def exact_step_over(ring: Ring, config: PreTrainedConfig, layout: Layout, batch: Batch) -> Step:
    """Run the step in float64 throughout; transformers' own loss would use float32 logits."""
    model = exact(build(config, "ringlab", torch.float64))
    with hf.context(ring, layout, _mask(batch)) as context:
        given = sharded(context, batch)
        labels, count = given.pop("shift_labels"), given.pop("num_items_in_batch")
        del given["labels"]
        loss = loss_share(model(**given).logits, labels, count)
    loss.backward()
    sum_gradients(model, ring)
    return Step(float(summed(loss.detach(), ring)), gradients_of(model))


def over(config: PreTrainedConfig, layout: Layout, batch: Batch, **options: Any) -> list[Step]:
    """Return the step that each rank of a virtual cluster has at the end."""
    return run(partial(step_over, config=config, layout=layout, batch=batch, **options), layout.P)


def run(program: Callable[[Ring], Any], P: int) -> list[Any]:
    return VirtualCluster(P, memory=False).run(program).results


def _mask(batch: Batch) -> Mask | None:
    return None if batch.position_ids is None else hf.mask_of(batch.position_ids)
