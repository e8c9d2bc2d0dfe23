"""Times fine-tuning steps against transformers with DDP and with FSDP2, on the same ranks.

    python tools/finetune_compare.py --out /tmp/compare --steps 1
    torchrun --nproc-per-node 4 tools/finetune_speed.py --model /tmp/compare/base \\
        --data /tmp/compare/data.jsonl --grid x=2,y=2 --grid data=4 --grid z=4

All systems use the same packed batches and fp32; DDP and FSDP2 use torch's fused AdamW. In each
round every system takes one step, in turn. The table shows the median of the rounds, the quartiles,
and the ratio to DDP. Needs transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from finetune_compare import loss_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import axonn_ext
from axonn_ext.data import PackedBatches, Prompts, RowGroup, load_examples, open_vocabulary
from axonn_ext.models import ParallelConfig
from axonn_ext.nn import Places
from axonn_ext.optim import AdamW
from axonn_ext.overlap import Orchestrator
from axonn_ext.spec.parallel import Overlap

Step = Callable[[int], float]
LR, LENGTH, BATCH, CLIP = 1e-4, 128, 8, 1.0


def batches_of(args: argparse.Namespace, group: RowGroup) -> PackedBatches:
    """Returns a row group's share of the batches."""
    vocabulary = open_vocabulary(f"{args.model}/tokenizer.json")
    prompts = Prompts(vocabulary, model=Path(args.model))
    examples = load_examples(args.data, prompts, sequence_length=LENGTH)
    return PackedBatches(examples.train, sequence_length=LENGTH, batch_size=BATCH, group=group)


def ours(args: argparse.Namespace, shape: str, overlap: bool) -> Step:
    """Returns a step of axonn_ext on a grid."""
    grid = axonn_ext.Grid(**axonn_ext.GridShape.parse(shape).as_dict())
    model = axonn_ext.from_pretrained(
        args.model, grid, ParallelConfig(), dtype=torch.float32, sequence_length=LENGTH
    )
    orchestrator = Orchestrator(model, Overlap()) if overlap else None
    optimizer = AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    num_z = grid.size("z")
    group = RowGroup(grid.coords["data"] * num_z + grid.coords["z"], grid.size("data") * num_z)
    batches = batches_of(args, group)

    def step(index: int) -> float:
        optimizer.zero_grad()
        batch = batches.micro_batch(index, 0)
        assert batch.documents is not None
        places = Places.packed(batch.documents)
        loss = model.loss(batch.token_ids, batch.labels, batches.num_labels(index), places)
        loss.backward()
        if orchestrator is None:
            axonn_ext.sync_gradients(model)
        else:
            orchestrator.sync_gradients()
            orchestrator.settle()
        axonn_ext.clip_grad_norm_(model, CLIP)
        optimizer.step()
        return loss.item()

    with axonn_ext.warm_up():
        batch = batches.micro_batch(0, 0)
        assert batch.documents is not None
        model.loss(batch.token_ids, batch.labels, 1.0, Places.packed(batch.documents)).backward()
    if orchestrator is not None:
        orchestrator.end_step()
    return step


def theirs(args: argparse.Namespace, how: str) -> Step:
    """Returns a step of transformers with DDP or FSDP2."""
    import transformers

    rank, size = dist.get_rank(), dist.get_world_size()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.train()
    if how == "DDP":
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0, fused=True)
    batches = batches_of(args, RowGroup(rank, size))

    def step(index: int) -> float:
        optimizer.zero_grad()
        batch = batches.micro_batch(index, 0)
        assert batch.documents is not None
        own = float((batch.labels != -100).sum())
        loss = loss_of(model, batch.token_ids, batch.labels, batch.documents)
        # DDP and FSDP2 average the gradients of the ranks, whose numbers of labels differ.
        loss = loss * own * size / batches.num_labels(index)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        total = loss.detach() / size
        dist.all_reduce(total)
        return total.item()

    return step


def main() -> int:
    """Times all systems, and prints the table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--grid", action="append", default=[])
    parser.add_argument("--overlap", action="store_true", help="also time each grid with overlap")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    systems: dict[str, Step] = {"DDP": theirs(args, "DDP"), "FSDP2": theirs(args, "FSDP2")}
    for shape in args.grid:
        systems[shape] = ours(args, shape, overlap=False)
        if args.overlap:
            systems[f"{shape}, overlap"] = ours(args, shape, overlap=True)
    for step in systems.values():
        step(1)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, float] = {}
    for index in range(2, 2 + args.rounds):
        for name, step in systems.items():
            dist.barrier()
            began = time.perf_counter()
            losses[name] = step(index)
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        report(seconds, losses)
    dist.destroy_process_group()
    return 0


def report(seconds: dict[str, list[float]], losses: dict[str, float]) -> None:
    """Prints each system's median, quartiles and ratio to DDP."""
    base = statistics.median(seconds["DDP"])
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(
            f"{name:<24} {middle:7.3f} s ({low:.3f} to {high:.3f})  {middle / base:5.2f} of DDP  "
            f"loss {losses[name]:.5f}"
        )


if __name__ == "__main__":
    sys.exit(main())
