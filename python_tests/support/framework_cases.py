"""A model, data and a plain training loop, to compare the frameworks' scripts with.

The scripts are in this folder, so that they can import this file from any working directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from commands import Finished, run

GLOBAL_BATCH, STEPS, EPOCHS, CLASSES = 16, 5, 2, 10
LR, MAX_NORM = 0.1, 0.5  # for SGD, whose steps are proportional to the gradients
SUPPORT = Path(__file__).parent


class Net(nn.Module):
    """Like the examples of both packages: a convolution and Linears, one of them plain for x=4.

    The buffer counts forward passes, like a BatchNorm's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.first = nn.Linear(4 * 6 * 6, 32)
        self.norm = nn.LayerNorm(32)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(32, CLASSES)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.num_calls += 1
        hidden = F.relu(self.conv(images)).flatten(1)
        return self.head(self.dropout(self.norm(F.gelu(self.first(hidden)))))


def dataset(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(GLOBAL_BATCH * STEPS, 1, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (len(images),), generator=generator)
    return TensorDataset(images.to(dtype), labels)


def plain_losses(
    orders: Sequence[Sequence[int]], *, accumulate: int = 1, clip: bool = False
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    """Trains in one process without a framework. orders: the order of samples in each epoch."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    images, labels = dataset().tensors
    losses = []
    for order in orders:
        for step in range(STEPS):
            batch = list(order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            (loss / accumulate).backward()
            losses.append(loss.item())
            if (step + 1) % accumulate == 0 or step + 1 == STEPS:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
    return losses, model, optimizer


def arguments() -> argparse.Namespace:
    """The scripts' arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a folder for losses and states")
    parser.add_argument("--grid", default="", help="like x=2,y=2; empty: the package's own way")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--precision", default="")
    parser.add_argument("--load", type=Path, help="what another run has saved")
    parser.add_argument("--without-cpu", action="store_true", help="lets Accelerate look for GPUs")
    parser.add_argument("--failing-rank", type=int, default=-1, help="raises in its third step")
    return parser.parse_args()


def sizes(grid: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (item.split("=") for item in grid.split(","))}


def maybe_fail(rank: int, step: int, failing_rank: int) -> None:
    if rank == failing_rank and step == 2:
        raise RuntimeError("a mistake of the script")


def write_results(out: Path, losses: Sequence[float], model: nn.Module) -> None:
    """Writes the losses, and the number of parameter elements that a rank holds."""
    held = sum(p.numel() for p in model.parameters())
    (out / "results.json").write_text(json.dumps({"losses": list(losses), "held": held}))


def read_results(out: Path, grid: str) -> list[float]:
    """The losses. Asserts that a rank held only its own blocks."""
    results = json.loads((out / "results.json").read_text())
    assert results["held"] == elements_held(**({"x": 1} | (sizes(grid) if grid else {})))
    return list(results["losses"])


def elements_held(x: int, y: int = 1, z: int = 1, data: int = 1) -> int:
    """Elements a rank holds: 1 / (x y z) of a weight, 1 / x of a bias, all of plain modules."""
    others = 4 * 9 + 4 + 2 * 32
    first = 32 * 4 * 36 // (x * y * z) + 32 // x
    is_4d = CLASSES % (x * z) == 0
    head = CLASSES * 32 // (x * y * z) + CLASSES // x if is_4d else CLASSES * 32 + CLASSES
    return others + first + head


def start_script(name: str, num_processes: int, out: Path, *options: str) -> Finished:
    """Runs a script under torchrun, or as a plain command if num_processes is 0."""
    launcher = [
        "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        f"--nproc-per-node={num_processes}",
    ]  # fmt: skip
    script = [str(SUPPORT / name), f"--out={out}", *options]
    command = [sys.executable, *(launcher if num_processes else []), *script]
    return run(command)


def largest_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    assert len(found) == len(expected), (found, expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
