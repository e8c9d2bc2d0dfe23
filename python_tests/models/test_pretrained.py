"""Loading and saving Hugging Face's folders: bitwise the same tensors on every grid."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import axonn_ext
from axonn_ext import GridShape, from_pretrained, full_state_dict, models, save_pretrained
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.models.pretrained.files import PretrainedFiles
from axonn_ext.spec.files.errors import InputError
from grids import factorisations, grid_of
from memory import MIB, anonymous_bytes
from model_cases import CONFIGS, random_batch, sampled

GRIDS = {
    1: [GridShape()],
    2: factorisations(2),
    4: factorisations(4),
    8: [GridShape(2, 2, 2), GridShape(2, 2, 1, 2), GridShape(1, 2, 2, 2), GridShape(2, 1, 2, 2)],
}


def write_folder(folder: Path, config: ModelConfig, *, num_files: int = 1) -> None:
    """Writes the files that transformers writes, for a model with random weights."""
    folder.mkdir(parents=True)
    torch.manual_seed(3)
    state = PlainTransformer(config).state_dict()
    for tensor in state.values():
        tensor.uniform_(-0.1, 0.1)  # including norms and biases
    if config.tie_embeddings:
        del state["lm_head.weight"]
    described = config.traits.hugging_face.config_json(config)
    (folder / "config.json").write_text(json.dumps(described | {"bos_token_id": 7}))
    (folder / "tokenizer.json").write_text("{}")
    names = sorted(state)
    files = [names[i::num_files] for i in range(num_files)]
    if num_files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, part in enumerate(files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        save_file({name: state[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    return state


def load_and_save(folder: Path, out: Path, shape: GridShape, layout: str) -> tuple[bool, float]:
    """Returns whether the model has the files' tensors, and its loss; also saves it to `out`."""
    model = from_pretrained(folder, grid_of(shape), ParallelConfig(layout=layout))
    stored, state = stored_tensors(folder), full_state_dict(model)
    if model.config.tie_embeddings:
        state.pop("lm_head.weight")
    equal = state.keys() == stored.keys() and all(torch.equal(state[n], stored[n]) for n in stored)
    ids, labels = random_batch()
    grid = grid_of(shape)
    rows = {0: ("data", "z")}
    loss = model.loss(grid.shard(ids, rows), grid.shard(labels, rows), 42.0)
    save_pretrained(model, out, like=folder, shard_bytes=20_000)
    return equal, loss.item()


@pytest.mark.parametrize(("name", "world_size"), list(sampled(CONFIGS, GRIDS)))
def test_every_grid_reads_and_writes_the_same_bits(name, world_size, pool, tmp_path) -> None:
    config = CONFIGS[name]
    write_folder(folder := tmp_path / "in", config, num_files=3)
    want = stored_tensors(folder)
    plain = PlainTransformer(config)
    tied = {"lm_head.weight": want[table_of(plain)]} if config.tie_embeddings else {}
    plain.load_state_dict(want | tied)
    loss = plain.loss(*random_batch(), 42.0).item()
    for number, shape in enumerate(GRIDS[world_size]):
        out = tmp_path / f"out-{number}"
        layout = ("sharded", "replicated")[number % 2]
        for equal, found in pool(world_size).run(load_and_save, folder, out, shape, layout):
            assert equal, shape
            assert found == pytest.approx(loss, rel=2e-6)  # fp32 sums in a different order
        written = stored_tensors(out)
        assert written.keys() == want.keys()
        assert all(torch.equal(written[n], want[n]) for n in want), shape
        described = json.loads((out / "config.json").read_text())
        assert described["bos_token_id"] == 7, "what says nothing about shapes is kept"
        assert (out / "tokenizer.json").read_text() == "{}"
        assert len(list(out.glob("model-*.safetensors"))) > 1
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == want.keys()


def elements_read(folder: Path, shape: GridShape) -> int:
    class Counted(PretrainedFiles):
        def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
            found = super().read(name, rows, columns)
            counts.append(found.numel())
            return found

    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("axonn_ext.models.pretrained.load.PretrainedFiles", Counted)
        from_pretrained(folder, grid_of(shape))
    return sum(counts)


