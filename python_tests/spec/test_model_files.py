"""Models by name, from the trainer's file and from Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.data.vocabulary import ByteVocabulary, padded_size
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.model_files import load_model, read_config
from axonn_ext.spec.presets import PRESETS
from axonn_ext.spec.rope import RopeScaling
from axonn_ext.train.config import Config, ModelTable
from axonn_ext.train.config_file import to_toml


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-5b", 5), ("gpt-10b", 10), ("gpt-20b", 20), ("gpt-40b", 40), ("gpt-60b", 60),
        ("gpt-80b", 80), ("gpt-160b", 160), ("gpt-320b", 320), ("gpt-640b", 640),
        ("gpt2-small", 0.124), ("gpt2-medium", 0.355), ("gpt2-large", 0.774), ("gpt2-xl", 1.56),
        ("llama2-7b", 6.74), ("llama2-13b", 13.02), ("llama2-70b", 68.98), ("llama3-8b", 8.03),
        ("llama3-70b", 70.55), ("llama3-405b", 405.85),
    ],
)  # fmt: skip
def test_presets_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    label, model = load_model(name)
    assert label == name
    rounded = name.startswith("gpt-")  # AxoNN's names are rounded
    assert model.num_parameters() == pytest.approx(billions * 1e9, rel=0.05 if rounded else 0.004)


def test_another_sequence_length() -> None:
    assert load_model("gpt-80b", sequence_length=4096)[1].sequence_length == 4096
    with pytest.raises(InputError, match="sequence_length must be a whole number >= 1, got 0"):
        load_model("gpt-80b", sequence_length=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-90b", r"unknown model 'gpt-90b' \(did you mean gpt-\d+b\?\); known: gpt-10b"),
        ("no/such/folder", "unknown model 'no/such/folder'; known: .*; or a TOML file, or a Hug"),
        ("missing.toml", "missing.toml: cannot be read: No such file"),
    ],
)  # fmt: skip
def test_an_unknown_model(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(name)


def test_a_folder_of_a_model_that_reads_images_needs_a_text_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(InputError, match="text_config: expected a table"):
        read_config(tmp_path / "config.json")


# --- The trainer's file --------------------------------------------------------------------------


def test_a_trainers_file_may_begin_with_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    file = tmp_path / "run.toml"
    table = ModelTable(pretrained=str(tmp_path), sequence_length=512)
    file.write_text(to_toml(Config(model=table)))
    expected = read_config(tmp_path / "config.json")
    assert expected.sequence_length > 512
    _, model = load_model(str(file))
    assert model == dataclasses.replace(expected, sequence_length=512)


@pytest.mark.parametrize(
    "table",
    [
        ModelTable(vocab_size=512),
        ModelTable(vocab_size=32000, hidden_size=512, family="llama", num_kv_heads=2, num_heads=8),
        ModelTable(vocab_size=1024, intermediate_size=640, tie_embeddings=False, num_layers=7),
    ],
)
def test_a_trainers_file_means_the_same_model(tmp_path: Path, table: ModelTable) -> None:
    """Every key that the trainer writes is read, and missing keys have the same defaults."""
    config = Config(model=table)
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    label, model = load_model(str(file))
    assert label == "run"
    assert model == config.model_config(table.vocab_size)


def test_a_trainers_file_has_the_trainers_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model]\nvocab_size = 384\n[train]\nsteps = 3\n")
    assert load_model(str(file))[1] == Config().model_config(384)


@pytest.mark.parametrize("data", ["", '[data]\nvocabulary = "bytes"', "[data]\nmax_bytes = 9"])
def test_bytes_as_the_trainer_pads_them(tmp_path: Path, data: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[model]\nhidden_size = 128\n{data}")
    assert load_model(str(file))[1].vocab_size == padded_size(ByteVocabulary.num_tokens)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[model]\nhidden_size = 64\n[data]\nvocabulary = "mine.json"',
            "model.vocab_size is 0, so the tokenizer would decide it",
        ),
        (
            '[model]\nhidden_size = 64\n[data]\nmixture = "a=1,b=2"',
            "model.vocab_size is 0, so the tokenizer would decide it",
        ),
        ("[model]\n[data]\nvocabulary = 1", "data.vocabulary must be a text"),
        ("[train]\nsteps = 1", "model must be a table; it is missing"),
        ("[model]\nvocab_size = 8\nhiden_size = 64", "did you mean hidden_size"),
        ("[model]\nvocab_size = 8\nhidden_size = -4", "model.hidden_size must be a whole number"),
        ("[model]\nvocab_size = 8\nhidden_size = 9", "hidden_size=9 must be divisible by num"),
        ('[model]\nvocab_size = 8\nfamily = "bert"', "family must be one of gpt2, llama, "),
        ("[model]\nvocab_size = 8\ntie_embeddings = 1", "tie_embeddings must be true or false"),
        ("[model", "is not TOML"),
    ],
)  # fmt: skip
def test_a_wrong_trainers_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=r"run\.toml: ") as error:
        load_model(str(file))
    assert message in str(error.value)


# --- Hugging Face --------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "attention_bias": False,
    "rope_theta": 500000.0, "hidden_act": "silu",
}  # fmt: skip
LLAMA_3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 50304, "n_embd": 768, "n_layer": 12, "n_head": 12,
    "n_positions": 1024, "n_inner": None, "activation_function": "gelu_new",
}  # fmt: skip


def folder_of(tmp_path: Path, values: object) -> str:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (LLAMA, PRESETS["llama3-8b"]),
        (LLAMA | {"head_dim": 128, "mlp_bias": None}, PRESETS["llama3-8b"]),
        (GPT2, PRESETS["gpt2-small"]),
    ],
)
def test_hugging_face(tmp_path: Path, values: dict[str, Any], expected: ModelConfig) -> None:
    folder = folder_of(tmp_path, values)
    assert load_model(folder) == load_model(f"{folder}/config.json")
    label, model = load_model(folder)
    assert label == "My-Model"
    kept = {"norm_eps": expected.norm_eps, "num_kv_heads": expected.num_kv_heads}
    kept |= {"intermediate_size": expected.intermediate_size}
    assert dataclasses.replace(model, **kept) == expected


@pytest.mark.parametrize(
    ("values", "caps"),
    [
        ({}, (50.0, 30.0)),
        ({"attn_logit_softcapping": None, "final_logit_softcapping": 5.0}, (None, 5.0)),
    ],
)
def test_capped_scores_and_logits(
    tmp_path: Path, values: dict[str, Any], caps: tuple[float | None, float | None]
) -> None:
    values = {key: value for key, value in LLAMA.items() if key != "hidden_act"} | values
    model = load_model(folder_of(tmp_path, values | {"model_type": "gemma2"}))[1]
    assert (model.attention_softcap, model.logits_softcap) == caps
    assert model.score_scale == 1 / 16  # query_pre_attn_scalar is 256


@pytest.mark.parametrize(
    ("values", "window", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "mistral", "sliding_window": 512}, 512, None),
        ({"model_type": "mistral"}, 4096, None),
        ({"model_type": "llama", "sliding_window": 512}, None, None),
        ({"model_type": "qwen2", "sliding_window": 512}, None, None),
        ({"model_type": "qwen2", "use_sliding_window": True}, 4096, None),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 32}, None, None),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 30},
            4096, (30, 31),
        ),
        ({"model_type": "gemma2"}, 4096, None),
        ({"model_type": "gemma3_text", "sliding_window": 512}, 512, None),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention"] * 32},
            4096, tuple(range(32)),
        ),
        (
            {"model_type": "olmo3", "layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
            4096, (31,),
        ),
    ],
)  # fmt: skip
def test_windows_are_those_of_transformers(
    tmp_path: Path, values: dict[str, Any], window: int | None, layers: tuple[int, ...] | None
) -> None:
    """As in transformers, null means no window, and a missing key means 4096."""
    values = {key: value for key, value in LLAMA.items() if key != "hidden_act"} | values
    model = load_model(folder_of(tmp_path, values))[1]
    assert (model.window, model.window_layers) == (window, layers)
    assert model.sequence_length == 8192
    in_blocks = [model.window_of(block) for block in range(32)]
    usual = {
        "mistral": range(32), "qwen2": range(28, 32), "gemma2": range(0, 32, 2),
        "gemma3": [i for i in range(32) if (i + 1) % 6],
    }  # fmt: skip
    chosen = usual.get(model.family, ()) if layers is None else layers
    assert in_blocks == [window if block in chosen else None for block in range(32)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),
        ({"type": "dynamic", "factor": 2.0}, {"original_max_position_embeddings": 8192}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
            {"beta_fast": 32.0, "attention_factor": 0.1 * math.log(4) + 1},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0},
            {"attention_factor": (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)},
        ),
        (
            {"type": "su", "short_factor": [1] * 64, "long_factor": [2] * 64,
             "original_max_position_embeddings": 2048},
            {"attention_factor": math.sqrt(1 + math.log(4) / math.log(2048))},
        ),
    ],
)  # fmt: skip
def test_rotary_positions_are_scaled(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, float]
) -> None:
    model = load_model(folder_of(tmp_path, LLAMA | {"rope_scaling": values}))[1]
    found = {name: getattr(model.rope_scaling, name) for name in expected}
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (LLAMA, {"rope_theta": 500000.0, "norm_eps": 1e-6, "init_std": 0.02}),
        (
            LLAMA | {"rms_norm_eps": 1e-5, "rope_scaling": None, "initializer_range": 0.01},
            {"rope_theta": 500000.0, "norm_eps": 1e-5, "init_std": 0.01},
        ),
        (
            LLAMA | {"rope_theta": None, "rope_parameters": {"rope_theta": 2e6}},
            {"rope_theta": 2e6, "norm_eps": 1e-6, "init_std": 0.02},
        ),
        (GPT2 | {"layer_norm_epsilon": 1e-6}, {"norm_eps": 1e-6, "init_std": 0.02}),
    ],
)
def test_hugging_face_keys_without_size(
    tmp_path: Path, values: dict[str, Any], expected: dict[str, float]
) -> None:
    folder = folder_of(tmp_path, values)
    model = load_model(folder)[1]
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama_3_scales_its_rotary_waves(tmp_path: Path, key: str) -> None:
    model = load_model(folder_of(tmp_path, LLAMA | {key: LLAMA_3_ROPE}))[1]
    scaling = {name: value for name, value in LLAMA_3_ROPE.items() if name != "rope_type"}
    assert model.rope_scaling == RopeScaling(**scaling)


@pytest.mark.parametrize(
    ("values", "head_dim", "head_size"),
    [
        ({"model_type": "qwen3"}, 128, None),
        ({"model_type": "qwen3", "hidden_size": 2048}, 128, 128),
        ({"model_type": "qwen3", "hidden_size": 2048, "head_dim": 64}, 64, None),
        ({"model_type": "mistral", "hidden_size": 5120, "head_dim": 128}, 128, 128),
    ],
)
def test_heads_may_be_wider_than_their_share(
    tmp_path: Path, values: dict[str, Any], head_dim: int, head_size: int | None
) -> None:
    model = load_model(folder_of(tmp_path, LLAMA | values))[1]
    assert (model.head_dim, model.head_size) == (head_dim, head_size)
    assert model.attention_size == 32 * head_dim


def test_presets_of_llama_3_have_their_rotary_base() -> None:
    bases = {name: model.rope_theta for name, model in PRESETS.items()}
    assert {name for name, base in bases.items() if base == 500000.0} == {
        "llama3-8b", "llama3-70b", "llama3-405b"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported; supported: gpt2, llama"),
        ({}, "model_type must be a text; it is missing"),
        ([1], "config.json: must be a table, got [1]"),
        (
            LLAMA | {"rope_scaling": {"type": "mrope", "factor": 8.0}},
            "rope_scaling.type must be one of default, llama3, linear, dynamic, yarn, longrope, su",
        ),
        (
            LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
            "rope_parameters.factor must be a finite number > 0; it is missing",
        ),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        (
            LLAMA | {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.type must be one of default, longrope, su, yarn, got 'linear'",
        ),
        (
            LLAMA | {"rope_scaling": LLAMA_3_ROPE | {"high_freq_factor": 0.5}},
            "0 < low_freq_factor < high_freq_factor",
        ),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act must be one of silu, swish, got 'gelu'"),
        (LLAMA | {"model_type": "gpt_neox", "hidden_act": "relu"}, "hidden_act must be one of ge"),
        (GPT2 | {"activation_function": "relu"}, "activation_function must be one of gelu_new"),
        (LLAMA | {"attention_bias": 1}, "attention_bias must be true or false"),
        (LLAMA | {"model_type": "falcon", "alibi": True}, "alibi must be false: family 'fal"),
        (LLAMA | {"head_dim": 63}, "rotary embedding needs an even head_dim, got 63"),
        (
            LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full"]},
            "layer_types must be 32 of full_attention and sliding_attention, got ['full']",
        ),
        (
            LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}},
            "rope_scaling.short_factor must have 64 numbers, one for each pair of rotated features",
        ),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers must be a whole number >= 1; it"),
        (LLAMA | {"num_key_value_heads": 5}, "num_heads=32 must be divisible by num_kv_heads=5"),
    ],
)  # fmt: skip
def test_a_wrong_config_json(tmp_path: Path, values: object, message: str) -> None:
    folder = folder_of(tmp_path, values)
    with pytest.raises(InputError, match=r"config\.json: ") as error:
        load_model(folder)
    assert message in str(error.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a folder with config.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load_model(str(tmp_path))
