"""Low-rank adapters in PEFT's file format."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from axonn_ext import (
    GridShape,
    add_adapters,
    from_pretrained,
    full_state_dict,
    load_adapter,
    load_full_state_dict,
    models,
    save_adapter,
    save_pretrained,
)
from axonn_ext.models.pretrained import adapter_files, adapters_of
from axonn_ext.models.pretrained.adapter_files import ADAPTER_CONFIG, ADAPTER_TENSORS
from axonn_ext.spec.files.errors import InputError
from grids import every_grid, factorisations, grid_of
from model_cases import CONFIGS
from test_transformers import MODELS, batch


def filled(model) -> dict[str, torch.Tensor]:
    """Gives every element of an adapter a unique value."""
    state = full_state_dict(model)
    for number, (name, value) in enumerate(sorted(state.items())):
        if ".lora_" in name:
            value.copy_(torch.arange(value.numel()).view(value.shape) + 1e4 * number)
    load_full_state_dict(model, state)
    return {name: value for name, value in state.items() if ".lora_" in name}


def write(name: str, folder: Path, targets: list[str]) -> None:
    model = models.build(CONFIGS[name], every_grid()[-1], seed=2)
    add_adapters(model, rank=4, alpha=8, targets=targets)
    filled(model)
    save_adapter(model, folder, base="some/model")


def read(name: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for grid in every_grid():
        model = models.build(CONFIGS[name], grid, seed=2)
        load_adapter(model, folder)
        found.append({n: v for n, v in full_state_dict(model).items() if ".lora_" in n})
    return found


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("gpt2", ["all-linear"]),
        ("gpt2", ["attn.c_proj"]),  # the MLP has a c_proj, too
        ("llama", ["q_proj", "v_proj", "up_proj"]),
    ],
)
def test_any_grid_reads_what_another_wrote(name, targets, pool, tmp_path) -> None:
    pool(4).run(write, name, tmp_path / "adapter", targets)
    stored = load_file(tmp_path / "adapter" / ADAPTER_TENSORS)
    config = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert config["base_model_name_or_path"] == "some/model"
    assert config["fan_in_fan_out"] == (name == "gpt2")
    for found in pool(2).run(read, name, tmp_path / "adapter"):
        for state in found:
            assert {f"base_model.model.{n}" for n in state} == stored.keys()
            assert all(torch.equal(v, stored[f"base_model.model.{n}"]) for n, v in state.items())


def refused(folder: Path) -> tuple[str, int]:
    model = models.build(CONFIGS["llama"], every_grid()[0])
    first, *others = model.parameters()
    first.requires_grad_(False)
    with pytest.raises(InputError) as error:
        load_adapter(model, folder)
    assert not first.requires_grad and all(p.requires_grad for p in others)
    return str(error.value), len(adapters_of(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "adapter_config.json: expected peft_type LORA"),
        ({"use_dora": True}, "use_dora must be False, got True"),
        ({"use_rslora": True}, "use_rslora must be False, got True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must be True, got pissa"),
        ({"lora_alpha": float("nan")}, "expected numbers r and lora_alpha, got 4 and nan"),
        ({"r": 10**13}, "rank must be a whole number from 1 to 32, got 10000000000000"),
        ({"r": "4"}, "expected numbers r and lora_alpha, got 4 and 8"),
        ({"r": 3}, "must have shape [3, 32], got [4, 32]"),
        ({"target_modules": ["c_attn"]}, "targets must be all-linear, or some of down_proj"),
        ({"target_modules": ["q_proj"]}, "tensors are unknown: base_model.model.model.layers.0"),
        ({"target_modules": "all-linear"}, "tensors are missing: base_model.model.model.layers.0"),
        ("cut", "is not a whole safetensors file"),
        ("removed", "adapter_model.safetensors: is missing"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(change, message, pool, tmp_path) -> None:
    folder = tmp_path / "adapter"
    pool(2).run(write, "llama", folder, ["q_proj", "k_proj"])
    if isinstance(change, dict):
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config | change))
    elif change == "cut":
        content = (folder / ADAPTER_TENSORS).read_bytes()
        (folder / ADAPTER_TENSORS).write_bytes(content[:-10])
    else:
        (folder / ADAPTER_TENSORS).unlink()
    for text, left in pool(2).run(refused, folder):
        assert message in text
        assert left == 0


@pytest.mark.parametrize("key", adapter_files._NOT_DONE)
def test_options_of_peft_that_we_do_not_have_are_refused(key: str, tmp_path) -> None:
    """Each option would change the adapters' result."""
    path = tmp_path / ADAPTER_CONFIG
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    for value, refused in ((None, False), (True, True), (["lm_head"], True), ("all", True)):
        if key == "init_lora_weights" and value is True:
            continue  # PEFT's default
        path.write_text(json.dumps(plain | {key: value}))
        with pytest.raises(InputError, match=f"{key} must be") if refused else nullcontext():
            adapter_files._read_config(path)