@pytest.mark.parametrize("shape", [GridShape(data=4), GridShape(y=2, data=2), GridShape(2, 1, 2)])
def test_ranks_read_the_files_once_in_all(pool, tmp_path, shape) -> None:
    write_folder(folder := tmp_path / "model", LLAMA, num_files=2)
    counts = pool(4).run(elements_read, folder, shape)
    total = sum(tensor.numel() for tensor in stored_tensors(folder).values())
    assert sum(counts) == total and max(counts) < 0.4 * total


def load_other_files(folders: list[Path], shape: GridShape) -> str:
    with pytest.raises(RuntimeError) as error:
        from_pretrained(folders[dist.get_rank()], grid_of(shape))
    return str(error.value)


@pytest.mark.parametrize("other", ["weights", "config"])
def test_ranks_that_have_other_files_are_named(pool, tmp_path: Path, other: str) -> None:
    """Otherwise the model would be a mixture of several."""
    config = CONFIGS["llama"]
    write_folder(first := tmp_path / "first", config)
    write_folder(second := tmp_path / "second", config)
    if other == "weights":
        state = load_file(second / "model.safetensors")
        state["model.norm.weight"][0] += 1
        save_file(state, second / "model.safetensors", metadata={"format": "pt"})
    else:
        described = json.loads((second / "config.json").read_text())
        (second / "config.json").write_text(json.dumps(described | {"rms_norm_eps": 0.5}))
    for text in pool(2).run(load_other_files, [first, second], GridShape(x=2)):
        assert text.startswith("from_pretrained: the content of the files is "), text
        assert "on rank 1, but " in text and text.endswith("on rank 0")


def table_of(plain: PlainTransformer) -> str:
    table = plain.lm_head.weight
    names = {id(p): name for name, p in reversed(list(plain.named_parameters()))}
    return names[id(table)]


