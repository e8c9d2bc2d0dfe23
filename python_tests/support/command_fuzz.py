"""Runs command lines one after another, each in a forked child of a process that has loaded Torch.

Run `python command_fuzz.py SEED COUNT` in an empty folder; it prints a line of JSON per case. One
in `RIGHT_EVERY` lines comes from `RIGHT`, in turn, so that all are used for every seed. The others
start with one of `COMMANDS` and have random options, most of them wrong.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from limits import HANG_SECONDS

RIGHT_EVERY = 6
SMALL = {
    "model.hidden_size": 32, "model.num_layers": 1, "model.num_heads": 4,
    "model.sequence_length": 16, "data.max_bytes": 20_000, "train.device": "cpu",
    "train.threads": 1, "train.steps": 1, "train.batch_size": 4, "train.eval_interval": 0,
}  # fmt: skip
# None of these numbers, where valid, makes a command take long.
NUMBERS = ("0", "-1", "nan", "inf", "1e300", "1e30", "3000000000", "9" * 400, "9" * 5000, "x", "",
           "1.5", "0x10", "\udcff", "1", "2", "3")  # fmt: skip
NAMES = ("", "missing", "folder", "binary", "text", "brackets.toml", "digits.toml", "binary.toml",
         "good.toml", "run", "empty", "/dev/full", "/dev/null", "/proc/x", "~nosuch/x", "x" * 300,
         "x" * 5000, "a\udcff", "f\u00fc", "none/x", "new one", "$x^$", "[/red]", "%s",
         "new.toml", "new.json", "new.png", "folder.json", "trained", "model",
         "adapter")  # fmt: skip
FOLDERS = ("folder", "folder.json", "run", "empty")
LOGS = ("all_gather=text", "all_reduce=log", "all_gather=missing", "all_gather=", "what=log", "log",
        "", "all_gather=\udcff")  # fmt: skip
GRIDS = (
    "1x1x1",
    "x=1",
    "x=5",
    "x=0",
    "2x2",
    "",
    "x=-1",
    "x=9999999999",
    "y=1,y=1",
    "auto",
    "\udcff",
)
SHAPES = ("8,8,8", "0,8,8", "8,8", "a,b,c", "999999999999,8,8", "9" * 5000 + ",8,8", "gpt9", "")
PLAN = ("--model", "gpt2-small", "--machine", "dgx-a100", "--gpus", "8", "--global-batch", "64")
ONCE = ("--model", "model", "--data", "text", "--data.vocabulary", "bytes", "--train.threads", "1",
        "--train.device", "cpu", "--train.eval_interval", "0", "--sequence-length", "16",
        "--batch-size", "2", "--nproc", "1")  # fmt: skip
ANSWER = ("--model", "model", "--vocabulary", "bytes", "--prompt", "a", "--max-new-tokens", "2")
OF_FIVE = ("--grid", "5x1x1", "--shapes")  # 5 ranks divide no shape, so nothing is timed
OF_BENCH = (("--world", "--threads", "--rounds"), ("--json", "--plot"))
# Each command, with the options that it needs to be valid. The options to draw from: those that
# take a number, those that take a name, and others.
COMMANDS: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    ("plan", *PLAN): (
        ("--gpus", "--global-batch", "--global-batch-tokens", "--seq", "--tokens", "--top",
         "--micro-batches", "--memory-fraction", "--explain", "--price", "--pipe"),
        ("--model", "--machine", "--json", "--csv", "--plot", "--timeline", "--write-config"),
        ("--dtype", "--layout", "--recompute", "--overlap", "--grid", "--like", "--set", "--sweep",
         "--series", "--what"),
    ),
    ("tokenize", "--text", "text", "--out", "new"): (
        ("--append-id", "--workers"), ("--text", "--out", "--vocabulary"), ("--field", "--what"),
    ),
    ("train", "--print-config"): (
        ("--nproc", "--train.steps", "--optim.lr", "--model.num_layers", "--train.threads",
         "--model.hidden_size", "--data.held_out"),
        ("--config", "--data.text", "--data.vocabulary", "--out"),
        ("--grid", "--machine", "--train.dtype", "--no.such", "--what"),
    ),
    ("train", "--nproc", "1", *(f"--{key}={value}" for key, value in SMALL.items())): (
        ("--nproc", "--optim.lr", "--model.num_layers", "--train.threads", "--train.batch_size",
         "--model.hidden_size", "--model.vocab_size", "--train.seed"),
        ("--config", "--data.text", "--data.vocabulary", "--out"),
        ("--grid", "--machine", "--train.dtype", "--what"),
    ),
    ("train", "--print-config", "--out", "new"): (
        ("--checkpoint.interval", "--checkpoint.keep_last"), ("--resume",), ("--what",),
    ),
    **{
        ("checkpoint", action, "run"): ((), ("",), ("--what", "--tensors"))
        for action in ("list", "inspect", "verify")
    },
    ("finetune", *ONCE, "--steps", "1"): (
        ("--lr", "--lora", "--lora-alpha", "--batch-size", "--sequence-length", "--nproc"),
        ("--model", "--data", "--data.vocabulary", "--out", "--resume"),
        ("--grid", "--lora-targets", "--train.dtype", "--what"),
    ),
    ("finetune", *ONCE, "--grid", "5x1x1"): (
        ("--steps", "--train.steps", "--lora"), ("--data", "--out"), ("--grid",),
    ),
    ("generate", *ANSWER): (
        ("--max-new-tokens", "--temperature", "--top-k", "--top-p", "--seed"),
        ("--model", "--adapter", "--prompts", "--prompt", "--vocabulary"),
        ("--grid", "--dtype", "--device", "--what"),
    ),
    ("evaluate", "model", "--vocabulary", "bytes", "--text", "text"): (
        ("--limit", "--num-fewshot"), ("--text", "--vocabulary", "--include-path", "--json"),
        ("--grid", "--dtype", "--device", "--tasks", "--what"),
    ),
    ("machine", "--base", "dgx-h100", "--log", "all_gather=log", "--out", "new.toml"): (
        (), ("--base", "--out"), ("--log", "--what"),
    ),
    ("memorize", "--documents", "missing"): (
        ("--per-bucket", "--background-size", "--goldfish-k", "--goldfish-h", "--sequence-length",
         "--batch-size", "--lr", "--seed"),
        ("--documents", "--background", "--vocabulary", "--model", "--evaluate", "--out", "--json"),
        ("--sizes", "--repetitions", "--grid", "--train.dtype", "--what"),
    ),
    ("checkpoint", "export", "run"): ((), ("",), ("--dtype",)),
    ("checkpoint", "reshard", "run"): (("--files",), ("",), ("--what",)),
    ("compare", "run", "run"): (("--tolerance",), ("",), ("--what",)),
    ("tune", "--shapes", "8,8,8"): (
        ("--threads", "--batch"), ("--model", "--json"), ("--grid", "--shapes", "--dtype"),
    ),
    ("bench", "linear", *OF_FIVE, "8,8,8"): (
        *OF_BENCH, ("--grid", "--shapes", "--algorithms", "--dtype", "--role", "--layout"),
    ),
    ("bench", "block", *OF_FIVE, "8,8,8,2"): (
        *OF_BENCH, ("--grid", "--shapes", "--algorithms", "--dtype", "--layout"),
    ),
    **{
        ("bench", op, *OF_FIVE, "8,8,8"): (
            *OF_BENCH, ("--grid", "--shapes", "--algorithms", "--dtype", "--baseline"),
        )
        for op in ("ag-gemm", "gemm-rs", "gemm-ar", "gemm-ops")
    },
    ("bench", "links", "--device", "cuda"): (
        ("--threads", "--rounds"), ("--out", "--json"), ("--device", "--dtype"),
    ),
    ("bench", "loss", "--device", "cuda"): (
        ("--rows", "--vocab", "--rounds", "--threads"), ("--json", "--plot"), ("--dtype",),
    ),
    ("bench", "ops", "--device", "cuda"): (
        ("--elements", "--slots", "--rounds", "--threads"), ("--json",), ("--op", "--dtype"),
    ),
    ("bench", "ranking", "--nproc", "1"): (
        ("--rounds",), ("--machine", "--times", "--json", "--markdown"), ("--model",),
    ),
    ("bench", "train", "--heads", "7"): (
        ("--nproc", "--hidden", "--layers", "--rounds"), ("--json", "--plot"),
        ("--grid", "--layout", "--algorithm", "--baseline"),
    ),
    ("bench", "pipeline", "--grid", "pipe=1"): (
        ("--micro-batches", "--rounds", "--seed"), ("--json", "--plot"),
        ("--stage-ms", "--delay", "--case"),
    ),
    ("bench", "optimizer", "--device", "cuda"): (
        ("--elements", "--bucket", "--threads", "--rounds"), ("--json", "--plot", "--folder"),
        ("--dtype", "--device"),
    ),
    ("bench", "gemm"): ((), ("--json",), ("--shapes", "--dtype", "--tiles")),
    ("bench", "link-overlap"): (("--chunks",), ("--json",), ("--shape",)),
    ("verify",): ((), ("--json",), ("--only", "--what")),
    ("doctor",): ((), ("--json",), ("--what",)),
}  # fmt: skip
TRAIN = " ".join(("train --nproc 1", *(f"--{key}={value}" for key, value in SMALL.items())))
OF_ONE = "--world 1 --rounds 1 --device cpu --algorithms sequential --shapes"
DRAWN = ("--json new.json", "--plot new.png")
# Valid command lines that need no GPU, and the options that may follow, in any order.
RIGHT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("--help", ()),
    ("--version", ()),
    (f"plan {' '.join(PLAN)}",
     ("--top 3", "--explain 1", "--sensitivity", "--seq 512", "--tokens 1e9", "--price 2",
      "--pipe 2", "--memory-fraction 0.9", "--dtype fp32", "--recompute full", "--overlap on",
      "--zero auto", "--like ddp", "--json new.json", "--csv new.csv", "--plot new.png",
      "--write-config new.toml")),
    ("plan --model gpt2-small --machine dgx-a100 --global-batch 64 --sweep gpus=2..8",
     ("--csv new.csv", *DRAWN)),
    ("plan --study list", ()),
    ("machine --base dgx-h100 --log all_gather=log --out new.toml", ()),
    ("tokenize --text text --out new",
     ("--append-id 3", "--workers 1", "--overwrite", "--field what", "--vocabulary bytes")),
    ("train --print-config",
     ("--config good.toml", "--grid x=2,y=2", "--nproc 3", "--optim.lr=3e-4", "--data.text binary",
      "--train.dtype bf16", "--resume trained", "--model.family llama")),
    (TRAIN,
     ("--out new", "--model.family llama", "--train.dtype bf16", "--train.seed 3", "--grid 1x1x1",
      "--data.text text", "--checkpoint.interval 1", "--profile")),
    (f"finetune {' '.join(ONCE)} --out new --steps 2",
     ("--lora 2", "--lr 1e-3", "--grid x=1", "--data text.jsonl")),
    (f"finetune {' '.join(ONCE)} --out new --epochs 1", ("--lora 2", "--train.seed 3")),
    ("compare trained trained", ("--tolerance 0.1",)),
    (f"generate {' '.join(ANSWER)}",
     ("--adapter adapter", "--prompt b", "--prompts text.jsonl", "--temperature 0.7", "--top-k 3",
      "--top-p 0.5", "--seed 3", "--dtype bf16", "--device cpu", "--json")),
    ("evaluate model --vocabulary bytes --text text",
     ("--dtype bf16", "--device cpu", "--grid 1x1x1", "--json new.json")),
    ("memorize --sizes 32x1 --per-bucket 1 --background-size 0 --repetitions 0,1 --batch-size 2 "
     "--sequence-length 51 --train.threads 1 --train.device cpu --out new",
     ("--goldfish-k 3", "--goldfish-h 2", "--lr 1e-3", "--seed 3")),
    ("memorize --evaluate model --documents text.jsonl --vocabulary bytes --device cpu --threads 1",
     ("--json new.json",)),
    ("checkpoint list trained", ()),
    ("checkpoint inspect trained", ("--tensors",)),
    ("checkpoint verify trained", ()),
    ("checkpoint export trained new", ("--dtype bf16",)),
    ("checkpoint reshard trained new", ("--files 2",)),
    ("bench --help", ()),
    *((f"bench {op} {OF_ONE} 8,8,8", (*DRAWN, "--dtype fp64"))
      for op in ("ag-gemm", "gemm-rs", "gemm-ar", "gemm-ops", "linear")),
    (f"bench block {OF_ONE} 8,8,8,2", (*DRAWN, "--layout replicated")),
    ("bench gemm --help", ()),
    ("bench link-overlap --help", ()),
    ("bench links --nproc 1 --rounds 1 --device cpu --out new.toml", ("--json new.json",)),
    ("bench loss --rows 8 --vocab 16 --rounds 1", (*DRAWN, "--dtype fp32")),
    ("bench ops --elements 5000 --rounds 1 --device cpu --op reduce fill-normal",
     ("--json new.json", "--dtype fp32", "--slots 3")),
    ("bench optimizer --elements 1000 --bucket 100 --rounds 1",
     (*DRAWN, "--dtype fp32", "--folder folder")),
    ("bench pipeline --grid pipe=2 --rounds 1 --micro-batches 2 --stage-ms 1 --case 1f1b --delay 0",
     (*DRAWN, "--seed 3")),
    ("bench ranking --help", ()),  # it needs at least four grids, which take long
    ("bench train --nproc 1 --hidden 32 --layers 1 --heads 2 --sequence 16 --batch 2 --rounds 1 "
     "--baseline single --grid 1x1x1 --no-memory", DRAWN),
    ("tune --shapes 8,8,8 --device cpu", ("--threads 1", "--dtype bf16", "--json new.json")),
    ("verify --help", ()),
    ("doctor", ("--json new.json",)),
)  # fmt: skip
VARIABLES = ("AXONN_TIMEOUT_SECONDS", "AXONN_SYMMETRIC_MEMORY_BYTES", "AXONN_CACHE_DIR",
             "AXONN_DEBUG_COLLECTIVES", "AXONN_DEBUG_TOKEN_IDS", "AXONN_FUSED_NCCL_SMS",
             "AXONN_FUSED_FREE_SMS", "AXONN_PRODUCT_KERNELS", "AXONN_EMULATED_LINKS",
             "AXONN_TIMEOUT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
             "MASTER_PORT", "HOME", "XDG_CACHE_HOME")  # fmt: skip
LAUNCH = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
          "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}  # fmt: skip
RIGHT_VARIABLES = (
    ("AXONN_TIMEOUT_SECONDS", "50"), ("AXONN_DEBUG_COLLECTIVES", "1"),
    ("AXONN_DEBUG_TOKEN_IDS", "1"), ("AXONN_PRODUCT_KERNELS", ""), ("HOME", "missing"),
    ("PYTHONIOENCODING", "ascii"),
)  # fmt: skip


def make_files() -> None:
    """In the current folder: those that `NAMES` has, good ones and bad ones."""
    for folder in FOLDERS:
        Path(folder).mkdir()
    Path("binary").write_bytes(bytes(range(256)))
    Path("binary.toml").write_bytes(bytes(range(256)))
    Path("text").write_text("abc " * 1000)
    document = {"text": "abc " * 15, "prompt": "abc"}
    Path("text.jsonl").write_text(json.dumps(document) + "\n")
    Path("log").write_text(_nccl_log())
    Path("brackets.toml").write_text("a = " + "[" * 20_000)
    Path("digits.toml").write_text("[train]\nsteps = " + "1" * 400)
    Path("good.toml").write_text("[train]\nsteps = 1\n")
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tflops", "memory_bytes",
            "eta_s")  # fmt: skip
    Path("run/metrics.jsonl").write_text(json.dumps(dict.fromkeys(keys, 1)) + "\n")


def _nccl_log() -> str:
    """The output of nccl-tests for an all-gather of 8 ranks, without the parts we do not read."""
    ranks = [f"#  Rank {rank} Group 0 Pid 9 on node0 device {rank} H100" for rank in range(8)]
    columns = ["#  size  count  type  redop  root  time  algbw  busbw  #wrong",
               "#  (B)  (elements)  (us)  (GB/s)  (GB/s)"]  # fmt: skip
    rows = []
    for num_bytes in (2**power for power in range(10, 30)):
        us = 35 + num_bytes * 7 / 8 / 100e3
        rate = num_bytes / us / 1e3
        row = f"{num_bytes} {num_bytes // 4} float none -1 {us:.3f} {rate:.4f} {rate * 7 / 8:.4f} 0"
        rows.append(row)
    return "\n".join([*ranks, *columns, *rows, ""])


def restore(files: dict[Path, bytes]) -> None:
    """Restores the current folder, whatever a case has written into it."""
    for path in sorted(Path().rglob("*"), reverse=True):  # files before their folders
        if path.is_dir() and not path.is_symlink():
            if path.name not in FOLDERS and not any(path in file.parents for file in files):
                path.rmdir()
        elif path not in files:
            path.unlink()
    for path, content in files.items():
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)


def train_models() -> None:
    """Makes a run, its model and a fine-tuned adapter in the current folder, by our commands."""
    once = ["finetune", *ONCE, "--steps", "1", "--lora", "2", "--out", "tuned"]
    longer = ["--model.family=llama", "--model.sequence_length=64", "--checkpoint.interval=1"]
    for arguments in (
        [*TRAIN.split(), *longer, "--out", "trained"],
        ["checkpoint", "export", "trained", "model"],
        once,
    ):
        case = run_case(arguments, {})
        if case["status"] != 0:
            raise RuntimeError(f"a command that should be right is not: {case}")
    Path("tuned/adapter").rename("adapter")
    shutil.rmtree("tuned")


def draw_right(random_: random.Random, turn: int) -> tuple[list[str], dict[str, str]]:
    """A valid command line, the next one of `RIGHT`, and environment variables."""
    line, options = RIGHT[turn % len(RIGHT)]
    more = [option for option in options if random_.random() < 0.3]
    random_.shuffle(more)
    arguments = " ".join((line, *more)).split()
    return arguments, dict([random_.choice(RIGHT_VARIABLES)] if random_.random() < 0.2 else [])


def draw(random_: random.Random) -> tuple[list[str], dict[str, str]]:
    """A command line, valid except for up to three options, and environment variables."""
    start = random_.choice(list(COMMANDS))
    numbers, names, others = COMMANDS[start]
    arguments = list(start)
    for _ in range(random_.choice((0, 1, 1, 1, 2, 3))):
        kind = random_.randrange(3)
        options = (numbers, names, others)[kind] or others or names
        option = random_.choice(options)
        if option in numbers:
            value = random_.choice(NUMBERS)
        elif option in names:
            value = random_.choice(NAMES)
        else:
            value = random_.choice(_values_of(option))
        arguments += [option] if option else []
        arguments += [value] if random_.random() < 0.95 else []
    if random_.random() < 0.05:
        del arguments[random_.randrange(len(arguments))]
    environment = {}
    if random_.random() < 0.2:
        name = random_.choice(VARIABLES)
        environment = (LAUNCH if name in LAUNCH else {}) | {
            name: random_.choice([v for v in NUMBERS if len(v) < 1000])
        }
    if random_.random() < 0.1:
        environment["PYTHONIOENCODING"] = "ascii"
    return arguments, environment


def _values_of(option: str) -> tuple[str, ...]:
    """The values to draw for an option that takes neither a number nor a name."""
    if "shape" in option:
        return SHAPES
    return {"--grid": GRIDS, "--log": LOGS}.get(option, NAMES)


def run_case(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Runs a case; returns its status (None: timeout), output and errors."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()
        for descriptor, name in ((1, "../out"), (2, "../err")):
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
            os.close(file)
        os.environ.update(environment)
        encoding = environment.get("PYTHONIOENCODING", "utf-8")
        sys.stdout = open(1, "w", encoding=encoding)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        from axonn_ext.cli import main

        try:
            sys.exit(main(arguments))
        except SystemExit as ended:
            os._exit(ended.code if isinstance(ended.code, int) else 1)
        except BaseException as error:
            os.write(2, f"Traceback, of {error!r}".encode(errors="replace"))
            os._exit(99)
    status = None
    while status is None and time.monotonic() < began + HANG_SECONDS:
        pid, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if pid else None
        time.sleep(0 if pid else 0.005)
    left = _end_group(child)
    if status is None:
        os.waitpid(child, 0)
    return {
        "arguments": arguments, "environment": environment, "status": status, "left": left,
        "seconds": time.monotonic() - began,
        "output": Path("../out").read_text(errors="replace"),
        "errors": Path("../err").read_text(errors="replace"),
    }  # fmt: skip


def _end_group(group: int) -> bool:
    """Kills the processes of the case; returns whether there were any."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """Runs the cases as the module's docstring says."""
    # Modules that most commands load; loading them here saves each case the time.
    import matplotlib.figure  # noqa: F401
    import rich.progress  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.tensor.parallel
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    seed, count = int(sys.argv[1]), int(sys.argv[2])
    random_ = random.Random(seed)
    make_files()
    train_models()
    files = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for number in range(count):
        turn, rest = divmod(number, RIGHT_EVERY)
        right = rest == 0
        arguments, variables = draw_right(random_, turn) if right else draw(random_)
        case = run_case(arguments, variables)
        print(json.dumps(case | {"right": right}), flush=True)
        restore(files)


if __name__ == "__main__":
    main()
