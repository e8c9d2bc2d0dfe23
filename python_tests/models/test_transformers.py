"""Models written by transformers, loaded on every grid: the same logits, loss and gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from axonn_ext import (
    GridShape,
    Sampling,
    from_pretrained,
    full_gradients,
    full_state_dict,
    generate,
    save_pretrained,
    sync_gradients,
)
from axonn_ext.models import ParallelConfig
from axonn_ext.spec.model_files import read_config
from grids import factorisations, grid_of

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {"vocab_size": 256, "tie_word_embeddings": False}
LLAMA: dict[str, Any] = COMMON | {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 48, "initializer_range": 0.1,
}  # fmt: skip
GPT2 = {
    "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 48,
    "initializer_range": 0.1,
}  # fmt: skip
OPT = COMMON | {
    "hidden_size": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 2, "ffn_dim": 96,
    "num_attention_heads": 8, "max_position_embeddings": 48, "init_std": 0.1, "dropout": 0.0,
    "tie_word_embeddings": True,
}  # fmt: skip
FALCON = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "max_position_embeddings": 48, "initializer_range": 0.1,
}  # fmt: skip
LLAMA_3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500000.0,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10, "beta_fast": 4.0,
    "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.5, 4.0], "original_max_position_embeddings": 10,
}  # fmt: skip
# transformers gives the row of a padding token no gradient.
NO_PADDING: dict[str, Any] = {"pad_token_id": None}
KINDS = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = NO_PADDING | {
    "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "layer_types": KINDS,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "llama": ("llama", LLAMA),
    "llama-tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "llama-3": ("llama", LLAMA | {"rope_parameters": LLAMA_3_ROPE}),
    "mistral": ("mistral", LLAMA | {"sliding_window": None, "head_dim": 16}),
    "opt": ("opt", OPT),
    "qwen2": ("qwen2", LLAMA | {"use_sliding_window": False}),
    "qwen3": ("qwen3", LLAMA | {"head_dim": 16}),
    "llama-linear": ("llama", LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("llama", LLAMA | {
        "max_position_embeddings": 10, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
    }),
    "qwen2-yarn": ("qwen2", LLAMA | {"rope_parameters": YARN_ROPE}),
    "phi3-long": ("phi3", LLAMA | {"rope_parameters": LONG_ROPE} | NO_PADDING),
    "llama-biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "phi3": ("phi3", LLAMA | {"partial_rotary_factor": 0.75} | NO_PADDING),
    "granite": ("granite", LLAMA | {
        "attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    }),
    "smollm3": ("smollm3", LLAMA | {"no_rope_layers": [1, 0]} | NO_PADDING),
    "stablelm": ("stablelm", LLAMA | {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", LLAMA | {"tie_word_embeddings": True}),
    "gpt_neox": ("gpt_neox", LLAMA | {"rotary_pct": 0.5}),
    "gpt_neox_20b": ("gpt_neox", LLAMA | {"rotary_pct": 0.5, "hidden_act": "gelu_fast"}),
    "cohere": (
        "cohere", LLAMA | {"tie_word_embeddings": True, "logit_scale": 0.25} | NO_PADDING,
    ),
    "olmo2": ("olmo2", LLAMA | NO_PADDING),
    "glm4": ("glm4", LLAMA | {"head_dim": 16} | NO_PADDING),
    "mistral-window": ("mistral", LLAMA | {"sliding_window": 6}),
    "qwen2-window": ("qwen2", LLAMA | {
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    }),
    "phi3-window": ("phi3", LLAMA | {"sliding_window": 6} | NO_PADDING),
    "starcoder2-window": ("starcoder2", LLAMA | {"sliding_window": 6}),
    "gemma": ("gemma", LLAMA | {"head_dim": 16} | NO_PADDING),
    "gemma2": ("gemma2", LLAMA | GEMMA | {
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        "attn_implementation": "eager",
    }),
    "gemma3": ("gemma3_text", LLAMA | GEMMA | {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }}),
    "olmo3": ("olmo3", LLAMA | {"sliding_window": 6, "rope_parameters": {
        "full_attention": YARN_ROPE | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }, "layer_types": KINDS} | NO_PADDING),
    "cohere2": ("cohere2", LLAMA | {"sliding_window": 6, "layer_types": KINDS} | NO_PADDING),
    "falcon": ("falcon", FALCON),
    "falcon-biases": ("falcon", FALCON | {"bias": True}),
    "falcon_40b": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "falcon_11b": ("falcon", FALCON | {
        "new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
    }),
    "seed_oss": ("seed_oss", LLAMA | {
        "head_dim": 16, "attention_out_bias": True, "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    }),
}  # fmt: skip
GRIDS = {
    1: [GridShape()],
    2: factorisations(2),
    4: factorisations(4),
    8: [
        GridShape(2, 2, 2),
        GridShape(4, 2),
        GridShape(2, 1, 2, 2),
        GridShape(1, 2, 2, 2),
        GridShape(8),  # more ranks than key-value heads
    ],
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(256, (8, 16), generator=generator)
    labels = torch.randint(256, (8, 16), generator=generator)
    labels[0, :5] = -100
    return ids, labels


def largest_error(found: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest relative error. The gradient of the keys' bias may be 0 except for rounding."""
    scale = {name: want[name.replace("k_proj.bias", "q_proj.bias")] for name in want}
    errors = [(found[n] - want[n]).norm() / scale[n].norm() for n in want]
    return torch.stack(errors).max().item()  # NaN if one of them is


