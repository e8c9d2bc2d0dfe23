"""Fabric's minimal training script; only the strategy and its sizes differ between runs."""

from __future__ import annotations

import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from axonn_ext.train.integrations.fabric import AxonnStrategy
from framework_cases import (
    GLOBAL_BATCH,
    LR,
    MAX_NORM,
    Net,
    arguments,
    dataset,
    maybe_fail,
    sizes,
    write_results,
)


def main() -> None:
    args = arguments()
    strategy = AxonnStrategy(**sizes(args.grid)) if args.grid else "ddp"
    fabric = lightning.Fabric(
        accelerator="cpu", devices=args.devices, strategy=strategy,
        precision=args.precision or "64-true",
    )  # fmt: skip
    fabric.launch()
    fabric.seed_everything(0)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    data = dataset(torch.float32 if args.precision else torch.float64)
    batch_size = GLOBAL_BATCH // fabric.world_size
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=batch_size, shuffle=True))
    if args.load:
        fabric.load(args.load, {"model": model, "optimizer": optimizer})

    losses = []
    for _ in range(args.epochs):
        for step, (images, labels) in enumerate(loader):
            maybe_fail(fabric.global_rank, step, args.failing_rank)
            accumulates = (step + 1) % args.accumulate != 0 and step + 1 < len(loader)
            with fabric.no_backward_sync(model, enabled=accumulates):
                loss = F.cross_entropy(model(images), labels)
                fabric.backward(loss / args.accumulate)
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            if not accumulates:
                if args.clip:
                    fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    fabric.save(args.out / "state.ckpt", {"model": model, "optimizer": optimizer})
    if fabric.is_global_zero:
        write_results(args.out, losses, model)


if __name__ == "__main__":
    main()
