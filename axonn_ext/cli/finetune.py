"""`axonn-ext finetune`: fine-tunes a Hugging Face model; `axonn-ext train` with other defaults."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_ext.cli import train
from axonn_ext.data import RowGroup, find_sources
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.model_files import read_config
from axonn_ext.spec.stream import PREFIX
from axonn_ext.terminal.arguments import new_parser, number, whole
from axonn_ext.terminal.errors import UserError
from axonn_ext.train.batches import packed_batches
from axonn_ext.train.config import AUTO, EXAMPLES
from axonn_ext.train.config_file import Override, all_keys, load_config
from axonn_ext.train.corpora import examples_of, text_and_model

USUAL_LENGTH = 1024  # of sequences, in tokens
# The usual differences between fine-tuning and training from scratch.
DEFAULTS = {
    "data.order": EXAMPLES,
    "optim.lr": "2e-5",
    "optim.weight_decay": "0",
    "optim.warmup_steps": "10",
    "train.batch_size": "8",
}
LORA_LR = "2e-4"
DESCRIPTION = """\
Fine-tunes a Hugging Face model on a grid of processes, fully or with LoRA, and writes the result
for transformers or PEFT. Each line of a .jsonl file is an example:
  {"prompt": ..., "completion": ...}    only the completion is learned
  {"messages": [...]}                   a chat, in the model's template; only the assistant's turns
                                        are learned
  {"text": ...}                         all of it is learned
Any other file is one text. Examples are packed into sequences, and no token attends to another
example."""

EPILOG = """\
examples:
  axonn-ext finetune --model llama-3-8b --data answers.jsonl --grid x=4,z=2
  axonn-ext finetune --model my-model --data notes/ --lora 16 --lora-targets q_proj,v_proj
  torchrun --nproc-per-node 8 -m axonn_ext finetune --model my-model --data a.jsonl --grid z=8
  axonn-ext finetune --model my-model --data a.jsonl --train.dtype bf16 --parallel.recompute full

Any key of `axonn-ext train --help` can be set with --TABLE.KEY VALUE. The run's folder gets
metrics.jsonl, config.toml, loss.png, and the folder model, or with --lora the folder adapter.
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(
        commands, "finetune", run, keys=all_keys, description=DESCRIPTION, epilog=EPILOG,
        usage="axonn-ext finetune --model FOLDER --data FILE|FOLDER [OPTION ...]",
    )  # fmt: skip
    parser.add_argument(
        "--model", required=True, metavar="FOLDER",
        help="Hugging Face folder with config.json and safetensors files",
    )  # fmt: skip
    parser.add_argument(
        "--data", required=True, metavar="FILE|FOLDER",
        help=".jsonl file of examples, text or token file, or folder of such files",
    )  # fmt: skip
    parser.add_argument(
        "--grid", default="x=1", metavar="SHAPE",
        help="grid of processes, such as x=2,y=2,z=1,data=1, or auto, the planner's fastest grid "
        "for --nproc N (default: %(default)s)",
    )  # fmt: skip
    train.add_nproc(parser)
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs",
        type=whole(),
        metavar="N",
        help="number of passes over all examples (default: 3)",
    )
    length.add_argument(
        "--steps",
        type=whole(),
        metavar="N",
        help="number of optimizer steps (default: from --epochs)",
    )
    parser.add_argument(
        "--batch-size", type=whole(), metavar="N",
        help=f"sequences per optimizer step, over all processes (default: "
        f"{DEFAULTS['train.batch_size']})",
    )  # fmt: skip
    parser.add_argument(
        "--sequence-length", type=whole(2), metavar="N",
        help=f"tokens per sequence (default: {USUAL_LENGTH}, or the model's limit if it is lower)",
    )  # fmt: skip
    parser.add_argument(
        "--lr", type=number(above=0), metavar="LR",
        help=f"peak learning rate (default: {DEFAULTS['optim.lr']}, with --lora {LORA_LR})",
    )  # fmt: skip
    parser.add_argument(
        "--lora", type=whole(), metavar="RANK",
        help="train only low-rank adapters of this rank (default: train all parameters)",
    )  # fmt: skip
    parser.add_argument(
        "--lora-alpha", type=number(above=0), metavar="A",
        help="numerator of the LoRA scale A / RANK (default: twice the rank)",
    )  # fmt: skip
    parser.add_argument(
        "--lora-targets", metavar="NAMES",
        help="Linears that get adapters, such as q_proj,v_proj (default: all-linear)",
    )  # fmt: skip
    train.add_folder_options(parser, "finetune")