def cases(folder: Path, world_size: int, *, both: bool) -> list[tuple[GridShape, str]]:
    """Grids with both layouts, or with layouts in turn.

    Ranks must not share a key-value head of keys that are normalised together.
    """
    model = read_config(folder / "config.json")
    layouts = ("sharded", "replicated")
    shapes = [
        shape
        for shape in GRIDS[world_size]
        if model.traits.qk_norm != "all" or shape.x <= model.kv_heads
    ]
    if both:
        return list(itertools.product(shapes, layouts))
    return list(zip(shapes, itertools.cycle(layouts), strict=False))


def compared(folder: Path, world_size: int, want: dict[str, Tensor]) -> dict[str, float]:
    """The largest relative error of logits, loss and gradients on this rank in every case."""
    return {
        f"{shape.short()} {layout}": error_on(folder, shape, layout, want)
        for shape, layout in cases(folder, world_size, both=world_size < 8)
    }


def error_on(folder: Path, shape: GridShape, layout: str, want: dict[str, Tensor]) -> float:
    grid = grid_of(shape)
    rotary = read_config(folder / "config.json").traits.rotary
    model = from_pretrained(
        folder, grid, ParallelConfig(layout=layout), sequence_length=16 if rotary else None
    )
    ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in batch())
    rows = ("data", "z", "y") if layout == "sharded" else ("data", "z")
    with torch.no_grad():
        logits = grid.unshard(model(ids), {0: rows, 1: ("x",)})
    loss = model.loss(ids, labels)
    loss.backward()
    sync_gradients(model)
    found = full_gradients(model) | {"logits": logits.view_as(want["logits"]), "loss": loss}
    found = {name: tensor for name, tensor in found.items() if name in want}
    assert found.keys() == want.keys()
    return largest_error(found, want)


