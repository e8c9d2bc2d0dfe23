"""`axonn-ext generate`: continues prompts with a Hugging Face model, on a grid of processes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_ext import Grid, Sampling
from axonn_ext.cli.model_on_grid import (
    DTYPES,
    check_grid,
    check_started,
    device_of,
    load_model,
    model_vocabulary,
)
from axonn_ext.data import Prompts, Vocabulary
from axonn_ext.data.prompts import continuation, read_prompts
from axonn_ext.data.tokenizer_files import TOKENIZER
from axonn_ext.data.units import whole_text
from axonn_ext.models import ModelConfig
from axonn_ext.models.generation import check_prompts, stream
from axonn_ext.models.pretrained import read_model
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.launcher import launch
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.files.errors import InputError, printable
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.arguments import add_key, new_parser, whole
from axonn_ext.terminal.console import Console, say
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.grids import parse_grid

UNFINISHED = "\ufffd"  # stands for bytes that do not yet form a whole character
DESCRIPTION = """\
Continues prompts with a Hugging Face model on a grid of processes: x and y split the matrices, data
and z the prompts (z also splits the weights, which are gathered for each token). A single prompt is
shown as it grows; several are printed one after the other when all are done."""

EPILOG = """\
examples:
  axonn-ext generate --model my-model --prompt "Once upon a time"
  axonn-ext generate --model llama-3-8b --grid x=8 --prompt "def main():" --temperature 0.7
  axonn-ext generate --model my-model --grid data=4 --prompts prompts.jsonl --json > answers.jsonl
  axonn-ext checkpoint export runs/demo my-model && axonn-ext generate --model my-model \\
      --vocabulary bytes --prompt "import "
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(commands, "generate", run, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--model", required=True, metavar="FOLDER",
        help="Hugging Face folder with config.json and safetensors files",
    )  # fmt: skip
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="LoRA adapter in PEFT's format, merged into the model"
    )
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT",
        help="prompt to continue; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", metavar="FILE",
        help="file with a prompt per line; in .jsonl files, the field prompt of each line, or the "
        "chat in its field messages",
    )  # fmt: skip
    parser.add_argument(
        "--grid", default="x=1", metavar="SHAPE",
        help="grid of processes, such as x=2,y=2,z=1,data=1 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=whole(), default=64, metavar="N",
        help="largest number of tokens to generate per prompt (default: %(default)s)",
    )  # fmt: skip
    for name, metavar in (("temperature", "T"), ("top_k", "K"), ("top_p", "P"), ("seed", "N")):
        default = getattr(Sampling, name)
        add_key(parser, Sampling, name, default=default, metavar=metavar)
    parser.add_argument(
        "--vocabulary", metavar="FILE",
        help="vocabulary: bytes, or a JSON file of the tokenizers library (default: the model's "
        f"{TOKENIZER})",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="auto",
        help="dtype of weights and activations; auto: that of the files, but fp32 for fp16 on CPUs "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="device to run on; auto: cuda if there is a GPU, else cpu (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one line of JSON per prompt")


