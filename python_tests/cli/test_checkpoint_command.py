"""`axonn-ext checkpoint`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.cli import main
from axonn_ext.models import ModelConfig
from axonn_ext.models.plain import PlainTransformer
from trained_here import train_here


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_here(folder, checkpoint__interval=3, model__family="llama", train__dtype="bf16")
    return folder


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main(["checkpoint", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_list_and_inspect(trained, capsys) -> None:
    status, out = call(capsys, "list", trained)
    assert status == 0
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [(row[0], row[-1]) for row in rows] == [
        ("3", "x=1,y=1,z=1,data=1,pipe=1"), ("6", "latest"),
    ]  # fmt: skip
    status, out = call(capsys, "inspect", trained, "--tensors")
    assert status == 0
    assert "step  6\n" in out and "extra  step, model, config, origins, sequences" in out
    assert "model.norm.weight  float32  32  in 1 block\n" in out


def test_verify_names_what_is_damaged_and_offers_another(trained, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert call(capsys, "verify", run)[0] == 0
    path = run / "checkpoints" / "step-00000006" / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    status, out = call(capsys, "verify", run)
    assert status == 1
    assert f"{path}: expected" in out
    assert f"that is whole: {run / 'checkpoints' / 'step-00000003'}" in out
    (path.parent / "manifest.json").write_text("{}")
    assert "damaged" in call(capsys, "list", run)[1]


def test_a_damaged_checkpoint_does_not_hide_the_others(trained, tmp_path, capsys) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-00000003" / "manifest.json").write_text("{}")
    status, out = call(capsys, "list", tmp_path / "run")
    assert status == 0
    damaged, whole = (line.split() for line in out.splitlines()[1:3])
    assert (damaged[0], damaged[1]) == ("3", "damaged:")
    assert (whole[0], whole[-1]) == ("6", "latest")


def test_reshard_keeps_every_bit(trained, tmp_path, capsys) -> None:
    status, out = call(capsys, "reshard", trained, tmp_path / "copy", "--files", "3")
    assert status == 0 and "in 3 files" in out
    old = read_manifest(trained / "checkpoints" / "step-00000006")
    new = read_manifest(tmp_path / "copy")
    assert len(new.files) == 3 and new.extra == old.extra
    tensors = {}
    for file in new.files:
        tensors |= load_file(tmp_path / "copy" / file)
    (file,) = old.files
    whole = load_file(trained / "checkpoints" / "step-00000006" / file)
    assert tensors.keys() == {name.partition("@")[0] for name in whole}
    for name, tensor in whole.items():
        assert torch.equal(tensors[name.partition("@")[0]], tensor), name
    assert call(capsys, "verify", tmp_path / "copy")[0] == 0


def test_export_is_the_model_that_was_trained(trained, tmp_path, capsys) -> None:
    status, out = call(capsys, "export", trained, tmp_path / "model")
    assert status == 0 and "from_pretrained" in out
    state = load_file(tmp_path / "model" / "model.safetensors")
    config = read_manifest(trained / "checkpoints" / "step-00000006").extra["model"]
    table = state["model.embed_tokens.weight"]  # tied, so it is in the file once
    PlainTransformer(ModelConfig(**config)).load_state_dict(state | {"lm_head.weight": table})
    assert all(tensor.dtype == torch.float32 for tensor in state.values()), "the masters"
    assert call(capsys, "export", trained, tmp_path / "model")[0] == 2


@pytest.mark.parametrize("lora", [(), ("--lora", "4"), ("--lora", "4", "--lora.start", "adapter")])
def test_export_of_a_fine_tuned_model(tmp_path, capsys, lora) -> None:
    """The export includes a window longer than the sequences, and the adapters' updates."""
    train_here(tmp_path / "run", checkpoint__interval=6, model__family="mistral")
    assert call(capsys, "export", tmp_path / "run", tmp_path / "model")[0] == 0
    path = tmp_path / "model" / "config.json"
    said = {"sliding_window": 32, "max_position_embeddings": 64, "bos_token_id": 7}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 50)
    options = [
        "finetune", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "lines.jsonl"),
        "--data.vocabulary", "bytes", "--sequence-length", "16", "--steps", "2", "--lr", "0.1",
        "--checkpoint.interval", "2", "--train.eval_interval", "0", "--train.device", "cpu",
        "--out",
    ]  # fmt: skip
    if "adapter" in lora:
        assert main([*options, str(tmp_path / "first"), "--lora", "4"]) == 0
        lora = (*lora[:-1], str(tmp_path / "first" / "adapter"))
    assert main([*options, str(tmp_path / "tuned"), *lora]) == 0
    status, out = call(capsys, "export", tmp_path / "tuned", tmp_path / "exported")
    assert status == 0, out
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert {key: written[key] for key in said} == said
    state = load_file(tmp_path / "exported" / "model.safetensors")
    want = load_file(tmp_path / "model" / "model.safetensors")
    if not lora:
        want = load_file(tmp_path / "tuned" / "model" / "model.safetensors")
    else:
        adapter = load_file(tmp_path / "tuned" / "adapter" / "adapter_model.safetensors")
        for name in list(want):
            start = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{start}A.weight" in adapter:
                want[name] += 2 * adapter[f"{start}B.weight"] @ adapter[f"{start}A.weight"]
    assert state.keys() == want.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, want[name], msg=name)


@pytest.mark.parametrize("action", ["list", "inspect", "verify"])
def test_no_checkpoint_is_a_mistake_of_the_user(tmp_path, capsys, action) -> None:
    status, out = call(capsys, action, tmp_path / "missing")
    assert status == 2
    assert out.count("\n") == 1 and "expected a" in out


@pytest.mark.slow
def test_transformers_loads_what_is_exported(trained, tmp_path, capsys) -> None:
    transformers = pytest.importorskip("transformers")
    assert call(capsys, "export", trained, tmp_path / "model")[0] == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = read_manifest(trained / "checkpoints" / "step-00000006").extra["model"]
    ours = PlainTransformer(ModelConfig(**config))
    state = load_file(tmp_path / "model" / "model.safetensors")
    ours.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    ids = torch.randint(256, (2, 16))
    # Both compute in fp32, but in different orders.
    torch.testing.assert_close(theirs(ids).logits, ours(ids), atol=1e-5, rtol=1e-4)
