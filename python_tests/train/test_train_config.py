"""The configuration: defaults, TOML, overrides, and error messages."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.library import Library

from axonn_ext.kernels import extension
from axonn_ext.spec.files.keys import keys_of
from axonn_ext.spec.grid import GridShape
from axonn_ext.spec.recompute import EXPECTED
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config import Config
from axonn_ext.train.config_file import Override, load_config, to_toml
from axonn_ext.train.differences import as_json, differences
from axonn_ext.train.job import prepare

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.toml"))


def problems(path: Path | None = None, **overrides: str) -> list[str]:
    """The problems of the overrides; a double underscore stands for the dot of a key."""
    pairs = tuple(Override(key.replace("__", "."), text) for key, text in overrides.items())
    with pytest.raises(UserError) as caught:
        load_config(path, overrides=pairs)
    return list(caught.value.problems)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_file_then_grid_then_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "[grid]\nx = 4\ndata = 2\n[model]\nhidden_size = 64\n[optim]\nlr = 1\n[data]\ntext = 'a b'",
    )
    config = load_config(
        path,
        grid="y=2",
        overrides=(
            Override("grid.z", "3"),
            Override("optim.weight_decay", "3e-4"),
            Override("model.tie_embeddings", "False"),
            Override("data.vocabulary", "7"),
        ),
    )
    assert config.grid == GridShape(y=2, z=3)  # --grid replaces all five axes
    assert config.model.hidden_size == 64
    assert config.optim.lr == 1.0
    assert isinstance(config.optim.lr, float)
    assert config.optim.weight_decay == 3e-4
    assert config.model.tie_embeddings is False
    assert config.data.vocabulary == "7"
    assert config.data.text == "a b"
    assert config.model.num_layers == Config().model.num_layers


def test_printed_toml_reads_back(tmp_path: Path) -> None:
    config = load_config(
        None, overrides=(Override("data.text", 'a "quoted" \\ path \u00e9\x7f'),), grid="2x1x2"
    )
    text = to_toml(config)
    assert load_config(write(tmp_path, text)) == config
    assert set(tomllib.loads(text)) == {table.name for table in dataclasses.fields(Config)}


def test_every_key_says_what_it_means() -> None:
    for table in dataclasses.fields(Config):
        values = getattr(Config(), table.name)
        keys = keys_of(type(values))
        assert keys.keys() == {key.name for key in dataclasses.fields(values)}
        for name, key in keys.items():
            assert len(key.doc) > 5, f"{table.name}.{name}"


def test_options_that_are_off_are_none() -> None:
    assert Config().goldfish_options() is Config().overlap_options() is None
    given = (Override("goldfish.k", "3"), Override("overlap.mode", "on"))
    config = load_config(None, overrides=given)
    assert config.goldfish_options() is config.goldfish
    assert config.overlap_options() is config.overlap


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_fit_their_grid(path: Path) -> None:
    config = load_config(path)
    prepare(config, world_size=config.grid.size)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("model.hidden_size", "big", 'expected a whole number >= 1, got "big"'),
        ("model.hidden_size", "0", "expected a whole number >= 1, got 0"),
        ("model.hidden_size", "2.5", 'expected a whole number >= 1, got "2.5"'),
        ("optim.lr", "-1", "expected a finite number > 0, got -1.0"),
        ("optim.lr", "nan", "expected a finite number > 0, got nan"),
        ("optim.beta2", "1", "expected a finite number >= 0 and <= 0.999999, got 1.0"),
        ("optim.name", "sgd", 'expected one of adamw, muon, got "sgd"'),
        ("optim.momentum", "1", "expected a finite number >= 0 and <= 0.9999, got 1.0"),
        ("optim.adjust_lr", "big", 'expected one of match_rms_adamw, original, got "big"'),
        ("optim.schedule", "step", 'expected one of constant, linear, cosine, wsd, got "step"'),
        ("optim.warmup_fraction", "1.5", "expected a finite number >= 0 and <= 1, got 1.5"),
        ("optim.decay_fraction", "-1", "expected a finite number >= 0 and <= 1, got -1.0"),
        ("optim.decay_type", "sqrt", 'expected one of linear, 1-sqrt, got "sqrt"'),
        ("train.dtype", "fp8", 'expected one of fp32, bf16, fp16, got "fp8"'),
        ("data.order", "random", 'expected one of windows, documents, examples, got "random"'),
        ("model.tie_embeddings", "1", 'expected true or false, got "1"'),
        ("grid.x", "0", "expected a whole number >= 1, got 0"),
        ("parallel.recompute", "every:1", f'expected {EXPECTED}, got "every:1"'),
    ],
)
def test_bad_values_on_the_command_line(key: str, text: str, expected: str) -> None:
    (problem,) = problems(**{key.replace(".", "__"): text})
    assert problem == f"{key}: {expected} on the command line"


def test_a_number_at_its_bound_is_legal_unless_it_must_be_above() -> None:
    tables = [table.name for table in dataclasses.fields(Config)]
    keys = {
        f"{t}.{name}": key
        for t in tables
        for name, key in keys_of(type(getattr(Config(), t))).items()
    }
    for name, key in keys.items():
        # 0 stands for None where that is legal.
        above = (key.above, key.optional and key.above == 0)
        for bound, is_legal in ((key.minimum, True), (key.maximum, True), above):
            if bound is not None:
                number = Override(name, f"{bound:.17g}")
                with nullcontext() if is_legal else pytest.raises(UserError, match="expected"):
                    load_config(None, overrides=(number,))


def test_bad_values_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[model]\nhidden_size = "64"\ntie_embeddings = 1\n[train]\nsteps = true\n'
        "[parallel]\nrecompute = true",
    )
    assert problems(path) == [
        f'model.hidden_size: expected a whole number >= 1, got "64" in {path}',
        f"model.tie_embeddings: expected true or false, got 1 in {path}",
        f"train.steps: expected a whole number >= 1, got true in {path}",
        f"parallel.recompute: expected {EXPECTED}, got true in {path}",
    ]


def test_unknown_keys_and_tables(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nhiden_size = 64\n[trian]\nsteps = 3\n")
    unknown_key, unknown_table = problems(path)
    assert f"unknown key model.hiden_size in {path} (did you mean model.hidden_size?)" in (
        unknown_key
    )
    assert "keys of [model]: vocab_size, hidden_size," in unknown_key
    assert f"unknown table [trian] in {path} (did you mean train?)" in unknown_table
    assert "[grid], [model], [data]" in unknown_table
    (elsewhere,) = problems(optim__batch_size="3")
    assert "did you mean train.batch_size?" in elsewhere
    assert problems(write(tmp_path, "model = 3"))[0].startswith("model: expected a table [model]")


def test_unreadable_files(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.toml") == [
        f"--config: {tmp_path / 'none.toml'}: cannot be read: No such file or directory"
    ]
    assert "is not TOML" in problems(write(tmp_path, "[model\n"))[0]
    assert "cannot be read: Is a directory" in problems(tmp_path)[0]


@pytest.mark.parametrize(
    ("grid", "expected"),
    [("auto", "planner"), ("w=2", "x=2,y=2,z=1"), ("x=0", ">= 1")],
)
def test_bad_grids(grid: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        load_config(None, grid=grid)
    assert f"--grid {grid}" in str(caught.value)


def refused(*, world_size: int = 1, grid: str = "x=1", **overrides: str) -> str:
    pairs = tuple(Override(key.replace("__", "."), text) for key, text in overrides.items())
    with pytest.raises(UserError) as caught:
        prepare(load_config(None, grid=grid, overrides=pairs), world_size=world_size)
    return str(caught.value)


def test_job_names_the_numbers(tmp_path: Path) -> None:
    assert "needs 4 processes (x=2 * y=2 * z=1 * data=1 * pipe=1), but got 3" in refused(
        grid="x=2,y=2", world_size=3
    )
    assert "but got 2; change the grid (--grid auto chooses one)" in refused(world_size=2)
    text = refused(grid="x=2,z=3", world_size=6, train__batch_size="4")
    assert "does not fit this model and batch" in text
    assert "hidden_size: 256 must be divisible by 3" in text
    assert "micro-batch: 4 must be divisible by 3" in text
    assert "batch_size 16 must be divisible by train.micro_batches 3" in refused(
        train__micro_batches="3"
    )
    assert "plain runs in one process" in refused(
        model__implementation="plain", grid="x=2", world_size=2
    )
    assert "expected at least 256" in refused(model__vocab_size="255")
    assert "num_heads=3" in refused(model__num_heads="3")
    assert "pipe=5, chunks=1: 4 layers cannot be split into 5 parts" in refused(
        grid="pipe=5", world_size=5, model__num_layers="4", train__micro_batches="4"
    )
    assert "blocks: expected 2 numbers >= 1 that add up to the 4 blocks" in refused(
        grid="pipe=2", world_size=2, model__num_layers="4", pipeline__blocks="3,2"
    )
    assert "chunks must be >= 2 with schedule 'interleaved', got 1" in refused(
        pipeline__schedule="interleaved"
    )
    assert "got 1 micro-batches on 2 stages" in refused(
        grid="pipe=2", world_size=2, pipeline__schedule="interleaved", pipeline__chunks="2"
    )
    assert "defer_weights must be true with schedule 'zero_bubble'" in refused(
        pipeline__schedule="zero_bubble", pipeline__defer_weights="false"
    )
    assert "lora.rank: expected 0 on pipeline stages" in refused(
        grid="pipe=2", world_size=2, lora__rank="4"
    )
    muon: dict[str, Any] = {"optim__name": "muon"}
    assert "model.implementation plain does not support optim.name muon" in refused(
        **muon, model__implementation="plain"
    )
    assert "optim.name: expected adamw with lora.rank" in refused(**muon, lora__rank="4")
    assert "optim.offload must be none with optimizer muon, got 'cpu'" in refused(
        **muon, optim__offload="cpu"
    )
    if not torch.cuda.is_available():
        assert "torch sees no GPU here" in refused(train__device="cuda")


def test_compiled_blocks_are_refused_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "model.implementation plain does not support train.compile; use axonn" in refused(
        train__compile="true", model__implementation="plain"
    )
    stages: dict[str, Any] = {"grid": "pipe=2", "world_size": 2, "train__compile": "true"}
    for schedule in ("message_driven", "zero_bubble"):
        assert (
            "train.compile: expected false where weight gradients are deferred (pipeline.schedule "
            f"{schedule}), got true; set pipeline.schedule to 1f1b"
        ) in refused(**stages, pipeline__schedule=schedule)
    monkeypatch.setenv("CXX", "no-such-compiler")
    prepare(load_config(None), world_size=1)
    assert (
        "train.compile: expected a C++ compiler, which torch.compile needs on the CPU, got no "
        "program no-such-compiler; install g++, or set CXX to another compiler"
    ) in refused(train__compile="true", train__device="cpu")


def test_overlap_of_compiled_blocks_counts_blocks() -> None:
    """A block has four weights."""
    pairs = {"overlap.mode": "on", "overlap.prefetch": "2", "overlap.deferred": "3"}
    overrides = tuple(Override(key, text) for key, text in pairs.items())
    eager = load_config(None, overrides=overrides).overlap_options()
    compiled = load_config(
        None, overrides=(*overrides, Override("train.compile", "true"))
    ).overlap_options()
    assert eager is not None and eager.prefetch == 2
    assert compiled == dataclasses.replace(eager, prefetch=8, deferred=12)


@contextmanager
def fused_kernels(why: str = "") -> Iterator[list[tuple[Any, ...]]]:
    """Simulates the CUDA parts, which give this reason not to run; yields the questions asked."""
    asked: list[tuple[Any, ...]] = []

    def answer(
        device: torch.device, dtype: torch.dtype, form: str, m: int, n: int, k: int, ranks: int
    ) -> str:
        asked.append((device, dtype, form, ranks))
        return why

    library = Library("axonn", "FRAGMENT")
    library.define(
        "_why_no_fused(Device device, ScalarType dtype, str form, int m, int n, int k, "
        "int num_ranks) -> str"
    )
    library.impl("_why_no_fused", answer, "CompositeExplicitAutograd")
    try:
        yield asked
    finally:
        library._destroy()


def on_gpus(
    monkeypatch: pytest.MonkeyPatch,
    *,
    grid: str = "x=1",
    local_world_size: int | None = None,
    **overrides: str,
) -> list[str]:
    """The problems of "fused" on a machine that seems to have GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    overrides = {"train__device": "cuda", "parallel__algorithm": "fused", **overrides}
    pairs = tuple(Override(key.replace("__", "."), text) for key, text in overrides.items())
    try:
        config = load_config(None, grid=grid, overrides=pairs)
        prepare(config, world_size=config.grid.size, local_world_size=local_world_size)
    except UserError as error:
        return list(error.problems)
    return []


