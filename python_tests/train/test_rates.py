"""What a run reports of its speed and memory, also as a share of the machine's."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from axonn_ext.planner import load_machine
from axonn_ext.spec.flops import hardware_flops_per_token
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.recompute import recomputation_of
from axonn_ext.spec.stages import Stages
from axonn_ext.terminal.console import Console
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.config_file import Override, load_config
from axonn_ext.train.metrics import StepMetrics
from axonn_ext.train.rates import peak_flops_of
from axonn_ext.train.terminal import Terminal
from axonn_ext.train.trainer import memory_fraction
from trained_here import train_here

MODEL = ModelConfig(1024, 64, 7, 4, 128)


def products(model: ModelConfig) -> int:
    """Operations per token in forward: two per element of the matrices of one block."""
    return 2 * sum(w.n * w.k for w in model.block_linears)


def test_all_of_attention_is_twice_its_causal_half() -> None:
    s, h = MODEL.sequence_length, MODEL.hidden_size
    scores = 2 * 2 * s * h  # q k^T and p v of a token with all s tokens
    head = 6 * 1024 * h
    half = 7 * 3 * (products(MODEL) + scores // 2) + head
    assert MODEL.flops_per_token() == half
    assert MODEL.flops_per_token(whole_attention=True) == half + 7 * 3 * scores // 2


def test_the_count_with_all_of_attention_is_megatrons() -> None:
    """arXiv:2104.04473, equation 3, with 72 instead of 96 for a step without recomputation."""
    model = ModelConfig(51200, 4096, 36, 32, 2048)
    s, h, layers, vocab = 2048, 4096, 36, 51200
    megatron = 72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert model.flops_per_token(whole_attention=True) == pytest.approx(megatron, rel=1e-12)


@pytest.mark.parametrize(
    ("policy", "pipe", "blocks"),
    # there are 7 blocks; two stages have 4 and 3, or 3 and 4, and each recomputes among its own
    [("none", 1, 0), ("full", 1, 7), ("every:2", 1, 4), ("every:2", 2, 4), ("every:4", 2, 2)],
)
def test_hardware_flops_have_the_forward_passes_that_run_again(
    policy: str, pipe: int, blocks: int
) -> None:
    stages = Stages.of_sizes([4, 3] if pipe == 2 else [7], pipe)
    again = hardware_flops_per_token(MODEL, recomputation_of(policy), stages)
    attention = 2 * MODEL.sequence_length * MODEL.hidden_size
    assert again - MODEL.flops_per_token() == blocks * (products(MODEL) + attention)
    of_attention = hardware_flops_per_token(MODEL, recomputation_of("attention"), stages)
    assert of_attention - MODEL.flops_per_token() == 7 * attention


def test_a_run_prints_its_part_of_the_peak(tmp_path: Path, capsys) -> None:
    options = {"train.machine": "host", "parallel.recompute": "full", "train.steps": 2}
    steps = train_here(tmp_path / "run", **options).steps
    out = capsys.readouterr().out
    assert "hardware" in out and "% of peak" in out and "all attn." in out
    model = ModelConfig(256, 32, 2, 4, 32)
    half, whole = model.flops_per_token(), model.flops_per_token(whole_attention=True)
    peak = load_machine("host").peak_flops["fp32"]
    config = load_config(None, overrides=(Override("train.machine", "host"),))
    assert peak_flops_of(config, 3) == 3 * peak
    for m in steps:
        assert m.peak_fraction == pytest.approx(m.tokens_per_s * half / peak)
        assert m.whole_peak_fraction == pytest.approx(m.tokens_per_s * whole / peak)
        assert m.hardware_tflops == pytest.approx(
            m.tflops * (half + 2 * model.block_flops_per_token() / 3) / half
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train__machine": "hots"}, "train.machine: unknown machine 'hots' (did you mean host?)"),
        ({"train__machine": "{tmp}/fp32.toml", "train__dtype": "bf16"},
         "train.machine: expected one with a peak for train.dtype bf16"),
    ],
)  # fmt: skip
def test_a_machine_that_does_not_say_the_peak_is_refused(
    tmp_path: Path, keys: dict[str, str], message: str
) -> None:
    (tmp_path / "fp32.toml").write_text(
        'description = "a"\nsource = "a"\nmemory_bytes = 9e9\nmemory_bytes_per_s = 1e9\n'
        "[peak_flops]\nfp32 = 1e9\n[matmul]\nmax_efficiency = { fp32 = 1 }\n"
        '[attention]\nfp32 = 1e9\n[[levels]]\nname = "host"\nbytes_per_s = 1e9\nlatency_s = 1e-5\n'
    )
    keys = {key: value.replace("{tmp}", str(tmp_path)) for key, value in keys.items()}
    with pytest.raises(UserError) as error:
        train_here(tmp_path / "run", **keys)
    assert message in str(error.value)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_line_has_the_time_and_the_share_of_the_gpu(capsys, on_gpu: bool) -> None:
    terminal = Terminal(Console(), num_steps=20, on_gpu=on_gpu)
    terminal.step(
        StepMetrics(1, 5.0, 1.0, 1e-3, 256, 10.0, 0.1, 1 << 30, 3.0, memory_fraction=0.42)
    )
    terminal.close()
    titles, row = capsys.readouterr().out.splitlines()
    end = r" +42 %" if on_gpu else ""
    assert titles.split()[-4 if on_gpu else -2 :] == ["left", "at", *["of", "GPU"] * on_gpu]
    assert re.search(rf" 1,024 MB +3s +\d\d:\d\d:\d\d{end}$", row)


def test_the_share_of_the_gpu_is_that_of_the_peak(monkeypatch) -> None:
    assert torch.cuda.is_initialized() or memory_fraction() is None
    for name, value in (
        ("is_initialized", True), ("current_device", 0), ("max_memory_allocated", 50),
        ("get_device_properties", SimpleNamespace(total_memory=200)),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert memory_fraction() == 0.25
