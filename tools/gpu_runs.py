"""What gpu_check.py starts, in processes of its own, and what it asks about this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_cases import TRAINING, Case

ROOT = Path(__file__).resolve().parent.parent
CASES_SCRIPT = ROOT / "tools" / "gpu_cases.py"
CASE_SECONDS = 120
TUNE_SECONDS = 300  # cold: Triton compiles, too

Json = dict[str, Any]


def execute(command: Sequence[str], deadline: float) -> int:
    """The exit status; 124 when the time was up. What the command has started ends with it."""
    seconds = max(deadline - time.monotonic(), 1.0)
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True) as process:
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            return 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """This process's, with the checkout in front and no measurements of earlier runs."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # Ranks of one process have streams that wait for each other: none may share a queue.
    queues = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    return {**os.environ, **queues, "PYTHONPATH": path, "AXONN_CACHE_DIR": ""}


def count_tests(xml: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Passed and failed tests, and the name and reason of each that was skipped."""
    counts = {"passed": 0, "failed": 0}
    skipped = []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        skip = case.find("skipped")
        if skip is not None:
            name = f"{case.get('classname')}.{case.get('name')}"
            skipped.append((name, skip.get("message") or "no reason given"))
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        else:
            counts["passed"] += 1
    if not any(counts.values()) and not skipped:
        counts["failed"] = 1  # nothing was collected
    return counts, skipped


def run_case(case: Case) -> list[Json] | None:
    """The rows of a case, from processes of its own; None if one failed or took too long."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                f"--nproc-per-node={case.ranks}"]  # fmt: skip
    encoded = json.dumps(dataclasses.asdict(case))
    return measured([*launcher, str(CASES_SCRIPT), "--case", encoded])


def run_training(grid: str, steps: int, overlap: str, deadline: float) -> Json | None:
    """The first and last loss and the last speed of a short run; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        chosen = TRAINING | {"train.steps": steps, "overlap.mode": overlap}
        settings = [f"--{key}={value}" for key, value in chosen.items()]
        command = [sys.executable, "-m", "axonn_ext", "train", "--grid", grid, "--out", str(out),
                   *settings]  # fmt: skip
        if execute(command, deadline) != 0:
            return None
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    last = metrics[-1]
    return {
        "grid": grid, "overlap": overlap, "steps": steps, "first_loss": metrics[0]["loss"],
        "last_loss": last["loss"], "tokens_per_s": last["tokens_per_s"], "tflops": last["tflops"],
        "memory_bytes": last["memory_bytes"],
    }  # fmt: skip


def gpu_tests() -> list[str]:
    """The files that hold tests marked gpu; first those of our kernels, if the time is short."""
    files = [
        path for path in sorted((ROOT / "python_tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]  # fmt: skip
    files.sort(key=lambda path: path.name not in ("test_gpu_fused.py", "test_gpu_products.py"))
    return [str(path.relative_to(ROOT)) for path in files]


def find_sanitizer() -> str | None:
    folders = [os.path.join(os.environ.get(name, ""), "bin") for name in ("CUDA_HOME", "CUDA_PATH")]
    search = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    return shutil.which("compute-sanitizer", path=search)


def why_no_fused() -> str:
    """Why the fused GEMMs cannot run here; empty if they can."""
    program = (
        f"import sys; sys.path.insert(0, {str(CASES_SCRIPT.parent)!r}); "
        "import gpu_cases; print(gpu_cases.why_no_fused())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() if found.returncode == 0 else found.stderr.strip()[-200:]


def measured(
    command: Sequence[str], *, option: str = "--rows", seconds: float = CASE_SECONDS
) -> Any:
    """What a command writes into the JSON file that it is given; None if it failed or was late.

    A command that ends with 1 because it says, row by row, which results are wrong has not failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        status = execute([*command, option, str(path)], time.monotonic() + seconds)
        if status not in (0, 1) or not path.exists():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
    rows = content["rows"] if isinstance(content, dict) else content
    return content if status == 0 or not all_right(rows) else None


def written(command: Sequence[str], deadline: float) -> tuple[int, list[Json]]:
    """The status of a command, and the rows that it had written until it ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        status = execute([*command, "--rows", str(path)], deadline)
        return status, json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def all_right(rows: Sequence[Json]) -> bool:
    return all(row.get("correct", True) for row in rows)
