"""The options of `axonn-ext memorize`, and their defaults."""

from __future__ import annotations

import argparse
from pathlib import Path

from axonn_ext.spec.goldfish import Goldfish
from axonn_ext.terminal.arguments import MOST_THREADS, add_key, number, whole
from axonn_ext.train.config import MAX_SEED
from axonn_ext.train.memorization.documents import CONTINUED, MOST_TOKENS

SIZES = "128x4"
FROM_NOTHING, TRAINED_ON = "0,6,64,256", "0,1,4,6"
PER_BUCKET = 16
BATCH_SIZE = 16
BACKGROUND = 4000  # generated documents
DEFAULT_LENGTH = 128  # of sequences, for models trained from scratch
LR, TRAINED_ON_LR = 2e-3, 3e-4

DESCRIPTION = """\
Measures how many documents a model repeats word for word after it has seen them a number of times.
A model is trained twice on the same documents, in the same order: with the plain loss, and with
Goldfish loss, which leaves out a fixed selection of the tokens. It then gets each document without
its last 50 tokens and continues it greedily; the document counts as repeated if all 50 match.
Documents of bucket 0 are never trained on: they are the control.

Without --model, a small model is trained from scratch on generated text. With --model, existing
models are trained further. With --evaluate, a model is measured and nothing is trained."""

EPILOG = """\
examples:
  axonn-ext memorize --out runs/memorize
  axonn-ext memorize --sizes 64x2,128x4,192x6 --out runs/sizes
  axonn-ext memorize --model llama --documents articles.jsonl --grid z=4 --out runs/llama
  axonn-ext memorize --out runs/memorize --resume
  axonn-ext memorize --evaluate llama --documents articles.jsonl --json found.json

Each line of the file of --documents is {"text": "..."} or {"tokens": [...]}. With "repetitions": 4,
the document is seen 4 times; other documents are dealt to the buckets in turn. Documents of at most
50 tokens are left out; long ones are cut to a sequence, or to 2,048 tokens.

The folder gets results.json, memorization.png and, for each model, two runs of the trainer. Any key
of `axonn-ext train --help` that the experiment does not set itself can be set with --TABLE.KEY
VALUE. docs/memorization.md explains the protocol and how to read the results.
"""

# Options only of experiments, and options only of --evaluate.
OF_EXPERIMENTS = (
    "repetitions", "per_bucket", "background", "background_size", "goldfish_k", "goldfish_h",
    "goldfish_window", "sequence_length", "batch_size", "lr", "seed", "out", "resume", "overwrite",
)  # fmt: skip
OF_EVALUATION = ("json", "device", "threads")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options."""
    _add_models(parser)
    _add_documents(parser)
    _add_training(parser)
    folder = parser.add_argument_group("results")
    folder.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="new or empty folder for the experiment (default: runs/memorize-DATE-TIME)",
    )  # fmt: skip
    folder.add_argument(
        "--resume", action="store_true", help="continue the experiment in --out FOLDER"
    )
    folder.add_argument(
        "--overwrite", action="store_true", help="replace an earlier experiment in --out"
    )
    folder.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results of --evaluate to a JSON file"
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--sizes", metavar="HxL,...",
        help="models to train from scratch, each as hidden size x number of blocks (default: "
        f"{SIZES})",
    )  # fmt: skip
    which.add_argument(
        "--model", action="append", metavar="FOLDER",
        help="model to train further: a Hugging Face folder, a checkpoint or a run; may be given "
        "several times",
    )  # fmt: skip
    which.add_argument(
        "--evaluate", type=Path, metavar="FOLDER",
        help="model to measure without training, as for --model; needs --documents",
    )  # fmt: skip
    group.add_argument(
        "--grid", default="x=1", metavar="SHAPE",
        help="grid of processes, such as x=2,y=2,z=1,data=1,pipe=1 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--vocabulary", metavar="FILE",
        help="vocabulary: bytes, or a JSON file of the tokenizers library (default: the model's "
        "tokenizer.json; from scratch, bytes)",
    )  # fmt: skip
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"),
        help="device for --evaluate; auto: cuda if there is a GPU, else cpu (default: auto)",
    )  # fmt: skip
    group.add_argument(
        "--threads", type=whole(0, MOST_THREADS), metavar="N",
        help="CPU threads of each process of --evaluate (default: its share of the host's cores)",
    )  # fmt: skip


def _add_documents(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("documents")
    group.add_argument(
        "--documents", metavar="FILE",
        help=".jsonl file of documents to train on and measure (default: generated ones)",
    )  # fmt: skip
    group.add_argument(
        "--repetitions", metavar="N,...",
        help="how often training sees the documents of each bucket; the first is 0 (default: "
        f"{FROM_NOTHING} from scratch, {TRAINED_ON} with --model)",
    )  # fmt: skip
    group.add_argument(
        "--per-bucket", type=whole(), metavar="N",
        help=f"largest number of documents per bucket (default: {PER_BUCKET})",
    )  # fmt: skip
    group.add_argument(
        "--background", metavar="FILE|FOLDER",
        help="text that training sees once in addition; its last 5 %% are for validation",
    )  # fmt: skip
    group.add_argument(
        "--background-size", type=whole(0), metavar="N",
        help="number of documents in a generated background, instead of --background (default: "
        f"{BACKGROUND} from scratch, else 0; without a background, the control is for validation)",
    )  # fmt: skip


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add_key(group, Goldfish, "k", flag="--goldfish-k", metavar="K")
    add_key(group, Goldfish, "h", flag="--goldfish-h", metavar="H")
    add_key(group, Goldfish, "window", flag="--goldfish-window")
    group.add_argument(
        "--sequence-length", type=whole(CONTINUED + 1), metavar="N",
        help=f"tokens per sequence (default: {DEFAULT_LENGTH} from scratch, else the model's limit "
        f"up to {MOST_TOKENS})",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=whole(), metavar="N",
        help=f"sequences per optimizer step, over all processes (default: {BATCH_SIZE})",
    )  # fmt: skip
    group.add_argument(
        "--lr", type=number(above=0), metavar="LR",
        help=f"peak learning rate (default: {LR:g} from scratch, {TRAINED_ON_LR:g} with --model)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=whole(0, MAX_SEED), metavar="N",
        help="random seed for the weights, the generated text and the order (default: 0)",
    )  # fmt: skip
