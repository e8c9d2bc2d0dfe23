"""`axonn-ext evaluate`: the loss of a model on a text, and its scores in lm-evaluation-harness."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from axonn_ext import Grid
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.cli.evaluate_text import EvaluatedText, TextScore
from axonn_ext.cli.memorize_evaluate import found_checkpoint, hugging_face_folder, model_folder
from axonn_ext.cli.model_on_grid import (
    DTYPES,
    check_grid,
    check_started,
    device_of,
    load_model,
    model_vocabulary,
)
from axonn_ext.data import Prompts
from axonn_ext.data.vocabulary import BYTES
from axonn_ext.models.pretrained import read_model
from axonn_ext.models.transformer import Transformer
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.launcher import launch
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.files.errors import InputError, hint
from axonn_ext.spec.grid import GridShape
from axonn_ext.terminal.arguments import new_parser, number, whole
from axonn_ext.terminal.console import Console, new_table, print_table
from axonn_ext.terminal.errors import UserError
from axonn_ext.terminal.files import check_writable, write_text
from axonn_ext.terminal.grids import parse_grid
from axonn_ext.train.export import ORIGINS

HARNESS = "lm_eval"
DESCRIPTION = """\
Evaluates a model on a grid of processes: its loss, perplexity and bits per byte on a text, or its
scores in tasks of EleutherAI's lm-evaluation-harness (pip install 'axonn-ext[evaluation]').
x and y split the matrices, data and z the texts."""

EPILOG = """\
examples:
  axonn-ext evaluate my-model --text held-out.txt
  axonn-ext evaluate runs/demo --text held-out.txt --vocabulary bytes --grid data=2
  axonn-ext evaluate my-model --tasks hellaswag,arc_easy --grid x=2,data=4 --json scores.json