def load_beside(folder: Path) -> tuple[str, int, list[bool]]:
    """Loads into a model that has adapters already, with some parameters frozen."""
    model = models.build(CONFIGS["llama"], every_grid()[0])
    add_adapters(model, rank=2, alpha=2, targets=["o_proj"])
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(InputError) as error:
        load_adapter(model, folder)
    after = [p.requires_grad for p in model.parameters()]
    return str(error.value), len(adapters_of(model)), [before == after]


def test_adapters_that_are_there_stay(pool, tmp_path) -> None:
    pool(2).run(write, "llama", tmp_path / "adapter", ["q_proj"])
    for text, left, kept in pool(2).run(load_beside, tmp_path / "adapter"):
        assert "the model has adapters; merge them first" in text
        assert left == CONFIGS["llama"].num_layers
        assert kept == [True]


def save_twice(folder: Path) -> list[str]:
    model = models.build(CONFIGS["llama"], every_grid()[0])
    texts = []
    for save in (save_adapter, save_adapter, save_pretrained):
        if len(texts) == 1:
            add_adapters(model, rank=2, alpha=2)
        try:
            save(model, folder)
            texts.append("")
        except InputError as error:
            texts.append(str(error))
    return texts


def test_mistakes_of_saving_are_known_to_every_rank(pool, tmp_path) -> None:
    (tmp_path / "there").mkdir()
    for texts in pool(2).run(save_twice, tmp_path / "there"):
        assert "the model has no adapters" in texts[0]
        assert "expected a new folder, got one that exists" in texts[1]
        assert "the model has adapters; use save_adapter, or merge them" in texts[2]


# --- With PEFT -----------------------------------------------------------------------------------


def exchanged(folder: Path, shape: GridShape) -> torch.Tensor:
    """Logits with PEFT's adapters, which are then saved again."""
    grid = grid_of(shape)
    model = from_pretrained(folder / "base", grid)
    load_adapter(model, folder / "theirs")
    out = folder / f"ours-{shape}"
    save_adapter(model, out)
    assert (
        load_file(out / ADAPTER_TENSORS).keys()
        == load_file(folder / "theirs" / ADAPTER_TENSORS).keys()
    )
    ids = grid.shard(batch()[0], {0: ("data", "z")})
    with torch.no_grad():
        return grid.unshard(model(ids), {0: ("data", "z", "y"), 1: ("x",)})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "opt"])
def test_peft_reads_ours_and_we_read_peft_s(name, pool, tmp_path) -> None:
    import peft
    import transformers

    torch.manual_seed(1)
    kind, values = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **values)
    base = transformers.AutoModelForCausalLM.from_config(config).eval()
    base.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules="all-linear",
        init_lora_weights=False, fan_in_fan_out=name == "gpt2",
    )  # fmt: skip
    theirs = peft.get_peft_model(base, lora).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ids, _ = batch()
    want = theirs(ids).logits.detach()
    for world_size in (1, 4):
        for shape in factorisations(world_size):
            for found in pool(world_size).run(exchanged, tmp_path, shape):
                error = (found.view_as(want) - want).norm() / want.norm()
                assert error < 2e-5, shape  # fp32 sums in different orders
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / f"ours-{GridShape(x=2, y=2)}").eval()
    assert torch.equal(again(ids).logits, want)
