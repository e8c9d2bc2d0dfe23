"""`make gpu-check`: builds, tests, times and trains on the GPUs of this machine.

STAGE=build|test|sanitize|bench|train|all (default all). Needs a CUDA torch in the Python that runs
it, and no network. Writes benchmarks/results/<gpu>.json after every case, and prints a table. What
cannot be run here is listed with the reason, never counted as passed. Exit status: 0 nothing
failed; 1 something did; 2 there is no GPU, or no such stage. docs/gpu_check.md tells more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_cases import CASES, GEMM_SHAPES, LINK_SHAPES, RUNS, TRAINING, Case

ROOT = Path(__file__).resolve().parent.parent
CASES_SCRIPT = ROOT / "tools" / "gpu_cases.py"
RESULTS = ROOT / "benchmarks" / "results"
STAGES = ("build", "test", "sanitize", "bench", "train")
STAGE_SECONDS = 8 * 60
CASE_SECONDS = 120

Json = dict[str, Any]


@dataclass
class Report:
    """What was found so far, on one kind of GPU."""

    machine: Json = field(default_factory=dict)
    stages: dict[str, Json] = field(default_factory=dict)
    rows: list[Json] = field(default_factory=list)
    link: list[Json] = field(default_factory=list)
    gemm: list[Json] = field(default_factory=list)
    not_run: list[dict[str, str]] = field(default_factory=list)

    def leave_out(self, stage: str, what: str, reason: str) -> None:
        self.not_run.append({"stage": stage, "what": what, "reason": reason})

    def end_stage(self, stage: str, began: float, **counts: Any) -> None:
        seconds = round(time.monotonic() - began, 1)
        self.stages[stage] = {"seconds": seconds, **counts}

    @property
    def failed(self) -> bool:
        return any(stage.get("failed", 0) for stage in self.stages.values())


def stages_of(text: str) -> tuple[str, ...]:
    """The stages that STAGE asks for. Raises ValueError for an unknown one."""
    if text in ("", "all"):
        return STAGES
    if text not in STAGES:
        raise ValueError(f"STAGE must be one of {', '.join((*STAGES, 'all'))}, got {text!r}")
    return (text,)


def file_name(gpu: str) -> str:
    """As nvidia-h100-80gb-hbm3.json."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def merge(old: Json, new: Report, stages: Sequence[str]) -> Json:
    """The content of the file: what these stages found, and of an earlier run the other stages."""
    kept = old if old.get("machine") == new.machine else {}
    result: Json = {
        "machine": new.machine,
        "stages": {
            **{k: v for k, v in kept.get("stages", {}).items() if k not in stages}, **new.stages
        },
        "rows": new.rows if "bench" in stages else kept.get("rows", []),
        "link": new.link if "bench" in stages else kept.get("link", []),
        "gemm": new.gemm if "bench" in stages else kept.get("gemm", []),
        "not_run": [
            *(item for item in kept.get("not_run", []) if item["stage"] not in stages),
            *new.not_run,
        ],
    }  # fmt: skip
    return result


def write(path: Path, content: Json) -> None:
    """Replaces the file whole: a reader, or a stop in between, never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Json:
    """What an earlier run wrote; nothing if there was none."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


# --- Stages --------------------------------------------------------------------------------------


