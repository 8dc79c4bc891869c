"""Published numbers of weights follow from models' sizes; users' files are read, or refused with the line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ringlab.cost import models
from ringlab.cost.models import model, model_names, read_models
from ringlab.errors import CostError

PRINTED = 2e-3  # the allowed relative difference, because 65.286 is published as 65.2
EXACT = {  # from the safetensors indices of the models on huggingface.co; nothing is left out
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    # ringlab leaves out biases of Q, K and V, and norms of Q and K.
    "qwen2.5-7b": 7_615_616_512 - 28 * (28 + 4 + 4) * 128,
    "qwen3-8b": 8_190_735_360 - 36 * 2 * 128,
}
ROUNDED = {  # billions of weights
    "llama2-13b": 13.016,  # the safetensors index, as for the next three
    "llama2-70b": 68.977,
    "qwen2.5-72b": 72.706,
    "qwen3-32b": 32.762,
    "gpt3-175b": 174.6,  # arXiv 2005.14165, appendix D
    "ring-7b": 6.738,  # the sizes of Llama 7B
    "ring-13b": 13.016,  # the sizes of Llama 13B
    "ring-30b": 32.5,  # arXiv 2302.13971, table 2
    "ring-65b": 65.2,  # the same, cut after one digit
}


def test_weights_as_published() -> None:
    assert {name: model(name).parameters for name in EXACT} == EXACT
    found = {name: model(name).parameters / 1e9 for name in ROUNDED}
    assert found == pytest.approx(ROUNDED, rel=PRINTED)


KINDS = {  # billions of weights in all and for each token, and their source
    "deepseek-v3": (671, 37, "README of deepseek-ai/DeepSeek-V3"),
    "qwen3-30b-a3b": (30.5, 3.3, "model card of Qwen/Qwen3-30B-A3B, which counts both vocabulary matrices"),
    "qwen3-235b-a22b": (235, 22, "model card of Qwen/Qwen3-235B-A22B, which counts both vocabulary matrices"),
    "gpt-oss-20b": (20.91, 3.61, "arXiv 2508.10925, table 1"),
    "gpt-oss-120b": (116.83, 5.13, "arXiv 2508.10925, table 1"),
    "gemma3-27b": (25.600 + 1.416, 25.600 + 1.416, "arXiv 2503.19786, table 1, without the vision encoder"),
    "glm-4.5-air": (106, 12, "arXiv 2508.06471, and huggingface.co/docs/transformers, glm4_moe"),
    "qwen3-next-80b-a3b": (80, 3, "model card of Qwen/Qwen3-Next-80B-A3B-Instruct, round figures"),
}


def near(published: float) -> float:
    """Return the allowed difference: the share PRINTED, or one unit of the last printed digit if that is larger."""
    decimals = len(f"{published:g}".partition(".")[2])
    return max(10.0**-decimals, PRINTED * published)


@pytest.mark.parametrize("name", KINDS)
def test_weights_of_models_of_several_kinds_as_published(name: str) -> None:
    """Totals are as published; weights per token may count one or both matrices of the vocabulary."""
    it, (in_all, active, _) = model(name), KINDS[name]
    assert abs(it.parameters / 1e9 - in_all) <= near(in_all)
    vocabulary = it.vocabulary * it.d_model
    found = [(it.active_parameters + more) / 1e9 for more in (0, vocabulary)]
    assert min(abs(each - active) for each in found) <= near(active)


def test_one_layer_of_each_kind_by_hand() -> None:
    """Weights of layers of DeepSeek-V3, Qwen3-Next and gpt-oss, matrix by matrix."""
    dense, sparse = model("deepseek-v3").kinds
    latent = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    assert dense.mixer_parameters == sparse.mixer_parameters == latent
    expert = 3 * 7168 * 2048
    assert dense.matrix_parameters == dense.active_parameters == latent + 3 * 7168 * 18432
    assert sparse.matrix_parameters == latent + 257 * expert + 7168 * 256
    assert sparse.active_parameters == latent + 9 * expert + 7168 * 256
    assert sparse.latent == 576 and sparse.attention().block_bytes_per_token == 2 * 576
    linear, gated = model("qwen3-next-80b-a3b").kinds
    mixed = 2 * 16 * 128 + 32 * 128
    assert linear.mixer_parameters == 2048 * (mixed + 32 * 128 + 2 * 32) + 4 * mixed + 32 * 128 * 2048
    assert gated.mixer_parameters == 2048 * 256 * (2 * 16 + 2 * 2) + 16 * 256 * 2048
    local, everywhere = model("gpt-oss-20b").kinds
    assert (local.window, everywhere.window) == (128, None)
    assert model("gpt-oss-20b").main is model("gpt-oss-20b").kinds[1]


@pytest.mark.parametrize("name", model_names())
def test_every_model_has_a_source_and_sizes_that_fit(name: str) -> None:
    it = model(name)
    assert it.name == name and it.title and len(it.source) > 10
    # In Qwen3, and in models with several kinds of layers, all heads together may have another width than the model.
    assert it.H * it.D == it.d_model or name.startswith("qwen3") or it.kind
    assert sum(kind.layers for kind in it.kinds) == it.layers
    sizes = it.attention(B=2, dtype="float32", causal=False)
    assert (sizes.B, sizes.H, sizes.K, sizes.D, sizes.dtype, sizes.causal) == (
        2, it.H, it.K, it.D, "float32", False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "near"), [("llama3-8", "llama3-8b"), ("llama-3-70b", "llama3-70b"), ("GPT3", "gpt3-175b")]
)
def test_unknown_names_are_told_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(CostError, match=f"nearest:.*{near}"):
        model(asked)


def example() -> str:
    return indented(str(models.__doc__).split("same form:\n")[1].split("If layers differ")[0])


def kinds_example() -> str:
    return example() + indented(str(models.__doc__).split("add up to `layers`:\n")[1])


def indented(text: str) -> str:
    return "\n".join(line[4:] for line in text.splitlines()) + "\n"


def test_the_form_in_the_docstring_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(example())
    it = model(path)
    assert it.name == "mine" and it.parameters == model("llama3-8b").parameters
    assert model(f"{path}:mine") == it == read_models(path)["mine"]


def test_kinds_in_the_docstring_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(kinds_example())
    local, sparse = model(path).kinds
    assert (local.layers, local.window, local.H, local.d_ff) == (24, 1024, 32, 14336)
    assert (sparse.layers, sparse.experts, sparse.active_experts, sparse.d_ff) == (8, 64, 4, 2048)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("layers = 24", "layers = 25", r"line \d+, mine.layers: 25 \+ 8, the layers of all kinds"),
        ("window = 1024", "windows = 1024", r"mine.kind.0.windows: a known key(.|\n)*did you mean 'window'"),
        ("window = 1024", "K = 5", r"mine.kind: kinds with K = 5 that divides H = 32"),
        ("window = 1024", "window = 8\nlinear = true", r"mine.kind.0.window: a kind without linear"),
        ("window = 1024", "kv_latent = 8", r"mine.kind.0.kv_latent: a kind that also has rope"),
        ("active_experts = 4", "", r"mine.kind.1.experts: a kind that also has active_experts"),
        ("experts = 64\n", "shared_d_ff = 64\n", r"a kind that also has experts"),
    ],
)
def test_faults_of_kinds_are_refused_with_file_line_and_key(
    old: str, new: str, told: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(kinds_example().replace(old, new))
    with pytest.raises(CostError, match=told) as raised:
        read_models(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("K = 8", "K = 5", r"line \d+, mine.K: a divisor of H = 32"),
        ("layers = 32", "layers = 0", r"line \d+, mine.layers: a whole number from 1"),
        ("layers = 32", "layer = 32", r"mine.layer: a known key(.|\n)*did you mean 'layers'"),
        ("ffn_matrices = 3", "ffn_matrices = 4", r"mine.ffn_matrices: 2 \(plain\) or 3 \(gated\)"),
        ("d_ff = 14336", "d_ff = 10000000000", r"to 1000000000"),
        ("[mine]", "[llama-3.1-8b]", r'llama-3\.1-8b: a known key(.|\n)*in quotes: \["llama-3\.1-8b"\]'),
        ("[mine]", '["a:b.c"]', r'for example \["a-b\.c"\]'),
    ],
)
def test_faults_are_refused_with_file_line_and_key(old: str, new: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(example().replace(old, new))
    with pytest.raises(CostError, match=told) as raised:
        read_models(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "change", [{"layers": 0}, {"K": 5}, {"d_ff": 1.5}, {"ffn_matrices": 1}, {"vocabulary": True}]
)
def test_values_made_in_python_are_checked_too(change: dict[str, int]) -> None:
    with pytest.raises(CostError):
        replace(model("llama3-8b"), **change)
