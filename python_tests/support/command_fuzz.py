"""Runs command lines one after another, each in a forked child of a process that has loaded Torch.

`python command_fuzz.py SEED COUNT` in a folder of its own; prints a line of JSON for each case.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
SMALL = {
    "model.hidden_size": 32, "model.num_layers": 1, "model.num_heads": 4,
    "model.sequence_length": 16, "data.max_bytes": 20_000, "train.device": "cpu",
    "train.threads": 1, "train.steps": 1, "train.batch_size": 4, "train.eval_interval": 0,
}  # fmt: skip
# Of numbers that are taken as they are, none makes a command take long.
NUMBERS = ("0", "-1", "nan", "inf", "1e300", "1e30", "3000000000", "9" * 400, "9" * 5000, "x", "",
           "1.5", "0x10", "\udcff", "1", "2", "3")  # fmt: skip
NAMES = ("", "missing", "folder", "binary", "text", "brackets.toml", "digits.toml", "binary.toml",
         "good.toml", "run", "empty", "/dev/full", "/dev/null", "/proc/x", "~nosuch/x", "x" * 300,
         "x" * 5000, "a\udcff", "f\u00fc", "none/x", "new one", "$x^$", "[/red]", "%s",
         "new.toml", "new.json", "new.png", "folder.json")  # fmt: skip
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
OF_FIVE = ("--grid", "5x1x1", "--shapes")  # ranks, which divide no shape: nothing is timed
OF_BENCH = (("--world", "--threads", "--rounds"), ("--json", "--plot"))
# Of each command: what it needs to be right, options that take a number, a name, others.
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
    ("bench", "gemm"): ((), ("--json",), ("--shapes", "--dtype")),
    ("bench", "link-overlap"): (("--chunks",), ("--json",), ("--shape",)),
    ("verify",): ((), ("--json",), ("--what",)),
    ("doctor",): ((), ("--json",), ("--what",)),
}  # fmt: skip
VARIABLES = ("AXONN_TIMEOUT_SECONDS", "AXONN_SYMMETRIC_MEMORY_BYTES", "AXONN_CACHE_DIR",
             "AXONN_DEBUG_COLLECTIVES", "AXONN_DEBUG_TOKEN_IDS", "AXONN_FUSED_NCCL_SMS",
             "AXONN_PRODUCT_KERNELS", "AXONN_EMULATED_LINKS", "AXONN_TIMEOUT", "RANK",
             "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOME",
             "XDG_CACHE_HOME")  # fmt: skip
LAUNCH = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
          "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}  # fmt: skip


def make_files() -> None:
    """In the current folder: those that `NAMES` has, good ones and bad ones."""
    for folder in ("folder", "folder.json", "run", "empty"):
        Path(folder).mkdir()
    Path("binary").write_bytes(bytes(range(256)))
    Path("binary.toml").write_bytes(bytes(range(256)))
    Path("text").write_text("abc " * 1000)
    Path("brackets.toml").write_text("a = " + "[" * 20_000)
    Path("digits.toml").write_text("[train]\nsteps = " + "1" * 400)
    Path("good.toml").write_text("[train]\nsteps = 1\n")
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "tflops", "memory_bytes",
            "eta_s")  # fmt: skip
    Path("run/metrics.jsonl").write_text(json.dumps(dict.fromkeys(keys, 1)) + "\n")


def draw(random_: random.Random) -> tuple[list[str], dict[str, str]]:
    """A command line, right but for up to three options, and variables."""
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
            values = GRIDS if option == "--grid" else SHAPES if "shape" in option else NAMES
            value = random_.choice(values)
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


def run_case(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What became of it: status (None: it took too long), output, errors, and what it left."""
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
    while status is None and time.monotonic() < began + LIMIT_S:
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
    """Whether any process of the case was still there; it is not any more."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """As the module's text says."""
    import matplotlib.figure  # noqa: F401
    import rich.progress  # noqa: F401
    import torch.distributed  # noqa: F401

    seed, count = int(sys.argv[1]), int(sys.argv[2])
    random_ = random.Random(seed)
    make_files()
    for _ in range(count):
        print(json.dumps(run_case(*draw(random_))), flush=True)


if __name__ == "__main__":
    main()
