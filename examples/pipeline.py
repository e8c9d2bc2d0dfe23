"""Trains a list of modules on as many pipeline stages as there are processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import axonn_ext
from axonn_ext.pipeline import Pipeline


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


dist.init_process_group("gloo")
grid = axonn_ext.Grid(pipe=dist.get_world_size())
layers = [Block] * 8  # each rank makes those of its own stage
with Pipeline(layers, grid, loss=F.mse_loss) as pipeline:
    optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=1e-2)
    for step in range(3):
        inputs = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(step))
        loss = pipeline.step([(x, -x) for x in inputs])  # eight micro-batches
        pipeline.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if grid.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