@dataclass
class Check:
    """A run: the stages asked for, and the file that is written after every case."""

    stages: tuple[str, ...]
    path: Path
    report: Report
    earlier: Json

    def save(self) -> None:
        write(self.path, merge(self.earlier, self.report, self.stages))

    def run(self) -> None:
        steps = {
            "build": self.build, "test": self.test, "sanitize": self.sanitize,
            "bench": self.bench, "train": self.train,
        }  # fmt: skip
        for stage in self.stages:
            print(f"== {stage}", flush=True)
            began = time.monotonic()
            self.report.end_stage(stage, began, **steps[stage](began + STAGE_SECONDS))
            self.save()

    def build(self, deadline: float) -> Json:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        return {"failed": int(execute(command, deadline) != 0)}

    def test(self, deadline: float) -> Json:
        if not importlib.util.find_spec("pytest"):
            self.report.leave_out("test", "python_tests marked gpu", "pytest is not installed")
            return {}
        found: Json = {"passed": 0, "failed": 0, "failures": []}
        for path in gpu_tests():
            if time.monotonic() > deadline:
                self.report.leave_out("test", path, "the stage's time was up")
                continue
            self._add_tests("test", found, path, deadline)
        return found

    def sanitize(self, deadline: float) -> Json:
        """The fused kernels on small shapes under compute-sanitizer.

        Alone: it may run kernels one after the other, so none may wait for another's flags.
        """
        program, reason = find_sanitizer(), why_no_fused()
        if program is None or reason:
            reason = reason or "compute-sanitizer was not found in CUDA_HOME or on the PATH"
            self.report.leave_out("sanitize", "fused GEMMs", reason)
            return {}
        found: Json = {"passed": 0, "failed": 0, "failures": []}
        for tool in ("memcheck", "racecheck"):
            prefix = (program, "--tool", tool, "--error-exitcode", "9")
            selection = ("-k", "test_gemm and 264x200x136")
            self._add_tests(
                "sanitize", found, "python_tests/test_gpu_fused.py", deadline,
                prefix=prefix, selection=selection,
            )  # fmt: skip
        return found

    def _add_tests(
        self,
        stage: str,
        found: Json,
        path: str,
        deadline: float,
        *,
        prefix: Sequence[str] = (),
        selection: Sequence[str] = (),
    ) -> None:
        """Runs a file's tests in a process of its own: a kernel that fails ends CUDA in it."""
        with tempfile.TemporaryDirectory() as folder:
            xml = Path(folder) / "tests.xml"
            # Without addopts, whose plugins need not be installed here.
            command = [*prefix, sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "gpu", "-q",
                       path, *selection, f"--junitxml={xml}"]  # fmt: skip
            status = execute(command, deadline)
            if not xml.exists():
                found["failed"] += 1
                found["failures"].append(f"{path}: pytest ended with {status} and no report")
                return
            counts, skipped = count_tests(xml.read_text(encoding="utf-8"))
        if status not in (0, 1, 5) or (status == 1 and not counts["failed"]):
            counts["failed"] += 1
            found["failures"].append(f"{' '.join(prefix)} {path}: ended with {status}".strip())
        found["passed"] += counts["passed"]
        found["failed"] += counts["failed"]
        for name, reason in skipped:
            self.report.leave_out(stage, name, reason)
        self.save()

    def bench(self, deadline: float) -> Json:
        failures = self._measure("link", LINK_SHAPES, deadline)
        if reason := why_no_fused():
            self.report.leave_out("bench", "fused GEMMs", reason)
        else:
            failures += self._measure("gemm", GEMM_SHAPES, deadline)
        for case in CASES:
            if time.monotonic() + CASE_SECONDS > deadline:
                self.report.leave_out("bench", case.name, "the stage's time was up")
                continue
            print(case.name, flush=True)
            rows = run_case(case)
            if rows is None or not all(row["correct"] for row in rows):
                failures.append(case.name)
            self.report.rows += rows or []
            self.save()
        return {"failed": len(failures), "failures": failures}

    def _measure(
        self, kind: str, shapes: Sequence[tuple[int, int, int]], deadline: float
    ) -> list[str]:
        """Times what gpu_cases.py has under --kind; returns what failed."""
        failures = []
        for shape in shapes:
            name = f"{kind} {','.join(map(str, shape))}"
            if time.monotonic() + CASE_SECONDS > deadline:
                self.report.leave_out("bench", name, "the stage's time was up")
                continue
            text = ",".join(map(str, shape))
            rows = measured([sys.executable, str(CASES_SCRIPT), f"--{kind}", text])
            if rows is None:
                failures.append(name)
            getattr(self.report, kind).extend(rows or [])
            self.save()
        return failures

    def train(self, deadline: float) -> Json:
        failures: list[str] = []
        runs: list[Json] = []
        for axis, ranks, steps, overlap in RUNS:
            name = f"training, {steps} steps, {axis}={ranks}, overlap {overlap}"
            if not importlib.util.find_spec("rich"):
                self.report.leave_out("train", name, "rich is not installed")
                continue
            found = run_training(f"{axis}={ranks}", steps, overlap, deadline)
            if found is None or not found["last_loss"] < found["first_loss"]:
                failures.append(name)
            runs += [found] if found else []
        # Without a run nothing has passed.
        return (
            {"failed": len(failures), "failures": failures, "runs": runs}
            if (runs or failures)
            else {}
        )


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
    """The files that hold tests marked gpu; last the one whose kernels wait for each other."""
    files = [
        path for path in sorted((ROOT / "python_tests").glob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]  # fmt: skip
    files.sort(key=lambda path: path.name == "test_gpu_fused.py")
    return [str(path.relative_to(ROOT)) for path in files]


def find_sanitizer() -> str | None:
    folders = [os.path.join(os.environ.get(name, ""), "bin") for name in ("CUDA_HOME", "CUDA_PATH")]
    search = os.pathsep.join([*folders, os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    return shutil.which("compute-sanitizer", path=search)


def why_no_fused() -> str:
    """Why the fused GEMMs cannot run here; empty if they can."""
    program = (
        "import torch; from axonn_ext import _library; "
        "print('' if torch.cuda.get_device_capability() == (9, 0) else 'they are for sm_90', "
        "'' if _library.cuda_sm90 else 'axonn_ext was built without CUTLASS')"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() if found.returncode == 0 else found.stderr.strip()[-200:]


def measured(command: Sequence[str]) -> list[Json] | None:
    """What a command writes into the file that it is given as its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        deadline = time.monotonic() + CASE_SECONDS
        if execute([*command, "--rows", str(path)], deadline) != 0 or not path.exists():
            return None
        return list(json.loads(path.read_text(encoding="utf-8")))


# --- The table -----------------------------------------------------------------------------------


def table_of(content: Json) -> list[tuple[str, str, str]]:
    """What was run, how it went, and the numbers."""
    lines = []
    for stage, found in content["stages"].items():
        failed = found.get("failed")
        nothing = failed is None or (failed == 0 and found.get("passed") == 0)
        state = "not run" if nothing else f"{failed} failed" if failed else "passed"
        detail = f"{found['passed']} tests passed, " if "passed" in found else ""
        detail += "".join(f"{name}, " for name in found.get("failures", ()))
        lines.append((stage, state, f"{detail}{found['seconds']} s"))
        for run in found.get("runs", ()):
            detail = (
                f"loss {run['first_loss']:.3f} -> {run['last_loss']:.3f}, "
                f"{run['tokens_per_s']:,.0f} tokens/s, {run['tflops']:.1f} Tflop/s"
            )
            lines.append((f"training, {run['grid']}", "measured", detail))
    for row in content["link"]:
        detail = (
            f"overlap {row['overlap_efficiency']:.0%} at {row['link_gbps']:.0f} GB/s, emulated link"
        )
        n = row["shape"]["N"]
        lines.append(
            (f"link-overlap N={n} {row['algorithm']} {row['chunks']} chunks", "measured", detail)
        )
    for row in content["gemm"]:
        what = f"gemm {','.join(map(str, row['shape'].values()))} {row['dtype']} {row['layout']}"
        detail = (
            f"{row['fused_us']:,.0f} us, {row['fused_over_torch']:.3f} x torch.mm, "
            f"waiting {row['waiting_over_fused']:.3f} x"
        )
        lines.append((what, "measured", detail))
    for row in content["rows"]:
        what = f"{row['op']} {','.join(map(str, row['shape'].values()))} {row['dtype']} " + (
            f"x={row['grid']['x']} {row['algorithm']}"
        )
        time_us = "-" if row["median_us"] is None else f"{row['median_us']:,.0f} us"
        ratio = "" if row["ratio_to_floor"] is None else f", {row['ratio_to_floor']:.2f} x floor"
        lines.append((what, "right" if row["correct"] else "WRONG", time_us + ratio))
    lines += [(item["what"], "not run", item["reason"]) for item in content["not_run"]]
    return lines


def show(content: Json) -> None:
    """A table, with rich where it is installed."""
    lines = table_of(content)
    if importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        table = Table("what", "result", "detail", title=content["machine"]["gpu"], box=None)
        for line in lines:
            table.add_row(*line)
        Console().print(table, markup=False)
        return
    print(content["machine"]["gpu"])
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    for what, state, detail in lines:
        print(f"{what:<{widths[0]}}  {state:<{widths[1]}}  {detail}")


def describe() -> Json:
    """The GPUs and the software, without a look into the package, which may not be built yet."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        "python": sys.version.split()[0],
    }


def main(settings: Mapping[str, str]) -> int:
    """Runs the stages that STAGE names."""
    try:
        stages = stages_of(settings.get("STAGE", ""))
    except ValueError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    problem = why_not_here()
    if problem:
        print(f"gpu-check: {problem}; nothing was run", file=sys.stderr)
        return 2
    machine = describe()
    path = RESULTS / file_name(machine["gpu"])
    check = Check(stages, path, Report(machine), read(path))
    check.run()
    show(merge(check.earlier, check.report, stages))
    print(f"written: {path.relative_to(ROOT)}")
    return int(check.report.failed)


def why_not_here() -> str:
    """Why nothing can be run on this machine; empty if it can."""
    if not importlib.util.find_spec("torch"):
        return f"{sys.executable} has no torch"
    import torch

    if torch.cuda.is_available():
        return ""
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"torch {torch.__version__} ({cuda}) sees no GPU on this machine"


if __name__ == "__main__":
    sys.exit(main(os.environ))
