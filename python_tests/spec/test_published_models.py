"""config.json of published models, written from their public facts: parameters and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.planner import Job, Options
from axonn_ext.planner.memory.states import states_of
from axonn_ext.spec.family import FAMILIES
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model_files import load_model

# Name -> (model_type, layers, hidden, heads, kv heads, MLP, vocabulary, other keys, parameters).
MODELS: dict[str, tuple[str, int, int, int, int, int, int, dict[str, Any], int]] = {
    "Mistral-7B-v0.1": (
        "mistral", 32, 4096, 32, 8, 14336, 32000, {"sliding_window": 4096}, 7_241_732_096),
    "Qwen2.5-0.5B": (
        "qwen2", 24, 896, 14, 2, 4864, 151936, {"tie_word_embeddings": True}, 494_032_768),
    "Qwen2-7B": ("qwen2", 28, 3584, 28, 4, 18944, 152064, {}, 7_615_616_512),
    "Qwen3-0.6B": (
        "qwen3", 28, 1024, 16, 8, 3072, 151936, {"tie_word_embeddings": True}, 596_049_920),
    "Qwen3-8B": ("qwen3", 36, 4096, 32, 8, 12288, 151936, {}, 8_190_735_360),
    "Phi-3-mini-4k": ("phi3", 32, 3072, 32, 32, 8192, 32064, {}, 3_821_079_552),
    "Phi-3-medium-4k": ("phi3", 40, 5120, 40, 10, 17920, 32064, {}, 13_960_238_080),
    "phi-4": ("phi3", 40, 5120, 40, 10, 17920, 100352, {}, 14_659_507_200),
    "gemma-2b": ("gemma", 18, 2048, 8, 1, 16384, 256000, {}, 2_506_172_416),
    "gemma-7b": ("gemma", 28, 3072, 16, 16, 24576, 256000, {}, 8_537_680_896),
    "gemma-2-2b": (
        "gemma2", 26, 2304, 8, 4, 9216, 256000, {"head_dim": 256}, 2_614_341_888),
    "gemma-2-9b": (
        "gemma2", 42, 3584, 16, 8, 14336, 256000, {"head_dim": 256}, 9_241_705_984),
    "gemma-2-27b": (
        "gemma2", 46, 4608, 32, 16, 36864, 256000,
        {"head_dim": 128, "query_pre_attn_scalar": 144}, 27_227_128_320),
    "gemma-3-270m": ("gemma3_text", 18, 640, 4, 1, 2048, 262144, {}, 268_098_176),
    "gemma-3-1b": ("gemma3_text", 26, 1152, 4, 1, 6912, 262144, {}, 999_885_952),
    "OLMo-2-0425-1B": ("olmo2", 16, 2048, 16, 16, 8192, 100352, {}, 1_484_916_736),
    "OLMo-2-1124-7B": ("olmo2", 32, 4096, 32, 32, 11008, 100352, {}, 7_298_617_344),
    "OLMo-2-1124-13B": ("olmo2", 40, 5120, 40, 40, 13824, 100352, {}, 13_716_198_400),
    "Olmo-3-1025-7B": ("olmo3", 32, 4096, 32, 32, 11008, 100278, {}, 7_298_011_136),
    "granite-3.1-2b": (
        "granite", 40, 2048, 32, 8, 8192, 49155, {"tie_word_embeddings": True}, 2_533_531_648),
    "granite-3.1-8b": (
        "granite", 40, 4096, 32, 8, 12800, 49155, {"tie_word_embeddings": True}, 8_170_848_256),
    "SmolLM3-3B": ("smollm3", 36, 2048, 16, 4, 11008, 128256, {}, 3_075_098_624),
    "starcoder2-3b": ("starcoder2", 30, 3072, 24, 2, 12288, 49152, {}, 3_030_371_328),
    "starcoder2-7b": ("starcoder2", 32, 4608, 36, 4, 18432, 49152, {}, 7_173_923_840),
    "pythia-70m": ("gpt_neox", 6, 512, 8, 8, 2048, 50304, {}, 70_426_624),
    "pythia-1.4b": ("gpt_neox", 24, 2048, 16, 16, 8192, 50304, {}, 1_414_647_808),
    "pythia-12b": ("gpt_neox", 36, 5120, 40, 40, 20480, 50688, {}, 11_846_072_320),
    "pythia-6.9b": ("gpt_neox", 32, 4096, 32, 32, 16384, 50432, {}, 6_857_302_016),
    "stablelm-3b-4e1t": ("stablelm", 32, 2560, 32, 32, 6912, 50304, {}, 2_795_443_200),
    "stablelm-2-1_6b": (
        "stablelm", 24, 2048, 32, 32, 5632, 100352, {"use_qkv_bias": True}, 1_644_515_328),
    "aya-23-8B": ("cohere", 32, 4096, 32, 8, 14336, 256000, {}, 8_028_033_024),
    "c4ai-command-r-v01": ("cohere", 40, 8192, 64, 64, 22528, 256000, {}, 34_980_831_232),
    "c4ai-command-r7b-12-2024": ("cohere2", 32, 4096, 32, 8, 14336, 256000, {}, 8_028_033_024),
    "c4ai-command-a-03-2025": (
        "cohere2", 64, 12288, 96, 8, 36864, 256000, {}, 111_057_580_032),
    "GLM-4-9B-0414": ("glm4", 40, 4096, 32, 2, 13696, 151552, {}, 9_400_279_040),
    "Seed-OSS-36B": ("seed_oss", 64, 5120, 80, 8, 27648, 155136, {}, 36_151_104_512),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_their_parameters(tmp_path: Path, name: str) -> None:
    kind, layers, hidden, heads, kv_heads, mlp, vocab, others, count = MODELS[name]
    values = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": mlp,
        "vocab_size": vocab, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values | others))
    model = load_model(str(tmp_path))[1]
    assert model.num_parameters() == count
    # On one GPU: parameters and gradients in bf16; masters and moments in fp32, and step counts.
    states = states_of(Job(model, GridShape(), Options(overlap=None), batch_size=1))
    assert states.parameters == states.gradients == 2 * count
    assert 0 < states.optimizer - 12 * count < 1e-4 * count


def test_every_family_of_the_list_has_a_published_model() -> None:
    tested = {kind.removesuffix("_text") for kind, *_ in MODELS.values()}
    assert set(FAMILIES) - tested == {"gpt2", "llama", "opt"}  # test_model_files has these
