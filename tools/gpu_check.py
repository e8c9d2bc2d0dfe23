"""`make gpu-check`: builds, tests, times and trains on the GPUs of this machine.

STAGE=build|test|sanitize|bench|published|train|all (default all). Needs a CUDA torch in the Python
that runs it, and no network. Writes <gpu>.json after every case, in benchmarks/results or the
folder that RESULTS names; at the end a table, there and on the terminal, and charts. What cannot be
run here is listed with the reason, never counted as passed. Exit status: 0 nothing failed; 1
something did; 2 there is no GPU, or no such stage. docs/gpu_check.md tells more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_cases import (
    CASES,
    GEMM_SHAPES,
    LINK_SHAPES,
    PUBLISHED_CASES,
    RUNS,
    TUNED_ROWS,
    published_command,
    tune_command,
)
from gpu_runs import (
    CASE_SECONDS,
    CASES_SCRIPT,
    ROOT,
    TUNE_SECONDS,
    all_right,
    count_tests,
    execute,
    find_sanitizer,
    gpu_tests,
    measured,
    run_case,
    run_training,
    why_no_fused,
    written,
)
from gpu_table import markdown_of, show

RESULTS = ROOT / "benchmarks" / "results"
STAGES = ("build", "test", "sanitize", "bench", "published", "train")
STAGE_SECONDS = 8 * 60
BUILD_SECONDS = 40 * 60  # CUTLASS, on two cores: about half of it
MAX_RANKS = 8  # of a group that "fused" serves
TIME_IS_UP = "the stage's time was up"
# Results by the stage that finds them.
FINDINGS = {"rows": "bench", "link": "bench", "gemm": "bench", "tune": "published",
            "published": "published"}  # fmt: skip

Json = dict[str, Any]


@dataclass
class Report:
    """What was found so far, on one kind of GPU."""

    machine: Json = field(default_factory=dict)
    stages: dict[str, Json] = field(default_factory=dict)
    rows: list[Json] = field(default_factory=list)
    link: list[Json] = field(default_factory=list)
    gemm: list[Json] = field(default_factory=list)
    tune: list[Json] = field(default_factory=list)
    published: list[Json] = field(default_factory=list)
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
        **{
            name: getattr(new, name) if stage in stages else kept.get(name, [])
            for name, stage in FINDINGS.items()
        },
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

    @property
    def content(self) -> Json:
        return merge(self.earlier, self.report, self.stages)

    def save(self) -> None:
        write(self.path, self.content)

    def draw(self) -> None:
        """A chart of each op beside the file, where matplotlib is installed."""
        stages = [stage for stage in ("bench", "published") if stage in self.stages]
        if not stages or not (self.report.rows or self.report.published):
            return
        if not importlib.util.find_spec("matplotlib"):
            self.report.leave_out(stages[0], "charts", "matplotlib is not installed")
        else:
            command = [sys.executable, str(CASES_SCRIPT), "--plot", str(self.path), "--rows", "-"]
            if execute(command, time.monotonic() + CASE_SECONDS) != 0:
                self.report.leave_out(stages[0], "charts", "they could not be drawn; see above")
        self.save()

    def run(self) -> None:
        steps = {
            "build": self.build, "test": self.test, "sanitize": self.sanitize,
            "bench": self.bench, "published": self.published, "train": self.train,
        }  # fmt: skip
        for stage in self.stages:
            print(f"== {stage}", flush=True)
            began = time.monotonic()
            seconds = BUILD_SECONDS if stage == "build" else STAGE_SECONDS
            self.report.end_stage(stage, began, **steps[stage](began + seconds))
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
                self.report.leave_out("test", path, TIME_IS_UP)
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
            # Our kernels alone, whose mangled names have our namespace; torch asks the driver for
            # what it may lack, and those errors are none.
            prefix = (program, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no",
                      "--kernel-name", "kernel_substring=axonn")  # fmt: skip
            selection = ("-k", "test_gemm and 264x200x136")
            self._add_tests(
                "sanitize", found, "python_tests/gpu/test_gpu_fused.py", deadline,
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
            if status == 124 and not xml.exists():  # what it had found by then is lost
                what = " ".join([*prefix, path])
                self.report.leave_out(stage, what, f"{TIME_IS_UP} before its tests had ended")
                return
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
            if not self._has_time("bench", case.name, deadline):
                continue
            rows = run_case(case)
            if rows is None or not all(row["correct"] for row in rows):
                failures.append(case.name)
            self.report.rows += rows or []
            self.save()
        return {"failed": len(failures), "failures": failures}

    def _measure(
        self, kind: str, shapes: Sequence[tuple[int, int, int]], deadline: float
    ) -> list[str]:
        """Times what gpu_cases.py has under --kind; returns what failed.

        In one process, as long as it lives: a kernel that fails ends CUDA in it.
        """
        failures: list[str] = []
        left = [",".join(map(str, shape)) for shape in shapes]
        while left and time.monotonic() + CASE_SECONDS <= deadline:
            print(kind, *left, flush=True)
            command = [sys.executable, str(CASES_SCRIPT), f"--{kind}", ";".join(left)]
            status, rows = written(command, deadline)
            getattr(self.report, kind).extend(rows)
            self.save()
            left = left[len({tuple(row["shape"].values()) for row in rows}) :]
            if status == 124:
                break
            if status != 0 or left:
                failures.append(f"{kind} {left[0]}" if left else f"{kind}: ended with {status}")
                left = left[1:]
        for text in left:
            self.report.leave_out("bench", f"{kind} {text}", TIME_IS_UP)
        return failures

    def published(self, deadline: float) -> Json:
        """The published layer sizes: what tuning wins, and on several GPUs what the ops take."""
        if not importlib.util.find_spec("rich"):
            self.report.leave_out("published", "all of it", "rich is not installed")
            return {}
        failures: list[str] = []
        for m in TUNED_ROWS:
            name = f"tune published:{m}"
            if self._has_time("published", name, deadline, TUNE_SECONDS):
                command = tune_command(m)
                self._keep(name, command, self.report.tune, failures, seconds=TUNE_SECONDS)
        ranks = min(1 << (int(self.report.machine["gpus"]).bit_length() - 1), MAX_RANKS)
        if ranks < 2:
            self.report.leave_out("published", "ag-gemm, gemm-rs, gemm-ar", "they need two GPUs")
        else:
            self._time_published(ranks, deadline, failures)
        found = bool(self.report.tune or self.report.published or failures)
        return {"failed": len(failures), "failures": failures} if found else {}

    def _time_published(self, ranks: int, deadline: float, failures: list[str]) -> None:
        """The ops beside torch's symmetric memory; where that fails, without."""
        fused = not why_no_fused()
        for op, m in PUBLISHED_CASES:
            name = f"{op} published:{m} x={ranks}"
            for baseline in (True, False):
                if not self._has_time("published", name, deadline):
                    break
                named = f"{name} beside torch-symm-mem" if baseline else name
                command = published_command(op, m, ranks, fused=fused, baseline=baseline)
                if self._keep(named, command, self.report.published, failures):
                    break

    def _has_time(
        self, stage: str, name: str, deadline: float, seconds: float = CASE_SECONDS
    ) -> bool:
        if time.monotonic() + seconds <= deadline:
            print(name, flush=True)
            return True
        self.report.leave_out(stage, name, TIME_IS_UP)
        return False

    def _keep(
        self,
        name: str,
        command: Sequence[str],
        rows: list[Json],
        failures: list[str],
        *,
        seconds: float = CASE_SECONDS,
    ) -> bool:
        """Adds the rows that a command of axonn-ext writes; whether there are any."""
        content = measured(command, option="--json", seconds=seconds)
        if content is None or not all_right(content["rows"]):
            failures.append(name)
        if content is not None:
            rows += content["rows"]
        self.save()
        return content is not None

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
    path = Path(settings.get("RESULTS") or RESULTS) / file_name(machine["gpu"])
    check = Check(stages, path, Report(machine), read(path))
    check.run()
    check.draw()
    page = path.with_suffix(".md")
    page.write_text(markdown_of(check.content), encoding="utf-8")
    show(check.content)
    print(f"written: {path}, {page}")
    return int(check.report.failed)


def why_not_here() -> str:
    """Why nothing can be run on this machine; empty if it can."""
    if not importlib.util.find_spec("torch"):
        return f"{sys.executable} has no torch"
    import torch

    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm, and these are NVIDIA's GPUs' checks"
    if torch.cuda.is_available():
        return ""
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"torch {torch.__version__} ({cuda}) sees no GPU on this machine"


if __name__ == "__main__":
    sys.exit(main(os.environ))