def run(args: argparse.Namespace, extra: Sequence[str]) -> int:
    """Runs the command. Raises UserError for missing or inconsistent arguments."""
    if args.resume == AUTO and args.out is None:
        raise UserError("--resume auto goes on with the run in --out FOLDER: name that folder")
    given = train.parse_overrides(extra, "finetune")
    overrides = _overrides(args) + given
    note = ""
    if not any(override.key == "train.steps" for override in overrides):
        steps, note = _steps(args, overrides)
        overrides += (Override("train.steps", str(steps)),)
    elif args.epochs is not None:
        raise UserError("--epochs and train.steps: give one of them")
    if not any(override.key == "optim.warmup_steps" for override in given):
        steps = load_config(None, overrides=overrides).train.steps
        warmup = min(int(DEFAULTS["optim.warmup_steps"]), steps // 10)
        overrides += (Override("optim.warmup_steps", str(warmup)),)
    here = argparse.Namespace(
        config=None, grid=args.grid, machine=None, nproc=args.nproc, resume=args.resume,
        out=args.out or Path("runs") / f"finetune-{time.strftime('%Y%m%d-%H%M%S')}",
        overwrite=args.overwrite, profile=False, print_config=False, rank_order=args.rank_order,
    )  # fmt: skip
    arguments = [f"--{override.key}={override.text}" for override in overrides]
    return train.run(here, arguments, note=note)


def _overrides(args: argparse.Namespace) -> tuple[Override, ...]:
    """Returns the options as keys of the configuration; later ones replace earlier ones."""
    folder = Path(args.model)
    try:
        longest = read_config(folder / "config.json").sequence_length
    except InputError as error:
        raise UserError(f"--model: {error}") from None
    if args.lora is None and (args.lora_alpha, args.lora_targets) != (None, None):
        raise UserError("--lora-alpha and --lora-targets need --lora RANK")
    if args.data.startswith(PREFIX):
        raise UserError(
            f"--data: expected files, got {args.data}, a stream, which only train reads"
        )
    values: dict[str, Any] = dict(DEFAULTS)
    values |= {"model.pretrained": args.model, "data.text": args.data}
    values["model.sequence_length"] = args.sequence_length or min(USUAL_LENGTH, longest)
    if args.lora is not None:
        alpha = args.lora_alpha or 2 * args.lora
        values |= {"lora.rank": args.lora, "lora.alpha": alpha, "optim.lr": LORA_LR}
    given = {
        "lora.targets": args.lora_targets, "train.steps": args.steps, "optim.lr": args.lr,
        "train.batch_size": args.batch_size,
    }  # fmt: skip
    values |= {key: value for key, value in given.items() if value is not None}
    return tuple(Override(key, str(value)) for key, value in values.items())


def _steps(args: argparse.Namespace, overrides: tuple[Override, ...]) -> tuple[int, str]:
    """Returns the number of steps for the requested epochs, and a sentence that says so."""
    epochs = args.epochs or 3
    config = load_config(None, overrides=overrides)
    try:
        sources = find_sources(config.data.text, config.data.mixture)
        text, model = text_and_model(config, sources)
    except ValueError as error:
        raise UserError(str(error)) from None
    if config.data.order != EXAMPLES:
        raise UserError("--epochs counts examples: give --steps for other data")
    examples = examples_of(config, text, model.vocab_size)
    batches = packed_batches(config, examples, RowGroup())
    sequences, steps = batches.num_sequences(epochs), batches.num_steps(epochs)
    return steps, f"{epochs} epochs are {sequences:,} sequences, or {steps:,} steps"