@pytest.fixture
def alone() -> None:
    """A world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


LLAMA = CONFIGS["llama"]


def spoiled(folder: Path, what: str) -> None:
    index = folder / "model.safetensors.index.json"
    first = next(iter(sorted(folder.glob("model-*.safetensors"))))
    if what == "a missing file":
        first.unlink()
    elif what == "a short file":
        first.write_bytes(first.read_bytes()[:-100])
    elif what == "no tensors":
        index.unlink()
    elif what == "pickled":
        index.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif what == "a missing tensor":
        values = json.loads(index.read_text())
        del values["weight_map"]["model.norm.weight"]
        index.write_text(json.dumps(values))
    elif what == "a path":
        values = json.loads(index.read_text())
        values["weight_map"]["model.norm.weight"] = "../secret"
        index.write_text(json.dumps(values))
    elif what == "no index":
        index.write_text("{")
    else:
        state = load_file(first)
        name = next(iter(state))
        if what == "another shape":
            state[name] = torch.zeros(3, 5)
        else:
            state["model.extra.weight"] = torch.zeros(1)
            values = json.loads(index.read_text())
            values["weight_map"]["model.extra.weight"] = first.name
            index.write_text(json.dumps(values))
        save_file(state, first)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("a missing file", r"model-00001-of-00003\.safetensors: is missing"),
        ("a short file", r"model-00001-of-00003\.safetensors: is not a whole safetensors file"),
        ("no tensors", r"expected model\.safetensors, or model\.safetensors\.index\.json"),
        ("pickled", r"got pickled weights, which can run code: load them with transformers once"),
        ("a missing tensor", r"tensors are missing: model\.norm\.weight"),
        ("a path", "expected a weight_map from tensors to files of this folder"),
        ("no index", "is not JSON"),
        ("another shape", r"must have shape \[.*\] by config\.json, got \[3, 5\]"),
        ("an extra tensor", r"tensors that the model does not have: model\.extra\.weight"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(what, expected, tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", LLAMA, num_files=3)
    spoiled(folder, what)
    with pytest.raises(InputError, match=expected):
        from_pretrained(folder, axonn_ext.Grid())


def test_names_without_the_body_and_old_buffers_are_understood(tmp_path, alone) -> None:
    config = CONFIGS["gpt2"]
    write_folder(folder := tmp_path / "model", config)
    state = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, folder / "model.safetensors")
    model = from_pretrained(folder, axonn_ext.Grid())
    found = full_state_dict(model)
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_dtype_and_length_can_be_chosen(tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", LLAMA)
    model = from_pretrained(folder, axonn_ext.Grid(), dtype=torch.bfloat16, sequence_length=4)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config == dataclasses.replace(LLAMA, sequence_length=4)
    write_folder(other := tmp_path / "gpt2", CONFIGS["gpt2"])
    with pytest.raises(InputError, match="sequence_length=4: gpt2 has a table of 8 positions"):
        from_pretrained(other, axonn_ext.Grid(), sequence_length=4)


def test_a_folder_that_exists_is_not_overwritten(tmp_path, alone) -> None:
    model = models.build(LLAMA, axonn_ext.Grid())
    (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match="there: expected a new folder"):
        save_pretrained(model, tmp_path / "there")
    with pytest.raises(InputError, match=r"save_pretrained: .*config\.json"):
        save_pretrained(model, tmp_path / "new", like=tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_file_for_each_tensor_is_whole(tmp_path, alone) -> None:
    """One of our parameters completes several files at once."""
    for name in ("llama", "gpt2"):
        model = models.build(CONFIGS[name], axonn_ext.Grid(), seed=3)
        save_pretrained(model, tmp_path / name, shard_bytes=1)
        again = full_state_dict(from_pretrained(tmp_path / name, axonn_ext.Grid()))
        assert all(torch.equal(again[n], t) for n, t in full_state_dict(model).items())


def test_the_folder_is_meant_not_a_preset_of_its_name(tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "gpt2-small", CONFIGS["gpt2"])
    assert from_pretrained(folder, axonn_ext.Grid()).config.hidden_size == 32
    with pytest.raises(InputError, match=r"llama3-8b: expected a folder with config.json"):
        from_pretrained("llama3-8b", axonn_ext.Grid())


def test_no_more_tokens_than_the_model_takes(tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", LLAMA)
    with pytest.raises(InputError, match="sequence_length=64: the model takes at most 8 tokens"):
        from_pretrained(folder, axonn_ext.Grid(), sequence_length=64)


def test_a_head_that_differs_from_the_table_it_is_tied_to_is_refused(tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", CONFIGS["llama-tied"])
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors")
    from_pretrained(folder, axonn_ext.Grid())
    state["lm_head.weight"][3, 2] += 1
    save_file(state, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight differs from the embedding"):
        from_pretrained(folder, axonn_ext.Grid())


@pytest.mark.parametrize(("body", "outside"), [
    ("language_model.model.", ""), ("model.language_model.", "model."),
])  # fmt: skip
def test_the_text_model_of_a_model_that_reads_images(body, outside, tmp_path, alone) -> None:
    config = dataclasses.replace(CONFIGS["gemma3"], tie_embeddings=True)
    write_folder(folder := tmp_path / "model", config)
    described = json.loads((folder / "config.json").read_text())
    sizes = {name: described[name] for name in described if name != "tie_word_embeddings"}
    whole = {"model_type": "gemma3", "text_config": sizes, "eos_token_id": [1, 6], "vision": 3}
    want = from_pretrained(folder, axonn_ext.Grid())
    (folder / "config.json").write_text(json.dumps(whole))
    state = load_file(folder / "model.safetensors")
    state = {f"{body}{name.removeprefix('model.')}": state[name] for name in state}
    state[f"{outside}vision_tower.conv.bias"] = torch.ones(9)
    save_file(state, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="only the text model is loaded"):
        model = from_pretrained(folder, axonn_ext.Grid())
    save_pretrained(model, tmp_path / "out", like=folder)
    again = from_pretrained(tmp_path / "out", axonn_ext.Grid())
    for name, tensor in full_state_dict(want).items():
        assert all(torch.equal(full_state_dict(m)[name], tensor) for m in (model, again))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["eos_token_id"]) == ("gemma3_text", [1, 6])
    assert not {"text_config", "vision"} & written.keys()


def test_what_another_config_says_of_dtype_and_waves_is_not_kept(tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", CONFIGS["llama-scaled"])
    config = json.loads((folder / "config.json").read_text())
    wrong = {"dtype": "float16", "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    (folder / "config.json").write_text(json.dumps(config | wrong | {"layer_types": ["x"]}))
    model = models.build(CONFIGS["llama-scaled"], axonn_ext.Grid(), dtype=torch.bfloat16)
    save_pretrained(model, tmp_path / "out", like=folder)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["dtype"], written["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert not {"rope_parameters", "layer_types"} & written.keys()
    assert from_pretrained(tmp_path / "out", axonn_ext.Grid()).config == model.config


SAID = {
    "a window": ("mistral", {"sliding_window": 8, "max_position_embeddings": 64}),
    "no window": ("mistral", {"sliding_window": None, "max_position_embeddings": 64}),
    "transformers' own window": ("mistral", {"max_position_embeddings": 8192}),
    "a form of GELU": ("gpt2", {"activation_function": "gelu_fast"}),
    "kinds of layers": ("qwen3", {"layer_types": ["full_attention"] * 2, "sliding_window": 5}),
}


@pytest.mark.parametrize(("name", "said"), SAID.values(), ids=SAID)
@pytest.mark.parametrize("with_like", [False, True])
def test_what_the_model_does_not_represent_is_written_as_it_was(
    name, said, with_like, tmp_path, alone
) -> None:
    write_folder(folder := tmp_path / "model", CONFIGS[name])
    config = json.loads((folder / "config.json").read_text())
    config.pop("sliding_window", None)
    (folder / "config.json").write_text(json.dumps(config | said))
    model = from_pretrained(folder, axonn_ext.Grid())
    save_pretrained(model, tmp_path / "out", like=folder if with_like else None)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written.get(key, "missing") for key in (*said, "sliding_window")} == {
        "sliding_window": "missing", **said
    }  # fmt: skip
    assert from_pretrained(tmp_path / "out", axonn_ext.Grid()).config == model.config


def test_a_window_that_the_model_does_not_have_is_not_taken_over(tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", CONFIGS["mistral"])
    for window in (None, 5):
        model = models.build(
            dataclasses.replace(CONFIGS["mistral"], window=window), axonn_ext.Grid()
        )
        save_pretrained(model, out := tmp_path / str(window), like=folder)
        assert json.loads((out / "config.json").read_text())["sliding_window"] == window


def test_fp16_is_read_and_computed_in_fp32_on_cpus(tmp_path, alone) -> None:
    folder = tmp_path / "model"
    write_folder(folder, CONFIGS["llama"])
    halves = {name: t.half() for name, t in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors")
    model = from_pretrained(folder, axonn_ext.Grid())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    name = "model.embed_tokens.weight"
    assert torch.equal(full_state_dict(model)[name], halves[name].float())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_other_dtypes_are_refused(dtype, tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", LLAMA)
    state = load_file(folder / "model.safetensors")
    save_file({name: t.to(dtype) for name, t in state.items()}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"must be one of F32, BF16, .* got (BOOL|I8)"):
        from_pretrained(folder, axonn_ext.Grid())


def test_float8_is_refused_wherever_it_is(tmp_path, alone) -> None:
    """Without its scales, which are in other tensors, its values are not the weights."""
    write_folder(folder := tmp_path / "model", LLAMA)
    state, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    low = state | {name: state[name].to(torch.float8_e4m3fn)}
    save_file(low, folder / "model.safetensors")
    with pytest.raises(InputError, match=rf"{name} must be one of F32, .* got F8_E4M3; have trans"):
        from_pretrained(folder, axonn_ext.Grid())


def test_a_single_file_goes_before_an_index(tmp_path, alone) -> None:
    """This is as in transformers; a message mentions the index."""
    write_folder(folder := tmp_path / "model", LLAMA, num_files=2)
    want = {name: tensor + 1 for name, tensor in stored_tensors(folder).items()}
    save_file(want, folder / "model.safetensors")
    said = r"model\.safetensors is read, as transformers does; model\.safetensors\.index\.json"
    with pytest.warns(UserWarning, match=said):
        model = from_pretrained(folder, axonn_ext.Grid())
    found = full_state_dict(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())


def test_an_index_and_a_file_without_tensors_are_refused(tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", LLAMA)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(InputError, match=r"index\.json: expected a weight_map with tensors"):
        from_pretrained(folder, axonn_ext.Grid())
    save_file({}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors: expected tensors, got none"):
        from_pretrained(folder, axonn_ext.Grid())


def save_where_one_cannot(folder: Path) -> str:
    model = models.build(LLAMA, grid_of(GridShape(x=2)))
    try:
        save_pretrained(model, "." if grid_of(GridShape(x=2)).rank == 0 else folder)
    except InputError as error:
        return str(error)
    return ""


def test_a_save_that_rank_0_cannot_begin_fails_on_all(tmp_path, pool) -> None:
    first, second = pool(2).run(save_where_one_cannot, tmp_path / "new")
    assert first == second and "expected a new folder" in first


def spoil_on_one_rank(folder: Path) -> str:
    shape = GridShape(x=2)
    grid = grid_of(shape)
    try:
        from_pretrained(folder if grid.rank == 0 else folder / "nowhere", grid)
    except InputError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_read_fails_all(tmp_path, pool) -> None:
    write_folder(folder := tmp_path / "model", LLAMA)
    first, second = pool(2).run(spoil_on_one_rank, folder)
    assert first == f"rank 1: {second}" and "nowhere" in second


# 1 GB in fp32.
LARGE = ModelConfig(
    family="llama", vocab_size=32768, hidden_size=1024, num_layers=16, num_heads=16,
    num_kv_heads=8, intermediate_size=2816, sequence_length=128, tie_embeddings=True,
)  # fmt: skip


def memory_of_loading(folder: Path, shape: GridShape, layout: str) -> int:
    grid = grid_of(shape)
    before = anonymous_bytes()
    model = from_pretrained(folder, grid, ParallelConfig(layout=layout))
    assert all(p.isfinite().all() for p in model.parameters())
    return anonymous_bytes() - before


@pytest.mark.slow
def test_a_rank_that_loads_needs_memory_for_its_own_blocks_alone(pool, tmp_path) -> None:
    write_folder(folder := tmp_path / "model", LARGE, num_files=4)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert size > 0.85e9
    for shape, layout in ((GridShape(2, 2, 2), "sharded"), (GridShape(x=8), "replicated")):
        growth = max(pool(8).run(memory_of_loading, folder, shape, layout))
        print(f"{size / MIB:.0f} MiB; on {shape} a rank grew by at most {growth / MIB:.0f} MiB")
        assert growth < size / 4 + 200 * MIB


def stages_load_and_save(folder: Path, out: Path, shape: GridShape) -> tuple[bool, set[str]]:
    """Whether all stages together have the files' tensors, and the names on this stage."""
    model = from_pretrained(folder, grid_of(shape))
    stored, state = stored_tensors(folder), full_state_dict(model)
    if model.config.tie_embeddings:
        state.pop("lm_head.weight")
    equal = state.keys() == stored.keys() and all(torch.equal(state[n], stored[n]) for n in stored)
    save_pretrained(model, out, like=folder, shard_bytes=20_000)
    return equal, {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "qwen3-wide"])
