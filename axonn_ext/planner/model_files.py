"""Models by name, from the trainer's TOML file, or from a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.files import is_folder, read_json
from axonn_ext.planner.model import FAMILIES, Model
from axonn_ext.planner.tables import Table, read_table, unknown


def _gpt(num_layers: int, hidden_size: int, num_heads: int) -> Model:
    """As AxoNN's papers train them: GPT-2's tokens, 2,048 of them in a sequence."""
    return Model(51200, hidden_size, num_layers, num_heads, 2048)


def _gpt2(num_layers: int, hidden_size: int, num_heads: int) -> Model:
    return Model(50304, hidden_size, num_layers, num_heads, 1024)


def _llama(
    num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int, *,
    vocab_size: int, sequence_length: int, num_kv_heads: int | None = None,
) -> Model:  # fmt: skip
    return Model(
        vocab_size, hidden_size, num_layers, num_heads, sequence_length, family="llama",
        num_kv_heads=num_kv_heads, intermediate_size=intermediate_size, tie_embeddings=False,
    )  # fmt: skip


PRESETS: Mapping[str, Model] = {
    # arXiv:2502.08145 and 2305.13525: layers, hidden size, heads as github.com/axonn-ai/
    # Megatron-AxoNN, model-table.md. 50257 tokens rounded up to a multiple of 1024 there: 51200.
    "gpt-5b": _gpt(24, 4096, 32),
    "gpt-10b": _gpt(32, 5120, 40),
    "gpt-20b": _gpt(32, 7168, 56),
    "gpt-40b": _gpt(38, 9216, 72),
    "gpt-60b": _gpt(56, 9216, 72),
    "gpt-80b": _gpt(42, 12288, 96),
    "gpt-160b": _gpt(84, 12288, 96),
    "gpt-320b": _gpt(96, 16384, 128),
    "gpt-640b": _gpt(192, 16384, 128),
    # Radford et al. 2019; 50257 tokens rounded up to a multiple of 128.
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    # Touvron et al. 2023, arXiv:2307.09288.
    "llama2-7b": _llama(32, 4096, 32, 11008, vocab_size=32000, sequence_length=4096),
    "llama2-13b": _llama(40, 5120, 40, 13824, vocab_size=32000, sequence_length=4096),
    "llama2-70b": _llama(
        80, 8192, 64, 28672, vocab_size=32000, sequence_length=4096, num_kv_heads=8
    ),
    # Dubey et al. 2024, arXiv:2407.21783.
    "llama3-8b": _llama(
        32, 4096, 32, 14336, vocab_size=128256, sequence_length=8192, num_kv_heads=8
    ),
    "llama3-70b": _llama(
        80, 8192, 64, 28672, vocab_size=128256, sequence_length=8192, num_kv_heads=8
    ),
    "llama3-405b": _llama(
        126, 16384, 128, 53248, vocab_size=128256, sequence_length=8192, num_kv_heads=8
    ),
}


def load_model(name: str, *, sequence_length: int | None = None) -> tuple[str, Model]:
    """A name and the model: a preset, the [model] table of a trainer's TOML file, or the
    config.json of a Hugging Face folder (gpt2, llama, and mistral without a sliding window).

    sequence_length: instead of the preset's or file's own.

    Raises PlannerError, naming what is wrong and what there is.
    """
    path = Path(name)
    if name in PRESETS:
        label, model = name, PRESETS[name]
    elif path.suffix == ".toml":
        label, model = path.stem, _from_trainer(path)
    elif is_folder(path):
        label, model = path.resolve().name, _from_hugging_face(path / "config.json")
    elif path.suffix == ".json":
        model = _from_hugging_face(path)  # which refuses what `resolve` cannot follow
        label = path.resolve().parent.name
    else:
        error = unknown("model", name, PRESETS)
        raise PlannerError(f"{error}; or a TOML file, or a Hugging Face folder that exists")
    if sequence_length is None:
        return label, model
    if isinstance(sequence_length, bool) or sequence_length < 1:
        raise PlannerError(f"sequence_length must be a whole number >= 1, got {sequence_length!r}")
    return label, dataclasses.replace(model, sequence_length=sequence_length)


def load_details(name: str) -> dict[str, float]:
    """What a preset or a Hugging Face folder says of the trainer's [model] keys without size: of
    rope_theta, norm_eps and init_std, those that may differ from the trainer's default. Of a TOML
    file, none. Raises PlannerError, as `load_model` does."""
    path = Path(name)
    if name in PRESETS:
        return {"rope_theta": 500000.0} if name.startswith("llama3-") else {}
    if path.suffix == ".toml":
        return {}
    table = _hugging_face_table(path / "config.json" if is_folder(path) else path)
    details = {"init_std": table.positive("initializer_range", 0.02)}
    if table.text("model_type") == "gpt2":
        return details | {"norm_eps": table.positive("layer_norm_epsilon", 1e-5)}
    return details | {
        "rope_theta": _rope_theta(table),
        "norm_eps": table.positive("rms_norm_eps", 1e-6),  # transformers' default
    }


# --- The trainer's file --------------------------------------------------------------------------

# What changes no size: the planner passes over it. `Model` has the rest.
_WITHOUT_SIZE = frozenset({"implementation", "rope_theta", "norm_eps", "init_std"})
_BYTES_VOCAB_SIZE = 256  # of data.vocabulary "bytes", which is a multiple of 128 already


def _from_trainer(path: Path) -> Model:
    """Keys and defaults as axonn_ext.train has them; a test holds the two to each other."""
    whole = read_table(path)
    table = whole.table("model").without(_WITHOUT_SIZE)
    vocab_size = table.count("vocab_size", 0, least=0)
    if vocab_size == 0:
        data = whole.table("data") if whole.has("data") else Table({}, "data", str(path))
        if data.text("vocabulary", "bytes") != "bytes":
            raise PlannerError(
                f"{path}: model.vocab_size is 0, so the tokenizer would decide it: the planner "
                "needs the number (what the training run prints, a multiple of 128)"
            )
        vocab_size = _BYTES_VOCAB_SIZE
    model = _model(
        table,
        vocab_size=vocab_size,
        hidden_size=table.count("hidden_size", 256),
        num_layers=table.count("num_layers", 4),
        num_heads=table.count("num_heads", 4),
        sequence_length=table.count("sequence_length", 256),
        family=table.one_of("family", FAMILIES, "gpt2"),
        num_kv_heads=table.count("num_kv_heads", 0, least=0) or None,
        intermediate_size=table.count("intermediate_size", 0, least=0) or None,
        tie_embeddings=table.flag("tie_embeddings", True),
    )
    table.finish()
    return model


def _model(
    table: Table, *, vocab_size: int, hidden_size: int, num_layers: int, num_heads: int,
    sequence_length: int, family: str, num_kv_heads: int | None, intermediate_size: int | None,
    tie_embeddings: bool,
) -> Model:  # fmt: skip
    """The same errors as `Model`, with the file's name."""
    try:
        return Model(
            vocab_size, hidden_size, num_layers, num_heads, sequence_length, family, num_kv_heads,
            intermediate_size, tie_embeddings,
        )  # fmt: skip
    except ValueError as error:
        raise PlannerError(f"{table.file}: {error}") from None


