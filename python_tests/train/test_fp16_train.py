"""Training in fp16: steps that overflow are skipped on all ranks, and the loss scale adapts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from axonn_ext.terminal.errors import TrainingError, UserError
from axonn_ext.train.metrics import RunMetrics, StepMetrics, read_metrics
from axonn_ext.train.plot import plot_loss
from commands import AXONN, run, small
from limits import HANG_SECONDS
from overflow_cases import expected_scales, random_overflows, train_with_overflows
from trained_here import train_here

pytestmark = pytest.mark.long

FP16 = {"train.dtype": "fp16"}
# Small enough that gradients of this model never overflow by themselves, which happens above 2**17.
SCALES: dict[str, Any] = {
    "train.initial_loss_scale": 2.0**12, "train.min_loss_scale": 2.0**8,
    "train.max_loss_scale": 2.0**14, "train.loss_scale_window": 5,
}  # fmt: skip
# A weight is its fp32 master rounded to fp16, and a loss is a mean over hundreds of tokens. So its
# error is far below fp16's 2**-11 = 5e-4 per step, and six steps of AdamW amplify it little.
LOSS_BOUND = 1e-3


def losses(folder: Path) -> list[float]:
    found = read_metrics(folder)
    return [m.loss for m in found.steps] + [m.eval_loss for m in found.evaluations]


def check_overflows(
    pool, folder: Path, grid: str, keys: dict[str, Any], *, steps: int, count: int, seed: int
) -> tuple[Any, Any]:  # fmt: skip
    """Trains with overflows and without; returns rank 0's observations of both."""
    keys = SCALES | {"train.steps": steps} | keys
    ranks = random_overflows(count=count, steps=steps, world_size=4, seed=seed)
    every = pool(4).run(
        train_with_overflows, folder / "a", grid, ranks, keys, timeout_s=6 * HANG_SECONDS
    )
    bounds = (SCALES["train.min_loss_scale"], SCALES["train.max_loss_scale"])
    want = expected_scales(
        ranks, steps=steps, first=SCALES["train.initial_loss_scale"],
        window=SCALES["train.loss_scale_window"], bounds=bounds,
    )  # fmt: skip
    for seen in every:
        assert seen.skipped == sorted(ranks)
        assert seen.scales == want
        assert seen.num_overflows == count
        assert seen.losses == every[0].losses
        assert list(seen.losses) == list(range(1, steps + 1))
    clean = pool(4).run(
        train_with_overflows, folder / "b", grid, {}, keys, timeout_s=6 * HANG_SECONDS
    )
    assert all(seen.skipped == [] for seen in clean)
    return every[0], clean[0]


GRIDS = [
    ("x=2,data=2", {}),
    ("x=2,z=2", {"overlap.mode": "on", "train.micro_batches": 2}),
    ("z=2,pipe=2", {"train.micro_batches": 4, "train.eval_batches": 8, "train.batch_size": 16}),
]


@pytest.mark.parametrize(
    ("grid", "keys"), [pytest.param(*GRIDS[0], marks=pytest.mark.slow), *GRIDS[1:]]
)
def test_all_ranks_skip_the_same_steps(pool, tmp_path, grid, keys) -> None:
    seen, clean = check_overflows(pool, tmp_path, grid, keys, steps=16, count=3, seed=1)
    first = min(seen.skipped)
    for step in range(1, first + 1):
        # Scales are powers of two, which cause no rounding.
        assert seen.losses[step] == clean.losses[step]
    assert seen.losses[first + 1] != clean.losses[first + 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "keys"),
    [*GRIDS[:2], ("z=2,pipe=2", GRIDS[2][1] | {"pipeline.schedule": "zero_bubble"}), GRIDS[2]],
)
def test_ten_overflows_in_two_hundred_steps_cost_little(pool, tmp_path, grid, keys) -> None:
    keys = keys | {"train.eval_interval": 20}
    seen, clean = check_overflows(pool, tmp_path, grid, keys, steps=200, count=10, seed=2)
    end, begin = clean.eval_losses[200], clean.eval_losses[0]
    assert end < 0.75 * begin, "it has learned something"
    # Ten updates are missing, so the run ends about where the other one was ten updates earlier.
    # There, the learning rate is near its minimum: the last 60 updates gain more than ten may lose.
    assert abs(seen.eval_losses[200] - end) < clean.eval_losses[140] - end


