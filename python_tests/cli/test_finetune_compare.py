"""The losses of fine-tuning, compared with those of transformers and PEFT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import ROOT, environment
from limits import HANG_SECONDS

pytestmark = pytest.mark.slow
SMALL = ("--steps", "8", "--hidden", "64", "--layers", "2", "--vocabulary", "512")


@pytest.mark.parametrize("grid", ["x=2,y=2", "y=2,z=2", "z=2,data=2"])
@pytest.mark.parametrize("lora", [0, 4])
def test_losses_are_those_of_transformers(lora: int, grid: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "finetune_compare.py"), *SMALL]
    command += ["--out", str(tmp_path), "--grid", grid, "--lora", str(lora), "--examples", "200"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=6 * HANG_SECONDS,
        cwd=ROOT,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    for ours, theirs in zip(losses["axonn_ext"], losses["transformers"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)  # fp32 sums in different orders
    assert losses["axonn_ext"][0] != losses["axonn_ext"][-1]
