"""The options of `axonn-ext memorize`, and their defaults."""

from __future__ import annotations

import argparse
from pathlib import Path

from axonn_ext.memorization.documents import CONTINUED, MOST_TOKENS
from axonn_ext.spec.goldfish import Goldfish
from axonn_ext.terminal.arguments import MOST_THREADS, add_key, number, whole
from axonn_ext.train.config import MAX_SEED

SIZES = "128x4"
FROM_NOTHING, TRAINED_ON = "0,6,64,256", "0,1,4,6"
PER_BUCKET = 16
BATCH_SIZE = 16
BACKGROUND = 4000  # generated documents
DEFAULT_LENGTH = 128  # of sequences, of models that are trained from nothing
LR, TRAINED_ON_LR = 2e-3, 3e-4

DESCRIPTION = """\
Measures how many documents a model repeats after it has seen them some number of times. A model is
trained twice on the same documents, in the same order: with the plain loss, and with Goldfish loss,
which leaves a fixed choice of the tokens out. Then it gets each document without its last 50 tokens
and continues it greedily; the document counts as repeated if all 50 come. Documents of the bucket 0
are never trained on: they are the control.

Without --model, a small model is trained from nothing on generated text. With --model, models that
are there are trained on. With --evaluate, a model is measured and nothing is trained."""

EPILOG = """\
examples:
  axonn-ext memorize --out runs/memorize
  axonn-ext memorize --sizes 64x2,128x4,192x6 --out runs/sizes
  axonn-ext memorize --model llama --documents articles.jsonl --grid z=4 --out runs/llama
  axonn-ext memorize --out runs/memorize --resume
  axonn-ext memorize --evaluate llama --documents articles.jsonl --json found.json

A line of a file of documents is {"text": "..."}, or {"tokens": [...]}, and may say how often the
document is seen: "repetitions": 4. Otherwise the documents are dealt to the buckets in turn. Those
of at most 50 tokens are left out, and longer ones are cut to a sequence, or 2,048 tokens.

The folder gets results.json, memorization.png and, for each model, the two runs of the trainer.
Every key of `axonn-ext train --help` that the experiment does not decide itself can be given as
--TABLE.KEY VALUE. docs/memorization.md explains the protocol and how to read the results.
"""

# What only an experiment takes, and what only --evaluate does.
OF_EXPERIMENTS = (
    "repetitions", "per_bucket", "background", "background_size", "goldfish_k", "goldfish_h",
    "goldfish_window", "sequence_length", "batch_size", "lr", "seed", "out", "resume", "overwrite",
)  # fmt: skip
OF_EVALUATION = ("json", "device", "threads")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all of them."""
    _add_models(parser)
    _add_documents(parser)
    _add_training(parser)
    folder = parser.add_argument_group("results")
    folder.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="of the experiment (default: runs/memorize-DATE-TIME)",
    )  # fmt: skip
    folder.add_argument(
        "--resume", action="store_true", help="go on with the experiment in --out FOLDER"
    )
    folder.add_argument(
        "--overwrite", action="store_true", help="replace the experiment in --out FOLDER"
    )
    folder.add_argument(
        "--json", type=Path, metavar="FILE", help="the results of --evaluate (default: none)"
    )


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--sizes", metavar="HxL,...",
        help=f"hidden sizes and blocks of models that are trained from nothing (default: {SIZES})",
    )  # fmt: skip
    which.add_argument(
        "--model", action="append", metavar="FOLDER",
        help="is trained on: a Hugging Face folder, a checkpoint or a run; repeatable",
    )  # fmt: skip
    which.add_argument(
        "--evaluate", type=Path, metavar="FOLDER", help="is measured as it is; nothing is trained"
    )
    group.add_argument(
        "--grid", default="x=1", metavar="SHAPE",
        help="of processes: x=2,y=2,z=1,data=1,pipe=1 (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--vocabulary", metavar="FILE",
        help="bytes, or a file of the tokenizers library (default: the model's tokenizer.json, or "
        "bytes from nothing)",
    )  # fmt: skip
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="of --evaluate (default: auto)"
    )
    group.add_argument(
        "--threads", type=whole(0, MOST_THREADS), metavar="N",
        help="of each process of --evaluate (default: the host's cores shared out)",
    )  # fmt: skip


def _add_documents(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("documents")
    group.add_argument(
        "--documents", metavar="FILE", help="a .jsonl file of them (default: generated ones)"
    )
    group.add_argument(
        "--repetitions", metavar="N,...",
        help="how often the documents of each bucket are seen; the first is 0 (default: "
        f"{FROM_NOTHING} from nothing, {TRAINED_ON} with --model)",
    )  # fmt: skip
    group.add_argument(
        "--per-bucket", type=whole(), metavar="N",
        help=f"documents of a bucket, at most (default: {PER_BUCKET})",
    )  # fmt: skip
    group.add_argument(
        "--background", metavar="FILE|FOLDER",
        help="a text that is read once beside the documents; its last 5 %% are for validation",
    )  # fmt: skip
    group.add_argument(
        "--background-size", type=whole(0), metavar="N",
        help=f"documents of a generated background instead (default: {BACKGROUND} from nothing, "
        "else 0: the control is for validation)",
    )  # fmt: skip


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add_key(group, Goldfish, "k", flag="--goldfish-k", metavar="K")
    add_key(group, Goldfish, "h", flag="--goldfish-h", metavar="H")
    add_key(group, Goldfish, "window", flag="--goldfish-window")
    group.add_argument(
        "--sequence-length", type=whole(CONTINUED + 1), metavar="N",
        help=f"tokens (default: {DEFAULT_LENGTH} from nothing, else as many as the model takes, up "
        f"to {MOST_TOKENS})",
    )  # fmt: skip
    group.add_argument(
        "--batch-size", type=whole(), metavar="N",
        help=f"sequences of a step (default: {BATCH_SIZE})",
    )  # fmt: skip
    group.add_argument(
        "--lr", type=number(above=0), metavar="LR",
        help=f"highest learning rate (default: {LR:g} from nothing, {TRAINED_ON_LR:g} with "
        "--model)",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=whole(0, MAX_SEED), metavar="N",
        help="of the weights, the generated text and the order (default: 0)",
    )  # fmt: skip
