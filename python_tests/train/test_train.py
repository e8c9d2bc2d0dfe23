"""Training runs: a grid learns the same as one plain process, and writes the promised files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from axonn_ext.models import ModelConfig
from axonn_ext.models.plain import PlainTransformer
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.family import FAMILIES, find_family
from axonn_ext.terminal.errors import TrainingError, UserError
from axonn_ext.train.compare import Pair, compare
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.metrics import RunMetrics, StepMetrics, read_metrics
from axonn_ext.train.plot import plot_loss, smoothed
from axonn_ext.train.run_folder import check_folder
from axonn_ext.train.worker import run_worker
from commands import AXONN, SMALL, run, small, torchrun
from trained_here import train_here

pytestmark = pytest.mark.long

PNG = b"\x89PNG\r\n\x1a\n"
STEP_KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tflops", "memory_bytes", "eta_s",
    "loss_scale", "skipped_steps", "dropped", "hardware_tflops", "peak_fraction",
    "whole_peak_fraction", "memory_fraction",
}  # fmt: skip


def losses(run_metrics: RunMetrics) -> list[float]:
    return [m.loss for m in run_metrics.steps] + [m.eval_loss for m in run_metrics.evaluations]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the GPT-2 model in plain torch.nn, in one process."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train_here(folder, model__implementation="plain")
    return folder


def test_grid_in_processes_of_its_own_learns_what_plain_learns(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = run([*AXONN, "train", "--grid", "x=2,y=2", "--out", str(folder), *small()])
    assert done.status == 0, done.output
    comparison = compare(folder, plain)
    assert len(comparison.pairs) == 6
    # fp32 sums in a different order: 1e-7 per step, and 6 steps are too few for it to grow.
    assert comparison.worst.difference < 1e-5
    assert [pair.step for pair in comparison.evaluations] == [0, 3, 6]
    assert all(pair.difference < 1e-5 for pair in comparison.evaluations)
    assert done.output.count("4 processes") == 1, "only rank 0 shows progress"
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_torchrun_with_z_data_recompute_and_llama(tmp_path: Path) -> None:
    options = {
        "model.family": "llama", "model.num_kv_heads": 2, "model.tie_embeddings": False,
        "train.micro_batches": 2,
    }  # fmt: skip
    reference = train_here(tmp_path / "plain", **options, **{"model.implementation": "plain"})
    folder = tmp_path / "grid"
    parallel = {"parallel.recompute": "full", "parallel.layout": "replicated"}
    done = run(
        [*torchrun(4), "train", "--grid=z=2,data=2", "--out", str(folder),
         *small(**options, **parallel)]
    )  # fmt: skip
    assert done.status == 0, done.output
    torch.testing.assert_close(losses(read_metrics(folder)), losses(reference), rtol=1e-5, atol=0)


def test_files_of_a_run(plain: Path) -> None:
    lines = [json.loads(line) for line in (plain / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert len(lines) == len(steps) + len(evaluations)
    assert all(set(line) == STEP_KEYS for line in steps)
    assert all(set(line) == {"step", "tokens", "eval_loss"} for line in evaluations)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in steps] == [256 * step for step in range(1, 7)]
    assert steps[0]["loss"] == pytest.approx(math.log(256), rel=0.02)
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]
    assert steps[-1]["eta_s"] == 0
    assert all(line["tflops"] > 0 and line["memory_bytes"] > 1e8 for line in steps)
    assert (plain / "loss.png").read_bytes().startswith(PNG)
    assert load_config(plain / "config.toml").model.implementation == "plain"


def test_metrics_are_consistent(plain: Path) -> None:
    flops = ModelConfig(
        vocab_size=256, hidden_size=32, num_layers=2, num_heads=4, sequence_length=32
    ).flops_per_token()
    for m in read_metrics(plain).steps:
        assert m.tflops == pytest.approx(m.tokens_per_s * flops / 1e12)
        assert m.hardware_tflops == m.tflops  # plain models recompute nothing
        assert m.peak_fraction is m.whole_peak_fraction is None


def test_run_repeats_exactly(plain: Path, tmp_path: Path) -> None:
    again = train_here(tmp_path / "again", model__implementation="plain")
    other = train_here(tmp_path / "other", model__implementation="plain", train__seed=1)
    assert losses(again) == losses(read_metrics(plain))
    assert losses(other) != losses(again)


@pytest.mark.parametrize(
    "options",
    [
        {"train.micro_batches": 4},
        {"train.micro_batches": 2, "parallel.recompute": "full"},
        {"parallel.algorithm": "sequential", "parallel.save_gathered": True},
    ],
    ids=str,
)
def test_options_change_no_loss(plain: Path, tmp_path: Path, options: dict[str, object]) -> None:
    # The same number of sequences in an evaluation for any micro-batch.
    batches = 2 * int(str(options.get("train.micro_batches", 1)))
    got = train_here(tmp_path / "run", **options, train__eval_batches=batches)
    torch.testing.assert_close(losses(got), losses(read_metrics(plain)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("implementation", ["axonn", "plain"])
def test_bf16_follows_fp32(plain: Path, tmp_path: Path, implementation: str) -> None:
    got = train_here(tmp_path / "run", train__dtype="bf16", model__implementation=implementation)
    # bf16 rounds by 2**-9 in several layers; a loss is a mean over 256 tokens.
    torch.testing.assert_close(losses(got), losses(read_metrics(plain)), rtol=1e-2, atol=0)
    assert losses(got) != losses(read_metrics(plain))


def test_no_evaluation_when_none_is_asked_for(tmp_path: Path) -> None:
    got = train_here(tmp_path / "run", train__eval_interval=0, data__held_out=0.0, train__steps=2)
    assert (len(got.steps), got.evaluations) == (2, [])


def test_divergence_ends_the_run_with_its_numbers(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"step \d: loss nan.*lower optim.lr \(now 1e\+20\)"):
        train_here(tmp_path / "run", optim__lr=1e20, optim__clip_norm=0, optim__warmup_steps=0)
    assert read_metrics(tmp_path / "run").steps, "what was measured before stays"


def test_folder_with_files_needs_overwrite(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--overwrite"):
        check_folder(plain, overwrite=False)
    check_folder(plain, overwrite=True)
    check_folder(tmp_path, overwrite=False)
    text = "expected a new or empty folder, or a run with checkpoints, to resume from, got a run"
    with pytest.raises(UserError, match=f"{text} without any checkpoint; use another name"):
        check_folder(plain, overwrite=False, resumes=True)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="expected a folder, got a file"):
        check_folder(tmp_path / "file", overwrite=True)


def test_overwrite_leaves_what_is_not_a_run(tmp_path: Path) -> None:
    for name in ("notes.txt", "metrics.jsonl", "compare.png"):
        (tmp_path / name).write_text("old")
    pairs = tuple(Override(key, str(value)) for key, value in SMALL.items())
    run_worker(load_config(None, overrides=pairs), Process(), folder=tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "old"
    assert not (tmp_path / "compare.png").exists()
    assert len(read_metrics(tmp_path).steps) == 6


def test_picture_of_one_step_without_evaluation(tmp_path: Path) -> None:
    step = StepMetrics(1, 5.0, 1.0, 1e-3, 256, 10.0, 0.1, 1 << 30, 0.0)
    plot_loss(RunMetrics([step]), tmp_path / "loss.png", title="one", subtitle="step")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_a_disk_that_is_full_as_the_profile_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axonn_ext.train.first_rank.PROFILE_FILE", "/dev/full")
    with pytest.raises(TrainingError, match="--out: cannot write /dev/full: No space left"):
        train_here(tmp_path / "run", profile=True)


def test_smoothing() -> None:
    assert smoothed([3.0] * 50) == [3.0] * 50
    assert smoothed([5.0, 1.0, 1.0, 1.0], span=0.5)[0] == 5.0  # the first value is kept
    assert smoothed([0.0, 3.0, 6.0], span=0.5) == [0.0, 3.0, 4.5]


def test_difference_of_a_pair() -> None:
    assert Pair(1, 1, 2.0, 2.0).difference == 0
    assert Pair(1, 1, 1.0, 2.0).difference == 0.5
    assert Pair(1, 1, math.nan, 2.0).difference == math.inf
    assert Pair(1, 1, 1.0, 0.0).difference == 1.0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_plain_model_is_causal_and_its_loss_a_mean(family: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        family=family, vocab_size=64, hidden_size=32, num_layers=2, num_heads=4,
        num_kv_heads=2 if family == "llama" else None, sequence_length=12,
    )  # fmt: skip
    model = PlainTransformer(config)
    token_ids = torch.randint(64, (3, 12))
    changed = token_ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 64
    torch.testing.assert_close(model(token_ids)[:, :7], model(changed)[:, :7])
    assert not torch.equal(model(token_ids)[:, 7:], model(changed)[:, 7:])
    labels = torch.randint(64, (3, 12))
    labels[0, :5] = -100
    expected = F.cross_entropy(model(token_ids).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model.loss(token_ids, labels), expected)
    torch.testing.assert_close(model.loss(token_ids, labels, 62.0), expected * 31 / 62)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters()


@pytest.mark.slow
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_plain_model_is_hugging_faces(name: str, tie: bool) -> None:
    """transformers builds its model from the config.json that the family writes."""
    import transformers  # `make test-slow` installs it

    torch.manual_seed(0)
    family = find_family(name)
    config = ModelConfig(
        family=name, vocab_size=256, hidden_size=64, num_layers=2, num_heads=4,
        num_kv_heads=2 if family.grouped_query else None, sequence_length=32, tie_embeddings=tie,
        intermediate_size=96, window=8 if family.hugging_face.window_key else None,
    )  # fmt: skip
    values = family.hugging_face.config_json(config) | {"pad_token_id": None}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    )
    ours = PlainTransformer(config)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    head = family.hugging_face.names.head
    state = {name.replace(head, "lm_head"): t for name, t in ours.state_dict().items()}
    theirs.load_state_dict(state, strict=True)
    token_ids = torch.randint(256, (3, 32))
    torch.testing.assert_close(ours(token_ids), theirs.eval()(token_ids).logits)