def test_learns_what_fp32_learns(tmp_path) -> None:
    for family in ("gpt2", "llama"):
        for implementation in ("axonn", "plain"):
            for dtype in ("fp32", "fp16"):
                train_here(
                    tmp_path / family / implementation / dtype,
                    **{"train.dtype": dtype, "model.family": family,
                       "model.implementation": implementation},
                )  # fmt: skip
            wide, low = (losses(tmp_path / family / implementation / d) for d in ("fp32", "fp16"))
            assert max(abs(a / b - 1) for a, b in zip(low, wide, strict=True)) < LOSS_BOUND
            assert low != wide


def test_accumulation_recomputation_and_overlap(tmp_path) -> None:
    options = FP16 | {"train.batch_size": 16}
    train_here(tmp_path / "one", **options)
    more = {"train.micro_batches": 4, "parallel.recompute": "full", "overlap.mode": "on",
            "train.eval_batches": 8}  # fmt: skip
    train_here(tmp_path / "more", **options, **more)
    for a, b in zip(
        read_metrics(tmp_path / "one").steps, read_metrics(tmp_path / "more").steps, strict=True
    ):
        assert abs(a.loss / b.loss - 1) < LOSS_BOUND


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_scale_at_first_overflow_and_what_is_shown(tmp_path, capsys, dtype) -> None:
    """They are shown only for fp16."""
    train_here(
        tmp_path / "run",
        **{"train.dtype": dtype, "train.initial_loss_scale": 2.0**22, "train.steps": 10,
           "train.max_loss_scale": 2.0**22},
    )  # fmt: skip
    out, steps = capsys.readouterr().out, read_metrics(tmp_path / "run").steps
    assert [m.step for m in steps] == list(range(1, 11))
    if dtype == "bf16":
        assert {(m.loss_scale, m.skipped_steps) for m in steps} == {(1.0, 0)}
        assert "loss scale" not in out
        return
    skipped = {m.step: 0 for m in steps if m.grad_norm is None}
    assert 2 <= len(skipped) <= 8, "gradients overflow above 2**17 or so"
    assert [m.loss_scale for m in steps] == expected_scales(
        skipped, steps=10, first=2.0**22, window=200, bounds=(2.0**10, 2.0**22)
    )
    assert [m.skipped_steps for m in steps] == [
        sum(step <= m.step for step in skipped) for m in steps
    ]
    assert all(m.grad_norm is None or 0.1 < m.grad_norm < 10 for m in steps), "unscaled"
    for m in steps:
        told = (
            f"skipped step {m.step}: gradients overflowed fp16 with loss scale {m.loss_scale:g}, "
            f"which is {m.loss_scale / 2:g} now"
        )
        assert (told in out) is (m.step in skipped)
    assert "loss scale  skipped" in out
    assert "  overflow  " in out
    assert "4,194,304        1" in out
    assert f"steps whose gradients overflowed fp16: {len(skipped)}; the loss scale is" in out
    assert (tmp_path / "run" / "loss.png").is_file()


def test_an_overflow_at_the_least_scale_ends_the_run(tmp_path) -> None:
    scales = {"train.initial_loss_scale": 2.0**24, "train.min_loss_scale": 2.0**23}
    with pytest.raises(TrainingError) as raised:
        train_here(tmp_path / "run", **FP16, **scales)
    text = str(raised.value)
    assert text.startswith("step 2: loss 5."), text
    assert "not finite in the gradient of " in text
    assert "; try a lower train.min_loss_scale (now 8.38861e+06), train.dtype = " in text
    (first,) = read_metrics(tmp_path / "run").steps
    assert (first.grad_norm, first.loss_scale) == (None, 2.0**24)