# --- Hugging Face --------------------------------------------------------------------------------

_LLAMA_LIKE = ("llama", "mistral")
# Names of transformers for what axonn_ext.nn.MLP computes: gelu in tanh form, and silu.
_GPT2_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_LLAMA_ACTIVATIONS = ("silu", "swish")


def _hugging_face_table(path: Path) -> Table:
    return Table(read_json(path), "", str(path)).without_nulls()


def _from_hugging_face(path: Path) -> Model:
    """config.json; what would make the model another one than ours is refused."""
    table = _hugging_face_table(path)
    kind = table.text("model_type")
    if kind == "gpt2":
        return _hugging_face_gpt2(table)
    if kind in _LLAMA_LIKE:
        return _hugging_face_llama(table)
    raise PlannerError(
        f"{path}: model_type {kind!r} is not supported; supported: gpt2, {', '.join(_LLAMA_LIKE)} "
        "(the families of axonn_ext.models)"
    )


def _hugging_face_gpt2(table: Table) -> Model:
    """Defaults are those of transformers' GPT2Config."""
    table.one_of("activation_function", _GPT2_ACTIVATIONS, "gelu_new")
    return _model(
        table,
        vocab_size=table.count("vocab_size", 50257),
        hidden_size=table.count("n_embd", 768),
        num_layers=table.count("n_layer", 12),
        num_heads=table.count("n_head", 12),
        sequence_length=table.count("n_positions", 1024),
        family="gpt2",
        num_kv_heads=None,
        intermediate_size=table.count("n_inner") if table.has("n_inner") else None,
        tie_embeddings=table.flag("tie_word_embeddings", True),
    )


def _hugging_face_llama(table: Table) -> Model:
    for key in ("attention_bias", "mlp_bias"):
        if table.flag(key, False):
            raise table.error(key, "false: family 'llama' has no biases")
    if table.has("sliding_window"):
        raise table.error("sliding_window", "null: attention is over whole sequences")
    table.one_of("hidden_act", _LLAMA_ACTIVATIONS, "silu")
    _rope_theta(table)
    heads = table.count("num_attention_heads")
    model = _model(
        table,
        vocab_size=table.count("vocab_size"),
        hidden_size=table.count("hidden_size"),
        num_layers=table.count("num_hidden_layers"),
        num_heads=heads,
        sequence_length=table.count("max_position_embeddings"),
        family="llama",
        num_kv_heads=table.count("num_key_value_heads", heads),
        intermediate_size=table.count("intermediate_size"),
        tie_embeddings=table.flag("tie_word_embeddings", False),
    )
    if table.count("head_dim", model.head_dim) != model.head_dim:
        raise table.error("head_dim", f"hidden_size / num_attention_heads = {model.head_dim}")
    return model


def _rope_theta(table: Table) -> float:
    """Of the key, or of the table that holds it since transformers 5; scaling is refused."""
    if table.has("rope_scaling"):
        raise table.error("rope_scaling", "null: rotary frequencies are not scaled")
    theta = table.positive("rope_theta", 10000.0)
    if not table.has("rope_parameters"):
        return theta
    rope = table.table("rope_parameters")
    if rope.text("rope_type", "default") != "default":
        raise rope.error("rope_type", "'default': rotary frequencies are not scaled")
    return rope.positive("rope_theta", theta)
