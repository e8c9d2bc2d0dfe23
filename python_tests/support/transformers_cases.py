"""Small unmodified transformers models, with a batch and a loss, for slow tests.

Only the functions import transformers, since `make test` runs without it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext import full_gradients, global_mean, sync_gradients
from axonn_ext.ranks.grid import Grid
from grids import relative_error

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "intermediate_size": 96, "max_position_embeddings": 32, "initializer_range": 0.1,
}  # fmt: skip
LLAMA = SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": False}
GPT2: dict[str, Any] = {
    "vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 32,
    "initializer_range": 0.1, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
OPT: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "word_embed_proj_dim": 64, "num_hidden_layers": 2,
    "ffn_dim": 96, "num_attention_heads": 8, "max_position_embeddings": 32, "init_std": 0.1,
    "dropout": 0.0, "tie_word_embeddings": True,
}  # fmt: skip
BERT = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Name -> (model_type, class in transformers, values of its configuration).
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "AutoModelForCausalLM", LLAMA),
    "mistral": (
        "mistral", "AutoModelForCausalLM", LLAMA | {"sliding_window": 8, "head_dim": 16},
    ),
    "qwen2": ("qwen2", "AutoModelForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "AutoModelForCausalLM", LLAMA | {"head_dim": 16}),
    "gpt2": ("gpt2", "AutoModelForCausalLM", GPT2),
    "opt": ("opt", "AutoModelForCausalLM", OPT),
    "bert": ("bert", "AutoModelForMaskedLM", BERT),
    "bert-classifier": (
        "bert", "AutoModelForSequenceClassification", BERT | {"num_labels": 3},
    ),
}  # fmt: skip
CLASSES = 3


def make(name: str, **values: Any) -> nn.Module:
    """The model, with biases and norms changed from their initial values; equal on every rank."""
    import transformers

    kind, maker, defaults = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **(defaults | values))
    torch.manual_seed(1)
    model = getattr(transformers, maker).from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model.train()


def batch(name: str) -> tuple[Tensor, Tensor]:
    """Token ids, including those of padding in OPT and BERT, and labels, some of them missing."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(256, (8, 16), generator=generator)
    if name == "bert-classifier":
        return ids, torch.randint(CLASSES, (8,), generator=generator)
    labels = torch.randint(256, (8, 16), generator=generator)
    labels[0, :5] = -100
    ids[3, 2:6] = torch.tensor([0, 1, 0, 1])
    return ids, labels


def loss_sum(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of the labelled tokens or sequences."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def relative_errors(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each gradient. A key bias's gradient is 0 except for rounding, so its
    error is relative to that of the queries.
    """
    errors = {}
    for name, tensor in want.items():
        twin = name.replace("k_proj.bias", "q_proj.bias").replace("key.bias", "query.bias")
        errors[name] = ((found[name] - tensor).norm() / want[twin].norm()).item()
    return errors


def compared(
    name: str, model: nn.Module, plain: nn.Module, grid: Grid, axes: tuple[str, ...]
) -> dict[str, float]:
    """Relative errors of all results of a placed model on this rank, against the plain model.

    axes: the axes over which the batch's rows are split.
    """
    ids, labels = batch(name)
    logits = plain(ids).logits
    want_loss = loss_sum(name, logits, labels) / (labels != -100).sum()
    want_loss.backward()
    want = {n: p.grad for n, p in plain.named_parameters()}

    own = {0: axes}
    own_labels = grid.shard(labels, own)
    found_logits = model(grid.shard(ids, own)).logits
    total = loss_sum(name, found_logits, own_labels)
    loss = global_mean(total, (own_labels != -100).sum(), grid, axes=axes)
    loss.backward()
    sync_gradients(model)
    found = full_gradients(model)
    assert found.keys() == want.keys()
    assert type(model) is type(plain)
    errors = relative_errors(found, want)
    errors["logits"] = relative_error(found_logits, grid.shard(logits, own))
    errors["loss"] = relative_error(loss, want_loss)
    return errors
