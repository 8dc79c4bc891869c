"""Every transformers model family that can be built at a small size gives the right result or is refused.

The right result is that of one process. A refusal is one of ringlab's own errors and names a remedy.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, logging
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ringlab import VirtualCluster, hf, zigzag
from ringlab.comm.ring import Ring
from ringlab.errors import AgreementError, RinglabError
from ringlab.nn.loss import summed

S, P, VOCABULARY, MOST = 16, 2, 32, 5_000_000
LAYOUT = zigzag(S, P)
KINDS = (
    modeling_auto.MODEL_MAPPING,
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)
SMALL: dict[str, Any] = (
    dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    )
    | dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim", "ffn_hidden_size"), 48)
    | dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48)
    | dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2
    )
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4)
    | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "mamba_n_heads"), 4)
    | dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), 64
    )
    | dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_k"), 2
    )
    | dict.fromkeys(("moe_num_experts", "num_key_value_heads", "mamba_expand", "linear_num_value_heads"), 2)
    | dict.fromkeys(("linear_num_key_heads", "index_n_heads", "type_vocab_size"), 2)
    | dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1
    )
    | dict.fromkeys(
        ("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "index_head_dim", "linear_key_head_dim"), 8
    )
    | dict.fromkeys(("linear_value_head_dim", "state_size", "mamba_d_state", "patch_size", "num_mel_bins"), 8)
    | dict.fromkeys(("hidden_size_per_layer_input",), 8)
    | dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "dropout"), 0.0)
    | {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "mamba_d_head": 16,
        "image_size": 16,
    }
    | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6, "sliding_window": 5, "rotary_dim": 4}
    | {
        "max_source_positions": 32,
        "attn_pdrop": 0,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_window": [4, 4], "index_topk": 64}
)
IDS = torch.randint(3, VOCABULARY, (1, S), generator=torch.Generator().manual_seed(0))
OF_A_TYPE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "esm": {"mask_token_id": 5, "pad_token_id": 0},
    "mamba2": {"head_dim": 16, "expand": 2, "n_groups": 1},
}
WITHOUT = (
    (),
    ("head_dim",),
    ("num_key_value_heads",),
    ("head_dim", "num_key_value_heads"),
    ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_key_value_heads"),
    ("attention_window",),
    ("sliding_window",),
    ("pad_token_id", "bos_token_id", "eos_token_id"),
    ("num_hidden_layers",),
)
"""Options that a family may not accept. The first of these sets without which a model runs is left out."""


def small(kind: type[PreTrainedConfig], without: tuple[str, ...]) -> PreTrainedConfig:
    default: Any = kind()
    given = {
        name: x
        for name, x in SMALL.items()
        if getattr(default, name, None) is not None or name == "vocab_size"
    }
    given = {name: x for name, x in given.items() if hasattr(default, name) and name not in without}
    for name in getattr(kind, "sub_configs", None) or {}:
        if (part := getattr(default, name, None)) is not None:
            given[name] = small(type(part), without).to_dict()
    return kind(**given | OF_A_TYPE.get(kind.model_type, {}))


def built(kind: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> nn.Module:
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model.eval()


def outputs(model: nn.Module, **given: Any) -> dict[str, Tensor]:
    """Return the tensors of the model's output by name; tensors of several layers get numbered names."""
    with torch.no_grad():
        found = model(**given)
    flat = {name: x if isinstance(x, tuple | list) else (x,) for name, x in found.items()}
    return {f"{name}{n}": x for name, each in flat.items() for n, x in enumerate(each) if floats(x)}


def floats(x: Any) -> bool:
    """Return whether `x` is a tensor of floats: a model may also return the labels that it got."""
    return isinstance(x, Tensor) and x.is_floating_point()


def alone(
    kind: type[PreTrainedModel], labels: bool, attempts: tuple[tuple[str, ...], ...] = WITHOUT
) -> tuple[tuple[str, ...], dict[str, Tensor]] | None:
    """Return (options left out, output on one process) of a small model, or None if none can be built."""
    for without in attempts:
        try:
            with torch.device("meta"):
                if sum(x.numel() for x in kind(small(kind.config_class, without)).parameters()) > MOST:
                    continue
            model = built(kind, small(kind.config_class, without), "eager")
            given: dict[str, Any] = {"input_ids": IDS} | ({"labels": IDS} if labels else {})
            if "use_cache" in inspect.signature(kind.forward).parameters:
                given["use_cache"] = False
            return without, outputs(model, **given)
        except Exception:  # transformers' own error about an unusable config
            continue
    return None


