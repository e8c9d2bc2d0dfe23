"""config.json of published models, written from their public facts: parameters and memory."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.planner import Job, Options
from axonn_ext.planner.memory.states import states_of
from axonn_ext.spec.family import FAMILIES
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import load_model

OPT = {"max_position_embeddings": 2048}
TIED = {"tie_word_embeddings": True}
# Name -> (model_type, layers, hidden, heads, kv heads, MLP, vocabulary, other keys, parameters).
MODELS: dict[str, tuple[str, int, int, int, int, int, int, dict[str, Any], int]] = {
    "gpt2": ("gpt2", *[0] * 5, 50257, {"n_layer": 12, "n_embd": 768, "n_head": 12}, 124_439_808),
    "gpt2-medium": (
        "gpt2", *[0] * 5, 50257, {"n_layer": 24, "n_embd": 1024, "n_head": 16}, 354_823_168),
    "gpt2-xl": (
        "gpt2", *[0] * 5, 50257, {"n_layer": 48, "n_embd": 1600, "n_head": 25}, 1_557_611_200),
    "opt-125m": (
        "opt", 12, 768, 12, 12, 0, 50272, OPT | {"ffn_dim": 3072}, 125_239_296),
    "opt-1.3b": (
        "opt", 24, 2048, 32, 32, 0, 50272, OPT | {"ffn_dim": 8192}, 1_315_758_080),
    "opt-6.7b": (
        "opt", 32, 4096, 32, 32, 0, 50272, OPT | {"ffn_dim": 16384}, 6_658_473_984),
    "Llama-2-7b": ("llama", 32, 4096, 32, 32, 11008, 32000, {}, 6_738_415_616),
    "Llama-3.2-1B": ("llama", 16, 2048, 32, 8, 8192, 128256, TIED, 1_235_814_400),
    "Meta-Llama-3-70B": ("llama", 80, 8192, 64, 8, 28672, 128256, {}, 70_553_706_496),
    "Mistral-7B-v0.1": (
        "mistral", 32, 4096, 32, 8, 14336, 32000, {"sliding_window": 4096}, 7_241_732_096),
    "Mistral-7B-v0.3": (
        "mistral", 32, 4096, 32, 8, 14336, 32768, {"sliding_window": None}, 7_248_023_552),
    "Mistral-Nemo-Base-2407": (
        "mistral", 40, 5120, 32, 8, 14336, 131072, {"sliding_window": None, "head_dim": 128},
        12_247_782_400),
    "Qwen2.5-0.5B": ("qwen2", 24, 896, 14, 2, 4864, 151936, TIED, 494_032_768),
    "Qwen2.5-72B": ("qwen2", 80, 8192, 64, 8, 29568, 152064, {}, 72_706_203_648),
    "Qwen2-7B": ("qwen2", 28, 3584, 28, 4, 18944, 152064, {}, 7_615_616_512),
    "Qwen3-0.6B": ("qwen3", 28, 1024, 16, 8, 3072, 151936, TIED, 596_049_920),
    "Qwen3-32B": ("qwen3", 64, 5120, 64, 8, 25600, 151936, {}, 32_762_123_264),
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
    "gemma-3-4b": ("gemma3", 34, 2560, 8, 4, 10240, 262208, {}, 3_880_263_168),
    "gemma-3-12b": ("gemma3", 48, 3840, 16, 8, 15360, 262208, {}, 11_766_034_176),
    "gemma-3-27b": (
        "gemma3", 62, 5376, 32, 16, 21504, 262208, {"head_dim": 128}, 27_009_346_304),
    "OLMo-2-0425-1B": ("olmo2", 16, 2048, 16, 16, 8192, 100352, {}, 1_484_916_736),
    "OLMo-2-1124-7B": ("olmo2", 32, 4096, 32, 32, 11008, 100352, {}, 7_298_617_344),
    "OLMo-2-1124-13B": ("olmo2", 40, 5120, 40, 40, 13824, 100352, {}, 13_716_198_400),
    "Olmo-3-1025-7B": ("olmo3", 32, 4096, 32, 32, 11008, 100278, {}, 7_298_011_136),
    "Olmo-3-1125-32B": ("olmo3", 64, 5120, 40, 8, 27648, 100278, {}, 32_233_522_176),
    "granite-3.1-2b": ("granite", 40, 2048, 32, 8, 8192, 49155, TIED, 2_533_531_648),
    "granite-3.1-8b": ("granite", 40, 4096, 32, 8, 12800, 49155, TIED, 8_170_848_256),
    "SmolLM3-3B": ("smollm3", 36, 2048, 16, 4, 11008, 128256, {}, 3_075_098_624),
    "starcoder2-3b": ("starcoder2", 30, 3072, 24, 2, 12288, 49152, {}, 3_030_371_328),
    "starcoder2-7b": ("starcoder2", 32, 4608, 36, 4, 18432, 49152, {}, 7_173_923_840),
    "starcoder2-15b": (
        "starcoder2", 40, 6144, 48, 4, 24576, 49152, {"tie_word_embeddings": False},
        15_957_889_024),
    "pythia-70m": ("gpt_neox", 6, 512, 8, 8, 2048, 50304, {}, 70_426_624),
    "pythia-1.4b": ("gpt_neox", 24, 2048, 16, 16, 8192, 50304, {}, 1_414_647_808),
    "pythia-12b": ("gpt_neox", 36, 5120, 40, 40, 20480, 50688, {}, 11_846_072_320),
    "pythia-6.9b": ("gpt_neox", 32, 4096, 32, 32, 16384, 50432, {}, 6_857_302_016),
    "gpt-neox-20b": (
        "gpt_neox", 44, 6144, 64, 64, 24576, 50432, {"hidden_act": "gelu_fast"}, 20_554_567_680),
    "stablelm-3b-4e1t": ("stablelm", 32, 2560, 32, 32, 6912, 50304, {}, 2_795_443_200),
    "stablelm-2-1_6b": (
        "stablelm", 24, 2048, 32, 32, 5632, 100352, {"use_qkv_bias": True}, 1_644_515_328),
    "aya-23-8B": ("cohere", 32, 4096, 32, 8, 14336, 256000, {}, 8_028_033_024),
    "c4ai-command-r-v01": ("cohere", 40, 8192, 64, 64, 22528, 256000, {}, 34_980_831_232),
    "aya-expanse-32b": ("cohere", 40, 8192, 64, 8, 24576, 256000, {}, 32_296_476_672),
    "c4ai-command-r7b-12-2024": ("cohere2", 32, 4096, 32, 8, 14336, 256000, {}, 8_028_033_024),
    "c4ai-command-a-03-2025": (
        "cohere2", 64, 12288, 96, 8, 36864, 256000, {}, 111_057_580_032),
    "GLM-4-9B-0414": ("glm4", 40, 4096, 32, 2, 13696, 151552, {}, 9_400_279_040),
    "GLM-4-32B-0414": (
        "glm4", 61, 6144, 48, 2, 23040, 151552, {"attention_bias": False}, 32_566_081_536),
    # Not counting the head, which Falcon's files have in addition to the table.
    "falcon-7b": ("falcon", 32, 4544, 71, 71, 18176, 65024, {}, 6_921_720_704),
    "falcon-40b": (
        "falcon", 60, 8192, 128, 8, 32768, 65024,
        {"new_decoder_architecture": True, "num_kv_heads": 8}, 41_303_293_952),
    "falcon-180B": (
        "falcon", 80, 14848, 232, 8, 59392, 65024,
        {"new_decoder_architecture": True, "num_kv_heads": 8}, 178_557_088_768),
    "falcon-11B": (
        "falcon", 60, 4096, 32, 8, 16384, 65024,
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "num_kv_heads": 8,
         "tie_word_embeddings": False}, 11_102_822_400),
    "Seed-OSS-36B": ("seed_oss", 64, 5120, 80, 8, 27648, 155136, {}, 36_151_104_512),
}  # fmt: skip


def loaded(folder: Path, name: str) -> ModelConfig:
    kind, layers, hidden, heads, kv_heads, mlp, vocab, others, _ = MODELS[name]
    values = {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": mlp,
        "vocab_size": vocab, "max_position_embeddings": 4096,
    }  # fmt: skip
    values |= others
    if kind == "gemma3":  # 416,866,032 + 1152 (hidden + 1) more are for images
        values = {"model_type": kind, "text_config": values | {"model_type": "gemma3_text"}}
    (folder / "config.json").write_text(json.dumps(values))
    return load_model(str(folder))[1]


@pytest.mark.parametrize("name", MODELS)
def test_published_models_have_their_parameters(tmp_path: Path, name: str) -> None:
    model, count = loaded(tmp_path, name), MODELS[name][-1]
    assert model.num_parameters() == count
    # On one GPU: parameters and gradients in bf16; masters and moments in fp32, and step counts.
    states = states_of(Job(model, GridShape(), Options(overlap=None), batch_size=1))
    assert states.parameters == states.gradients == 2 * count
    assert 0 < states.optimizer - 12 * count < 1e-4 * count


# Model types of which fewer than three sizes have been published, not counting those that are
# refused, as StableLM 2 12B.
FEWER = {
    "gemma": 2, "olmo3": 2, "granite": 2, "smollm3": 1, "stablelm": 2, "cohere2": 2, "glm4": 2,
    "seed_oss": 1,
}  # fmt: skip


def test_every_family_of_the_list_has_published_models(tmp_path: Path) -> None:
    families = [loaded(tmp_path, name).traits for name in MODELS]
    assert {family.name for family in families} == set(FAMILIES)
    counts = collections.Counter(family.hugging_face.model_type for family in families)
    assert {kind: count for kind, count in counts.items() if count < 3} == FEWER
