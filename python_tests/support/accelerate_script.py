"""Accelerate's minimal training script; only the line that creates the Accelerator differs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader

from axonn_ext.train.integrations.accelerate import AxonnAccelerator
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
    options = {
        "cpu": not args.without_cpu,
        "gradient_accumulation_steps": args.accumulate,
        "mixed_precision": args.precision or "no",
        # Gives each epoch the same order on any number of processes.
        "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
    }
    if args.grid:
        accelerator = AxonnAccelerator(**sizes(args.grid), **options)
    else:
        accelerator = Accelerator(**options)
    set_seed(0)

    dtype = torch.float32 if args.precision else torch.float64
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    batch_size = GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(dataset(dtype), batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if args.load:
        accelerator.load_state(args.load)

    losses = []
    for _ in range(args.epochs):
        for step, (images, labels) in enumerate(loader):
            maybe_fail(accelerator.process_index, step, args.failing_rank)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.clip:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())

    accelerator.save_state(args.out / "state")
    accelerator.save_model(model, args.out / "model")
    if accelerator.is_main_process:
        write_results(args.out, losses, model)


if __name__ == "__main__":
    main()