def over(ring: Ring, kind: type[PreTrainedModel], without: tuple[str, ...], labels: bool) -> Any:
    """Return the output of a rank, or the error that the rank raises."""
    try:
        model: Any = built(kind, small(kind.config_class, without), hf.NAME)
        configs = [model.config, *(getattr(model.config, name, None) for name in model.config.sub_configs)]
        types = tuple(config.model_type for config in configs if config is not None)
        with hf.context(ring, LAYOUT, models=types) as context:
            found = outputs(model, **hf.shard_batch(context, IDS, labels=IDS if labels else None))
        return {name: summed(x, ring) if name == "loss0" else x for name, x in found.items()}
    except Exception as error:
        return error


def classes(name: str) -> Iterator[type[PreTrainedModel]]:
    """Yield the classes of a family."""
    for kinds in KINDS:
        try:
            found = kinds.get(CONFIG_MAPPING[name], ())
        except ValueError:  # transformers names a class here that does not exist
            continue
        for kind in found if isinstance(found, tuple | list) else (found,):
            # Others are placeholders for classes that need a package that is not installed.
            if issubclass(kind, PreTrainedModel):
                yield kind


def trials(name: str) -> Iterator[tuple[type[PreTrainedModel], bool, tuple[str, ...], dict[str, Tensor]]]:
    """Yield (class, whether labels are given, options left out, output on one process) for a family.

    A class that takes labels comes with labels and without.
    """
    for kind in dict.fromkeys(classes(name)):
        if (plain := alone(kind, False)) is None:
            continue
        takes_labels = "labels" in inspect.signature(kind.forward).parameters
        if takes_labels and (labelled := alone(kind, True, (plain[0],))) is not None:
            yield kind, True, *labelled
        yield kind, False, *plain


def faults(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the results of a family's classes, and the faults: a raw error, no remedy, or a wrong output.

    A class that is right with labels has given the right logits too, and is not run without labels.
    """
    seen: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for kind, labels, without, true in trials(name):
        if seen.get(f"{kind.__name__}, labels") == "equal":
            continue
        title = f"{kind.__name__}{', labels' * labels}"
        ranks = VirtualCluster(P, memory=False).run(over, kind, without, labels).results
        errors = [found for found in ranks if isinstance(found, Exception)]
        if errors:
            own = [error for error in errors if not isinstance(error, AgreementError)]
            seen[title] = type(own[0]).__name__ if own else "AgreementError"
            bad = [error for error in errors if not isinstance(error, RinglabError) or not error.remedy]
            if bad or not own or len(errors) < P:
                wrong[title] = repr((bad or errors)[0])
        else:
            seen[title] = "equal"
            wrong |= {
                f"{title}: {key}": "differs"
                for key, x in true.items()
                if not close(x, [of.get(key) for of in ranks])
            }
    return seen, wrong


def close(true: Tensor, parts: list[Tensor | None]) -> bool:
    """Return whether an output equals one process's up to errors far below those of a wrong mask."""
    shapes = [None if part is None else tuple(part.shape[1:2]) for part in parts]
    if shapes != ([()] * P if true.ndim == 0 else [(length,) for length in LAYOUT.lengths]):
        return False
    found = parts[0] if true.ndim == 0 else LAYOUT.unshard(parts, dim=1)
    assert found is not None
    return bool((found - true).abs().max() <= 2e-4 * (1 + true.abs().max()))


FEW: dict[str, dict[str, str]] = {
    "llama": {"LlamaForCausalLM, labels": "equal", "LlamaForSequenceClassification": "BackendError"},
    "opt": {"OPTForCausalLM, labels": "equal"},
    "bert": {
        "BertModel": "BackendError",
        "BertForMaskedLM": "equal",
        "BertForMaskedLM, labels": "TrainingError",
    },
    "albert": {"AlbertModel": "BackendError", "AlbertForMaskedLM": "equal"},
    "modernbert": {"ModernBertForMaskedLM": "MaskError"},
    "esm": {"EsmForMaskedLM": "BackendError"},
    "bart": {"BartModel": "BackendError", "BartForCausalLM": "BackendError"},
    "falcon": {"FalconForCausalLM": "BackendError"},
    "gpt_neo": {"GPTNeoForCausalLM": "BackendError"},
    "mpt": {"MptForCausalLM": "BackendError"},
    "doge": {"DogeForCausalLM": "MaskError"},
    "mamba2": {"Mamba2ForCausalLM": "BackendError"},
    "qwen3_next": {"Qwen3NextForCausalLM": "BackendError"},
    "fnet": {"FNetForMaskedLM": "BackendError"},
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.set_verbosity_error()


@pytest.mark.parametrize("name", FEW)
def test_a_family(name: str) -> None:
    seen, wrong = faults(name)
    assert not wrong
    assert {title: seen.get(title) for title in FEW[name]} == FEW[name]


PARTS = 8


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family(part: int) -> None:
    """Every family that can be built small and takes tokens is right or refused."""
    names = [name for name in sorted(CONFIG_MAPPING.keys()) if name not in FEW][part::PARTS]
    found = {name: faults(name) for name in names}
    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
    assert any("equal" in seen.values() for seen, _ in found.values())