def model_of(name: str, **others: Any) -> Any:
    """The model in transformers."""
    import transformers  # `make test-slow` installs it

    kind, values = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **(values | others))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """`computed(name)`: the folder of a model, and its logits, loss and gradients."""

    @functools.cache
    def make(name: str) -> tuple[Path, dict[str, Tensor]]:
        torch.manual_seed(1)
        theirs = model_of(name)
        for parameter in theirs.parameters():  # including biases and norms
            parameter.data += 0.02 * torch.randn_like(parameter)
        theirs.save_pretrained(folder := tmp_path_factory.mktemp(name), max_shard_size="50KB")
        ids, labels = batch()
        logits = theirs(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        head = read_config(folder / "config.json").traits.hugging_face.names.head
        want = {n.replace("lm_head", head): p.grad for n, p in theirs.named_parameters()}
        return folder, want | {"logits": logits.detach(), "loss": loss.detach()}

    return make


@pytest.mark.parametrize("world_size", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_grid_computes_what_transformers_does(name, world_size, pool, computed) -> None:
    folder, want = computed(name)
    for errors in pool(world_size).run(compared, folder, world_size, want):
        # Both compute in fp32, with sums in different orders. 96 terms of a sum lose a few units of
        # 6e-8 each, and gradients pass through the layers twice.
        assert all(error < 2e-5 for error in errors.values()), errors


PROMPTS = [[7, 3, 99, 41, 5], [200], [8, 8, 120, 31, 77, 6, 250, 19]]
NEW = 32


@pytest.fixture(scope="module")
def continued(tmp_path_factory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """`continued(name)`: the folder of a model, and its continuations of the prompts."""

    @functools.cache
    def make(name: str) -> tuple[Path, list[list[int]]]:
        torch.manual_seed(3)
        # Larger values than above, so that continuations depend on more than the last token.
        key = "init_std" if name == "opt" else "initializer_range"
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        theirs = model_of(name, **{key: 0.3}, **ends)
        theirs.save_pretrained(folder := tmp_path_factory.mktemp(name))
        want = []
        for prompt in PROMPTS:
            tokens = torch.tensor([prompt])
            mask = torch.ones_like(tokens)
            whole = theirs.generate(
                tokens, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0
            )
            want.append(whole[0, len(prompt) :].tolist())
        return folder, want

    return make


def generated(folder: Path, world_size: int) -> dict[str, list[list[int]]]:
    """The continuations of the prompts on every grid; of eight ranks on two of them.

    In both layouts a model in layout "replicated", which shares the parameters, generates.
    """
    length = 40 if read_config(folder / "config.json").traits.rotary else None
    found = {}
    for shape, layout in cases(folder, world_size, both=False)[:: 4 if world_size == 8 else 1]:
        parallel = ParallelConfig(layout=layout)
        model = from_pretrained(folder, grid_of(shape), parallel, sequence_length=length)
        tokens = generate(model, PROMPTS, max_new_tokens=NEW, sampling=Sampling())
        found[f"{shape.short()} {layout}"] = tokens
    return found


@pytest.mark.parametrize("world_size", GRIDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_grid_generates_what_transformers_does(name, world_size, pool, continued) -> None:
    folder, want = continued(name)
    assert len(set(map(tuple, want))) == len(want)
    for found in pool(world_size).run(generated, folder, world_size):
        assert all(tokens == want for tokens in found.values()), found


def of_images(folder: Path, out: Path, layout: str) -> Tensor:
    """The logits of the text model of a folder, which is also saved."""
    grid = grid_of(GridShape(x=2))
    model = from_pretrained(folder, grid, ParallelConfig(layout=layout))
    save_pretrained(model, out)
    with torch.no_grad():
        return grid.unshard(model(batch()[0]), {1: ("x",)})


@pytest.mark.parametrize(("body", "layout"), [("", "sharded"), ("model.", "replicated")])
def test_the_text_model_of_gemma_3_with_images(body, layout, pool, tmp_path) -> None:
    """Of files as transformers writes them, and with the names that it has in memory."""
    import transformers

    text = LLAMA | GEMMA | {"tie_word_embeddings": True}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(5)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    if body:
        state = {n: t.clone() for n, t in theirs.state_dict().items() if n != "lm_head.weight"}
        save_file(state, tmp_path / "theirs" / "model.safetensors")
    with torch.no_grad():
        want = theirs(batch()[0]).logits
    for found in pool(2).run(of_images, tmp_path / "theirs", tmp_path / "ours", layout):
        assert largest_error({"": found.view_as(want)}, {"": want}) < 2e-5
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert ours.config.model_type == "gemma3_text"
    assert torch.equal(ours(batch()[0]).logits, want)


def written(folder: Path, out: Path) -> bool:
    """Loads on x = 2, y = 2 and saves; returns whether loading again gives identical tensors."""
    grid = grid_of(GridShape(x=2, y=2))
    model = from_pretrained(folder, grid)
    save_pretrained(model, out, like=folder, shard_bytes=50_000)
    again = full_state_dict(from_pretrained(out, grid))
    return all(torch.equal(again[n], t) for n, t in full_state_dict(model).items())


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_is_saved(name, pool, tmp_path) -> None:
    import transformers

    torch.manual_seed(2)
    theirs = model_of(name, bos_token_id=3, eos_token_id=5)
    theirs.save_pretrained(tmp_path / "theirs")
    assert all(pool(4).run(written, tmp_path / "theirs", tmp_path / "ours"))
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    state = ours.state_dict()
    assert all(torch.equal(state[n], t) for n, t in theirs.state_dict().items())
    assert (ours.config.bos_token_id, ours.config.eos_token_id) == (3, 5)
    ids, _ = batch()
    assert torch.equal(ours(ids).logits, theirs(ids).logits), "the configurations differ"