@pytest.mark.skipif(extension.cuda is not None, reason="the CUDA parts are built")
def test_fused_on_gpus_is_refused_in_the_words_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem is found without peers; "fused" is accepted if there is none."""
    bf16 = {"train__dtype": "bf16"}
    [problem] = on_gpus(monkeypatch, **bf16)
    assert problem == (
        "parallel.algorithm fused: it needs the CUDA parts of axonn_ext, which are not built; use "
        "auto, chunked or sequential"
    )
    with fused_kernels() as asked:
        assert on_gpus(monkeypatch, grid="x=2,y=4", **bf16) == []
        assert asked == [(torch.device("cuda", 0), torch.bfloat16, "any", 4)]
        # Two hosts of four ranks: x and y are inside a host, but z is not.
        assert on_gpus(monkeypatch, grid="x=2,y=2,data=2", local_world_size=4, **bf16) == []
        [problem] = on_gpus(monkeypatch, grid="x=2,y=2,z=2", local_world_size=4, **bf16)
        assert "all-reduces need GPUs that reach each other's memory" in problem
        assert asked[-1] == (torch.device("cuda", 0), torch.bfloat16, "any", 2)
    with fused_kernels("fused kernels exist from sm_80 on, and it is of sm_75"):
        [problem] = on_gpus(monkeypatch)
        assert problem.startswith("parallel.algorithm fused: fused kernels exist from sm_80 on")
        assert on_gpus(monkeypatch, parallel__algorithm="auto") == []


@pytest.mark.skipif(extension.cuda is not None, reason="the CUDA parts are built")
@pytest.mark.parametrize("option", [{"communicators": "own"}, {"max_ctas": "4"}])
def test_communicators_that_cannot_be_had_are_refused(
    monkeypatch: pytest.MonkeyPatch, option: dict[str, str]
) -> None:
    asked = {f"overlap__{key}": text for key, text in option.items()}
    others = {"parallel__algorithm": "auto", **asked}
    assert on_gpus(monkeypatch, overlap__mode="off", **others) == []
    [problem] = on_gpus(monkeypatch, overlap__mode="on", **others)
    assert problem.endswith("max_ctas: this build of axonn_ext has no CUDA parts")
    [problem] = on_gpus(monkeypatch, overlap__mode="on", train__device="cpu", **others)
    assert "max_ctas are for GPUs, and the device is cpu" in problem
    asked["overlap__communicators"] = "c10d"
    problems = on_gpus(monkeypatch, overlap__mode="on", parallel__algorithm="auto", **asked)
    refused = ["overlap.max_ctas=4 needs communicators 'own' or 'auto', got 'c10d'"]
    assert problems == (refused if "max_ctas" in option else [])


def test_job_measures_the_text_before_it_reads_it(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 1000)
    path = str(tmp_path / "short")
    text = refused(data__text=path)
    assert "held-out text (data.held_out) has 50 bytes" in text
    assert "needs 257" in text
    assert "training text has 100 bytes" in refused(data__text=path, data__held_out="0.9")
    assert "nothing does not exist" in refused(data__text=str(tmp_path / "nothing"))


def test_vocabulary_decides_the_model() -> None:
    job = prepare(load_config(None), world_size=1)
    assert job.model.vocab_size == 256
    padded = load_config(None, overrides=(Override("model.vocab_size", "384"),))
    assert prepare(padded, world_size=1).model.vocab_size == 384


def test_what_a_checkpoint_holds_says_nothing_if_nothing_has_changed() -> None:
    """This includes an earlier version, which wrote 0 for disabled keys, and had fewer keys."""
    now = as_json(Config())
    assert now["model"]["num_kv_heads"] == 0
    before = {table: dict(keys) for table, keys in now.items() if table != "lora"}
    for key in ("zero", "schedule", "warmup_fraction", "decay_fraction", "decay_type"):
        del before["optim"][key]
    assert list(differences(before, now)) == []
    before["model"]["num_kv_heads"] = 2
    before["train"]["steps"] += 1
    kv_heads, steps = differences(before, now)
    assert steps.endswith("now 200: the learning-rate schedule is computed for the new total")
    assert "model.num_kv_heads was 2 in the run that is continued, now 0" in kv_heads


@pytest.mark.parametrize(
    ("optim", "is_free"),
    [
        ({}, False),
        ({"final_lr_fraction": 1}, True),
        ({"schedule": "constant"}, True),
        ({"schedule": "wsd"}, False),
        ({"schedule": "constant", "warmup_fraction": 0.1}, False),
    ],
    ids=str,
)
def test_more_steps_change_what_follows_from_their_number(optim, is_free: bool) -> None:
    before, now = as_json(Config()), as_json(Config())
    now["train"] = now["train"] | {"steps": 1000}
    for config in (before, now):
        config["optim"] = config["optim"] | optim
    assert bool(list(differences(before, now))) != is_free