@dataclass(frozen=True)
class Request:
    """The request, after all checks that need no other process."""

    folder: Path
    config: ModelConfig
    shape: GridShape
    vocabulary: Vocabulary
    texts: list[str]
    prompts: list[list[int]]
    stop_ids: Collection[int]
    sampling: Sampling

    @classmethod
    def of(cls, args: argparse.Namespace) -> Request:
        """Raises UserError for missing or inconsistent arguments."""
        folder = Path(args.model)
        config, shape = read_model(folder), parse_grid("--grid", args.grid)
        check_grid(config, shape)
        vocabulary = model_vocabulary(folder, args.vocabulary)
        encoder = Prompts(vocabulary, model=folder)
        places, texts, prompts = map(list, zip(*_prompts(args, encoder), strict=True))
        check_prompts(
            prompts, args.max_new_tokens, config.sequence_length, config.vocab_size, places=places
        )
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
        return cls(folder, config, shape, vocabulary, texts, prompts, encoder.stop_ids, sampling)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError for a mistake, TrainingError if a rank fails."""
    here = process.this_process()
    try:
        request = Request.of(args)
    except (InputError, ValueError) as error:
        raise UserError(str(error)) from None
    if here is None and request.shape.size > 1:
        launch(request.shape.size, ["generate", *_arguments(args)])
        return 0
    check_started(request.shape, here)
    _generate(args, request, here or Process())
    return 0


def _generate(args: argparse.Namespace, request: Request, here: Process) -> None:
    device = device_of(args.device)
    store = process.open_store(here)
    process.meet(store, here, lambda: _shared_values(args, request, device))
    process.set_threads(here, 0)
    with process.process_group(here, store, device):
        model = load_model(
            request.folder, Grid(**request.shape.as_dict()), device=device, dtype=args.dtype,
            adapter=args.adapter, sequence_length=_longest(request, args.max_new_tokens),
        )  # fmt: skip
        began = time.perf_counter()
        steps = stream(
            model, request.prompts, max_new_tokens=args.max_new_tokens, sampling=request.sampling,
            stop_ids=request.stop_ids, num_tokens=request.vocabulary.num_tokens,
        )  # fmt: skip
        if here.rank == 0:
            count = _show(request, steps, as_json=args.json)
            seconds = time.perf_counter() - began
            tokens = f"{count} token{'' if count == 1 else 's'}"
            rate = f"generated {tokens} in {seconds:.1f} s, {count / seconds:.1f} per second"
            say(Console(stderr=True), rate)
        else:
            for _ in steps:
                pass


def _shared_values(args: argparse.Namespace, request: Request, device: str) -> dict[str, str]:
    """Returns what ranks must agree on; from_pretrained and load_adapter compare the files."""
    return {
        "the command": "generate", "--grid": str(request.shape), "--device": device,
        "--dtype": args.dtype, "whether --adapter is given": str(args.adapter is not None),
        "--max-new-tokens": str(args.max_new_tokens), "the sampling": str(request.sampling),
        "the prompts": str(request.prompts),
        "the ids that end a text": str(sorted(request.stop_ids)),
        "the size of the vocabulary": str(request.vocabulary.num_tokens),
    }  # fmt: skip


def _show(request: Request, steps: Iterator[list[int | None]], *, as_json: bool) -> int:
    """Prints the generated text; returns the number of tokens."""
    found: list[list[int]] = [[] for _ in request.prompts]
    grows = len(found) == 1 and not as_json
    shown = ""
    if grows:
        _write(request.texts[0])
    for tokens in steps:
        for sequence, token in zip(found, tokens, strict=True):
            sequence += [] if token is None else [token]
        if grows:
            text = _continuation(request, 0, found[0])
            if not text.endswith(UNFINISHED):
                _write(text[len(shown) :])
                shown = text
    for index, sequence in enumerate(found):
        text = _continuation(request, index, sequence)
        if as_json:
            line = {"prompt": request.texts[index], "text": text, "tokens": sequence}
            print(json.dumps(line))
        elif grows:
            _write(f"{text[len(shown) :]}\n")
        else:
            _write(f"--- {index}\n{request.texts[index]}{text}\n")
    return sum(map(len, found))


def _write(text: str) -> None:
    """Writes text as it is, except for what a terminal would take for commands."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _longest(request: Request, max_new_tokens: int) -> int | None:
    """Returns how long sequences can become; None if the model has a table of positions."""
    if not request.config.traits.rotary:
        return None
    return max(map(len, request.prompts)) + max_new_tokens


def _continuation(request: Request, index: int, tokens: list[int]) -> str:
    return continuation(request.vocabulary, request.prompts[index], tokens)


def _prompts(args: argparse.Namespace, encoder: Prompts) -> Iterator[tuple[str, str, list[int]]]:
    """Yields each prompt's place, text and ids: those of the command line, then the file's."""
    for index, text in enumerate(map(whole_text, args.prompt)):  # the shell may give any bytes
        yield f"prompt {index}", text, encoder.prompt(text)
    count = len(args.prompt)
    if args.prompts is not None:
        for prompt in read_prompts(Path(args.prompts), encoder):
            count += 1
            yield prompt
    if not count:
        raise UserError("--prompt: expected a prompt, or --prompts FILE, got none")


def _arguments(args: argparse.Namespace) -> list[str]:
    """Returns the arguments of a started process: those of this one."""
    names = (
        "model", "adapter", "prompts", "grid", "max_new_tokens", "temperature", "top_k", "top_p",
        "seed", "vocabulary", "dtype", "device",
    )  # fmt: skip
    values = {name: getattr(args, name) for name in names}
    given = [(name, value) for name, value in values.items() if value is not None]
    given += [("prompt", prompt) for prompt in args.prompt]
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given]
    return [*arguments, "--json"] if args.json else arguments