"""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand."""
    parser = new_parser(commands, "evaluate", run, description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "folder", metavar="FOLDER", help="Hugging Face folder, run or checkpoint to evaluate"
    )
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="LoRA adapter in PEFT's format, merged into the model"
    )
    parser.add_argument("--text", metavar="FILE", help="text to compute the loss of")
    parser.add_argument(
        "--tasks", metavar="NAME,...", help="tasks of lm-evaluation-harness; * matches any name"
    )
    parser.add_argument(
        "--include-path", metavar="FOLDER", help="folder with tasks of your own, as YAML files"
    )
    parser.add_argument(
        "--num-fewshot", type=whole(0), metavar="N",
        help="examples in each prompt (default: the task's)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=number(above=0), metavar="N",
        help="documents per task, or below 1 their share (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--apply-chat-template", action="store_true",
        help="write the prompts of tasks with the model's chat template",
    )  # fmt: skip
    parser.add_argument(
        "--grid", default="x=1", metavar="SHAPE",
        help="grid of processes, such as x=2,y=2,z=1,data=1 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--vocabulary", metavar="FILE",
        help="vocabulary: bytes, or a JSON file of the tokenizers library (default: the model's)",
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")


@dataclass(frozen=True)
class Request:
    """The request, after all checks that need no other process.

    manager: the harness's TaskManager, on the rank that runs it. tasks: the names of its tasks.
    """

    folder: Path
    shape: GridShape
    prompts: Prompts
    text: EvaluatedText | None
    manager: Any
    tasks: list[str]

    @classmethod
    def of(cls, args: argparse.Namespace, folder: Path, here: Process | None) -> Request:
        """Raises UserError or ValueError for missing or inconsistent arguments."""
        config, shape = read_model(folder), parse_grid("--grid", args.grid)
        check_grid(config, shape)
        prompts = Prompts(model_vocabulary(folder, args.vocabulary), model=folder)
        if prompts.vocabulary.num_tokens > config.vocab_size:
            raise UserError(
                f"--vocabulary: expected at most {config.vocab_size} tokens, which the model has, "
                f"got {prompts.vocabulary.num_tokens}"
            )
        text, length = None, config.sequence_length
        if args.text is not None:
            text = EvaluatedText.read(Path(args.text), prompts, length)
        manager, tasks = None, list[str]()
        runs_harness = shape.size == 1 if here is None else here.rank == 0
        if args.tasks and runs_harness:
            manager, tasks = _tasks(args.tasks, args.include_path)
        return cls(folder, shape, prompts, text, manager, tasks)


def run(args: argparse.Namespace) -> int:
    """Runs the command. Raises UserError for a mistake, TrainingError if a rank fails."""
    if args.text is None and not args.tasks:
        raise UserError("expected --text FILE or --tasks NAME,..., got neither")
    for name in ("include_path", "num_fewshot", "limit", "apply_chat_template"):
        given = getattr(args, name)
        if not args.tasks and given is not None and given is not False:  # 0 also counts as given
            raise UserError(f"--{name.replace('_', '-')} is only for --tasks")
    if args.tasks and importlib.util.find_spec(HARNESS) is None:
        raise UserError(
            f"--tasks: expected {HARNESS} to be installed, got no such package: "
            "pip install 'axonn-ext[evaluation]'"
        )
    check_writable("--json", args.json)
    path = Path(args.folder)
    if model_folder(path) is None:
        _prepare_export(args, path)
    with hugging_face_folder(path) as folder:
        _run(args, folder)
    return 0


def _prepare_export(args: argparse.Namespace, path: Path) -> None:
    """Chooses the vocabulary of a checkpoint. Raises UserError if this process must not export."""
    if process.this_process() is not None:  # each rank would write a whole model
        raise UserError(
            f"{path}: expected a Hugging Face folder under torchrun, got a run or a checkpoint; "
            "write one first: axonn-ext checkpoint export"
        )
    origins = read_manifest(found_checkpoint(path)).extra.get(ORIGINS)
    is_bytes = isinstance(origins, dict) and origins.get("tokenizer") == BYTES
    args.vocabulary = args.vocabulary or (BYTES if is_bytes else None)


def _run(args: argparse.Namespace, folder: Path) -> None:
    here = process.this_process()
    try:
        request = Request.of(args, folder, here)
    except (InputError, ValueError) as error:
        raise UserError(str(error)) from None
    if here is None and request.shape.size > 1:
        launch(request.shape.size, ["evaluate", *_arguments(args, folder)])
        return
    check_started(request.shape, here)
    _evaluate(args, request, here or Process())


def _evaluate(args: argparse.Namespace, request: Request, here: Process) -> None:
    device = device_of(args.device)
    store = process.open_store(here)
    process.meet(store, here, lambda: _shared_values(args, request, device))
    process.set_threads(here, 0)
    with process.process_group(here, store, device):
        grid = Grid(**request.shape.as_dict())
        model = load_model(
            request.folder, grid, device=device, dtype=args.dtype, adapter=args.adapter
        )
        text = None if request.text is None else request.text.score(model)
        tasks = _run_tasks(args, model, request) if args.tasks else None
    if here.rank == 0:
        _show(text, tasks, args.json)


def _tasks(names: str, include_path: str | None) -> tuple[Any, list[str]]:
    """Returns the harness's TaskManager and the tasks that names and patterns mean.

    It reads no data. Raises UserError for a name without a task.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include-path: expected a folder that exists, got {include_path}")
    manager = TaskManager(include_path=include_path)
    asked = [name.strip() for name in names.split(",")]
    for name in asked:
        if not manager.match_tasks([name]):
            known = hint(name, manager.all_tasks)
            raise UserError(f"--tasks: expected a task of {HARNESS}, got {name!r}{known}")
    return manager, list(manager.match_tasks(asked))


def _run_tasks(
    args: argparse.Namespace, model: Transformer, request: Request
) -> dict[str, Any] | None:
    """Returns the harness's results on rank 0, by task; None on other ranks."""
    from axonn_ext.train.integrations.lm_eval import AxonnLM

    with AxonnLM(model, request.prompts, name=str(request.folder)) as lm:
        if model.grid.rank != 0:
            return None
        import lm_eval

        try:
            found = lm_eval.simple_evaluate(
                model=lm, tasks=request.tasks, num_fewshot=args.num_fewshot, limit=args.limit,
                apply_chat_template=args.apply_chat_template, log_samples=False,
                task_manager=request.manager,
            )  # fmt: skip
        except ValueError as error:  # such as a task that the model cannot run
            raise UserError(f"--tasks: {error}") from error
    results = dict(found["results"])
    return results | {name: found["groups"][name] for name in found.get("groups", {})}


def _show(text: TextScore | None, tasks: dict[str, Any] | None, file: Path | None) -> None:
    console = Console()
    if text is not None:
        table = new_table(("text", "bytes", "tokens", "loss", "perplexity", "bits per byte"))
        numbers = (text.loss, text.perplexity, text.bits_per_byte)
        cells = (f"{text.bytes:,}", f"{text.tokens:,}", *(f"{each:.4f}" for each in numbers))
        table.add_row(text.file, *cells)
        print_table(console, table)
    if tasks is not None:
        table = new_table(("task", "metric", "value", "standard error"), ("task", "metric"))
        for task, values in tasks.items():
            for name, value in values.items():
                metric, _, how = name.partition(",")
                if isinstance(value, int | float) and how and not metric.endswith("_stderr"):
                    error = values.get(f"{metric}_stderr,{how}")
                    shown = f"{error:.4f}" if isinstance(error, int | float) else ""
                    label = metric if how == "none" else f"{metric} ({how})"
                    table.add_row(task, label, f"{value:.4f}", shown)
        print_table(console, table)
    if file is not None:
        content = {"text": None if text is None else asdict(text), "tasks": tasks}
        write_text("--json", file, json.dumps(content, indent=1, default=float) + "\n")


def _shared_values(args: argparse.Namespace, request: Request, device: str) -> dict[str, str]:
    """Returns what ranks must agree on; from_pretrained compares the model's files."""
    parts = None if request.text is None else request.text.parts
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return {
        "the command": "evaluate", "--grid": str(request.shape), "--device": device,
        "--dtype": args.dtype, "whether --adapter is given": str(args.adapter is not None),
        "--text": digest, "--tasks": str(args.tasks),
        "the size of the vocabulary": str(request.prompts.vocabulary.num_tokens),
    }  # fmt: skip


def _arguments(args: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the arguments of a started process: those of this one, and the model's folder."""
    names = (
        "adapter", "text", "tasks", "include_path", "num_fewshot", "limit", "grid", "vocabulary",
        "dtype", "device", "json",
    )  # fmt: skip
    values = {name: getattr(args, name) for name in names}
    given = [f"--{n.replace('_', '-')}={v}" for n, v in values.items() if v is not None]
    chat = ["--apply-chat-template"] if args.apply_chat_template else []
    return [str(folder), *given, *chat]