def test_pipeline_stages_read_and_write_the_same_bits(name, pool, tmp_path) -> None:
    config = dataclasses.replace(CONFIGS[name], num_layers=4)
    write_folder(tmp_path / "model", config, num_files=3)
    for shape in (GridShape(pipe=2, x=2), GridShape(pipe=4)):
        out = tmp_path / shape.short()
        answers = pool(4).run(stages_load_and_save, tmp_path / "model", out, shape)
        assert all(equal for equal, _ in answers)
        assert answers[0][1] != answers[-1][1]
        stored, written = stored_tensors(tmp_path / "model"), stored_tensors(out)
        assert stored.keys() == written.keys()
        assert all(torch.equal(stored[n], written[n]) for n in stored)


def stages_refuse(folder: Path) -> str:
    with pytest.raises(InputError) as error:
        from_pretrained(folder, grid_of(GridShape(pipe=2)))
    return str(error.value)


def test_pipeline_stages_refuse_what_the_model_does_not_have(pool, tmp_path) -> None:
    write_folder(tmp_path / "model", CONFIGS["llama"])
    file = tmp_path / "model" / "model.safetensors"
    state = load_file(file)
    save_file(state | {"model.extra": torch.ones(2)}, file)
    for text in pool(2).run(stages_refuse, tmp_path / "model"):
        assert "tensors that the model does not have: model.extra" in text
    del state["model.layers.1.mlp.down_proj.weight"]
    save_file(state, file)
    for text in pool(2).run(stages_refuse, tmp_path / "model"):
        assert "model.layers.1.mlp.down_proj.weight" in text
