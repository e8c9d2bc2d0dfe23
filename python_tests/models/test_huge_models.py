"""Files that describe far larger models than they contain are refused before building."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch.distributed as dist

import axonn_ext
from axonn_ext import checkpoint, from_pretrained, models
from axonn_ext.checkpoint import CheckpointError
from axonn_ext.cli import main
from axonn_ext.spec.files.errors import InputError
from axonn_ext.train.export import export
from model_cases import CONFIGS
from test_pretrained import write_folder

LLAMA = CONFIGS["llama"]


@pytest.fixture
def alone() -> None:
    """A world of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


HUGE = {"num_hidden_layers": 10**12, "vocab_size": 10**11, "intermediate_size": 10**10}


@pytest.fixture(params=HUGE.items(), ids=HUGE)
def huge(request, tmp_path, monkeypatch) -> Path:
    """A model whose config.json describes far more than its files contain; must not be built."""

    def built(*args: object, **options: object) -> None:
        raise AssertionError("the model is built")

    monkeypatch.setattr("axonn_ext.models.transformer.Transformer.__init__", built)
    write_folder(folder := tmp_path / "model", LLAMA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 64} | dict([request.param]))
    )
    return folder


def test_nothing_is_built_that_is_far_larger_than_the_files(huge, alone) -> None:
    with pytest.raises(InputError, match=r"config\.json: describes a model of .* the files have"):
        from_pretrained(huge, axonn_ext.Grid())


COMMANDS = (
    ("finetune", "--model", "MODEL", "--data", "DATA", "--steps", "1"),
    ("finetune", "--model", "MODEL", "--data", "DATA", "--grid", "x=2", "--lora", "2"),
    ("generate", "--model", "MODEL", "--prompt", "a"),
    ("memorize", "--model", "MODEL", "--sequence-length", "64", "--documents", "DATA"),
    ("memorize", "--evaluate", "MODEL", "--documents", "DATA"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_builds_one(huge, command, tmp_path, capsys) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"{i} " * 99}) + "\n" for i in range(40)))
    words = {"MODEL": str(huge), "DATA": str(data)}
    key = "--data.vocabulary" if command[0] == "finetune" else "--vocabulary"
    out = [] if {"generate", "--evaluate"} & set(command) else ["--out", str(tmp_path / "out")]
    assert main([words.get(word, word) for word in command] + [key, "bytes", *out]) == 2
    assert "describes a model of" in capsys.readouterr().err


def test_more_positions_than_there_is_memory_for_are_refused(tmp_path, alone) -> None:
    write_folder(folder := tmp_path / "model", LLAMA)
    config = json.loads((folder / "config.json").read_text())
    path = folder / "config.json"
    path.write_text(json.dumps(config | {"max_position_embeddings": 10**12}))
    with pytest.raises(ValueError, match=r"1,000,000,000,000 positions need .* smaller seq"):
        from_pretrained(folder, axonn_ext.Grid())
    assert from_pretrained(folder, axonn_ext.Grid(), sequence_length=8).config.sequence_length == 8


def test_no_checkpoint_exports_one(tmp_path, alone) -> None:
    model = models.build(LLAMA, axonn_ext.Grid())
    extra = {"model": dataclasses.asdict(LLAMA) | {"num_layers": 10**12}}
    extra |= {"origins": {"pretrained": "", "tokenizer": ""}, "config": {"lora": {}}}
    checkpoint.save(tmp_path / "step", model=model, extra=extra)
    with pytest.raises(CheckpointError, match=r"extra describes a model of .* the checkpoint has"):
        export(tmp_path / "step", tmp_path / "out", dtype="fp32")
