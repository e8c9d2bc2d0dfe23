"""Hugging Face's folders whose weights are in FP8 with scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import axonn_ext
from axonn_ext import GridShape, from_pretrained, full_state_dict
from axonn_ext.models import ParallelConfig
from axonn_ext.models.pretrained.files import PretrainedFiles
from axonn_ext.spec.files.errors import InputError
from grids import factorisations, grid_of
from model_cases import CONFIGS
from test_pretrained import alone, write_folder  # noqa: F401

LARGEST = torch.finfo(torch.float8_e4m3fn).max
BLOCK = (24, 10)  # divides no side, and is not what folders usually have
# For each kind of scales: config.json's description, and how the scales' name ends.
KINDS = {
    "block": ({"quant_method": "fp8", "weight_block_size": [*BLOCK]}, "_scale_inv"),
    "grouped block": (
        {"quant_method": "compressed-tensors",
         "config_groups": {"group_0": {"weights": {"block_structure": [*BLOCK]}}}},
        "_scale",
    ),
    "row": ({"quant_method": "compressed-tensors"}, "_scale"),
    "vector": ({"quant_method": "fbgemm_fp8"}, "_scale"),
    "tensor": ({"quant_method": "modelopt"}, "_scale"),
}  # fmt: skip


def in_fp8(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in FP8, its scales as the file has them, and the values that these stand for."""
    block = {"tensor": weight.shape, "row": (1, weight.shape[1]), "vector": (1, weight.shape[1])}
    height, width = block.get(kind, BLOCK)
    scale = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    stored, values = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scale[i, j] = weight[part].abs().max() / LARGEST
            stored[part] = (weight[part] / scale[i, j]).to(torch.float8_e4m3fn)
            values[part] = stored[part].float() * scale[i, j]
    return stored, scale.reshape({"tensor": (), "vector": (-1,)}.get(kind, scale.shape)), values


def write_fp8(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Writes a folder whose blocks are in FP8; returns the values of all tensors in fp32."""
    write_folder(folder, CONFIGS["llama"])
    state = load_file(folder / "model.safetensors")
    description, ending = KINDS[kind]
    state = {name: tensor.bfloat16() for name, tensor in state.items()}
    values = {name: tensor.float() for name, tensor in state.items()}
    for name in [name for name in state if "_proj.weight" in name]:
        state[name], state[name + ending], values[name] = in_fp8(values[name], kind)
        state[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = description
    (folder / "config.json").write_text(json.dumps(config))
    return values


def equals(folder: Path, shape: GridShape, layout: str, want: dict[str, torch.Tensor]) -> bool:
    model = from_pretrained(
        folder, grid_of(shape), ParallelConfig(layout=layout), dtype=torch.float
    )
    state = full_state_dict(model)
    return all(torch.equal(state[name], values) for name, values in want.items())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_values_that_they_stand_for(kind: str, pool, tmp_path) -> None:
    want = write_fp8(folder := tmp_path / "model", kind)
    for number, shape in enumerate([GridShape(), *factorisations(2), GridShape(2, 2)]):
        layout = ("sharded", "replicated")[number % 2]
        assert all(pool(shape.size).run(equals, folder, shape, layout, want)), shape


def test_they_become_bf16(tmp_path, alone) -> None:  # noqa: F811
    want = write_fp8(tmp_path / "model", "block")
    model = from_pretrained(tmp_path / "model", axonn_ext.Grid())
    state = full_state_dict(model)
    assert all(torch.equal(state[name], want[name].bfloat16()) for name in want)
    axonn_ext.save_pretrained(model, tmp_path / "saved", like=tmp_path / "model")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    assert PretrainedFiles(tmp_path / "saved").names == want.keys()


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("missing", "must be one of F32, BF16, F16, F64, got F8_E4M3"),
        ("of another shape", r"_scale_inv: expected one scale, .* of rows, or \[.*\] of blocks of "
         r"24 x 10, got \[3, 5\]"),
        ("not finite", "_scale_inv: expected finite scales, got others"),
        ("of weights in fp32", "tensors that the model does not have: .*_scale_inv"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_named(what, expected, tmp_path, alone) -> None:  # noqa: F811
    write_fp8(folder := tmp_path / "model", "block")
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if name.endswith("_scale_inv"))
    if what == "missing":
        del state[name]
    elif what == "of another shape":
        state[name] = torch.ones(3, 5)
    elif what == "not finite":
        state[name].view(-1)[0] = torch.nan
    else:
        weight = name.removesuffix("_scale_inv")
        state[weight] = state[weight].float()
    save_file(state, folder / "model.safetensors")
    with pytest.raises(InputError, match=expected):
        from_pretrained(folder, axonn_ext.Grid())