def test_on_nonfinite_skips_at_the_least_scale_too(tmp_path, capsys) -> None:
    scales = {"train.initial_loss_scale": 2.0**24, "train.min_loss_scale": 2.0**23}
    train_here(tmp_path / "run", **FP16, **scales, **{"train.on_nonfinite": "skip"})
    out = capsys.readouterr().out
    assert out.count("skipped step ") == 6
    assert "skipped steps, whose loss or gradient was not finite: 5" in out


def test_scales_that_do_not_fit_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"train\.initial_loss_scale: expected 0 < min_loss_scale"):
        train_here(tmp_path / "run", **FP16, **{"train.initial_loss_scale": 4.0})
    train_here(tmp_path / "bf16", **{"train.dtype": "bf16", "train.initial_loss_scale": 4.0})


# --- Checkpoints ----------------------------------------------------------------------------------

# The scale starts so high that the first steps overflow, and then rises every three steps.
SAVES = FP16 | {
    "checkpoint.interval": 2, "optim.final_lr_fraction": 1, "train.initial_loss_scale": 2.0**19,
    "train.loss_scale_window": 3, "train.steps": 14, "train.micro_batches": 2,
    "parallel.algorithm": "sequential", "checkpoint.keep_last": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run in fp16."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_here(folder, **SAVES)
    return folder


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_run_in_another_dtype_goes_on(tmp_path, whole, dtype, capsys) -> None:
    source = whole / "checkpoints" / "step-00000008"
    options = SAVES | {"train.dtype": dtype, "checkpoint.resume": source}
    train_here(tmp_path / "run", **options)
    assert f"train.dtype was 'fp16' in the run that is continued, now '{dtype}'" in (
        capsys.readouterr().out
    )
    # Masters are always in fp32, so only the arithmetic of a step differs: 2**-8 in bf16.
    first, want = read_metrics(tmp_path / "run").steps[0], read_metrics(whole).steps[8]
    assert first.step == want.step == 9
    assert abs(first.loss / want.loss - 1) < 2**-8


def test_a_checkpoint_in_bf16_is_continued_in_fp16(tmp_path) -> None:
    options = SAVES | {"train.dtype": "bf16", "train.steps": 4}
    train_here(tmp_path / "run", **options)
    options |= FP16 | {"train.steps": 6, "checkpoint.resume": tmp_path / "run"}
    steps = train_here(tmp_path / "more", **options).steps
    assert [m.step for m in steps] == [5, 6]
    assert steps[0].loss_scale == 2.0**19, "a scale of its own"


# --- The command ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["pipe=2,x=2", "z=2,data=2", "x=2,y=2"])
def test_the_command_learns_on_a_grid_what_one_process_learns(tmp_path, grid) -> None:
    parts = {"train.micro_batches": 2, "train.eval_batches": 8, "model.num_layers": 4}
    train_here(tmp_path / "one", **FP16, **parts)
    command = [*AXONN, "train", "--grid", grid, "--out", str(tmp_path / "run")]
    done = run([*command, *small(**FP16, **parts)])
    assert done.status == 0, done.output
    low, one = losses(tmp_path / "run"), losses(tmp_path / "one")
    assert max(abs(a / b - 1) for a, b in zip(low, one, strict=True)) < LOSS_BOUND
    assert "loss scale  skipped" in done.output


def test_metrics_of_earlier_versions_are_read(tmp_path) -> None:
    line = {"step": 1, "loss": 5.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 256,
            "tokens_per_s": 10.0, "tflops": 0.1, "memory_bytes": 1 << 30, "eta_s": 0.0}  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (step,) = read_metrics(tmp_path).steps
    assert (step.loss_scale, step.skipped_steps) == (1.0, 0)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | {"loss": None}) + "\n")
    with pytest.raises(UserError, match="loss: expected a number, got null"):
        read_metrics(tmp_path)


def test_the_picture_has_the_loss_scale(tmp_path) -> None:
    steps = [
        StepMetrics(n, 5.0 - n / 9, None if n == 2 else 1.0, 1e-3, 9 * n, 1.0, 0.1, 1, 0.0, 2.0**n)
        for n in range(1, 9)
    ]
    plot_loss(RunMetrics(steps), tmp_path / "scale.png", title="a", subtitle="b")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")
