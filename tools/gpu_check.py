"""`make gpu-check`: builds, tests, times and trains on the GPUs of this machine.

BUDGET   total seconds, of which each stage gets a share (default: each stage has ample time)
STAGE    stages to run, or their kinds (build, verify, test, sanitize, bench, train), separated by
         commas (default: all)
RESULTS  folder for the results (default: a folder named after the GPU, in benchmarks/results)
ANYWAY   1: start every stage, even without a GPU, to check that it starts and ends

Needs a CUDA torch in the Python that runs it, and no network. A stage that fails, hangs or crashes
does not affect the others. Stages that do not run are listed with the reason, and never count as
passed. Exit status: 0 if nothing failed and something passed, 2 if there is no GPU or a setting is
wrong, 1 otherwise. See docs/gpu_check.md.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gpu_found import last_line
from gpu_runs import ROOT, execute, how_it_ended
from gpu_schedule import Check, read_earlier
from gpu_stages import (
    BUDGET_SECONDS,
    SANITIZER,
    SM_90,
    TOOLS,
    TWO_GPUS,
    Row,
    Stage,
    StageMaker,
    find_sanitizer,
)

RESULTS = ROOT / "benchmarks" / "results"
PROBE_SHARE = 1 / 6  # of the budget, at most; importing torch from a cold disk takes long
AMPLE_PROBE_SECONDS = 5 * 60.0
MAX_RANKS = 8  # the largest group that "fused" supports

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The settings, parsed."""

    stages: frozenset[str]  # names and kinds; empty: all
    budget: float | None = None
    results: Path | None = None
    anyway: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Request:
        """Parses the settings. Raises ValueError for an invalid one."""
        words = [word for word in settings.get("STAGE", "").split(",") if word]
        table = StageMaker(Path(), Path()).table()
        kinds = list(dict.fromkeys(stage.kind for row in table for stage in row))
        names = [stage.name for row in table for stage in row]
        for word in words:
            if word not in ("all", *kinds, *names):
                raise ValueError(
                    f"STAGE must be all or some of {', '.join(dict.fromkeys(kinds + names))}, "
                    f"separated by commas, got {word!r}"
                )
        text = settings.get("BUDGET", "")
        try:
            budget = float(text) if text else None
        except ValueError:
            budget = math.nan
        if budget is not None and not 0 < budget < math.inf:
            raise ValueError(f"BUDGET must be a number of seconds above 0, got {text!r}")
        stages = frozenset() if "all" in words else frozenset(words)
        folder = settings.get("RESULTS")
        anyway = settings.get("ANYWAY", "") not in ("", "0")
        return cls(stages, budget, Path(folder).resolve() if folder else None, anyway)

    def asks_for(self, stage: Stage) -> bool:
        return not self.stages or not self.stages.isdisjoint((stage.name, stage.kind))

    def names(self, stage: Stage) -> bool:
        return bool(self.stages) and self.asks_for(stage)


# --- The machine ----------------------------------------------------------------------------------


def look(log: Path, seconds: float) -> Json:
    """The findings of gpu_probe.py; `problem` says why nothing can run here."""
    found = log.with_suffix(".json")
    command = [sys.executable, str(TOOLS / "gpu_probe.py"), str(found)]
    status = execute(command, seconds, log)
    machine: Json = {"problem": ""}
    if found.exists():
        machine = json.loads(found.read_text(encoding="utf-8"))
    if status not in (0, 2) and "gpu" not in machine:
        ended = f"it had not ended after {seconds:.0f} s" if status is None else (
            f"it {how_it_ended(status)}"
        )  # fmt: skip
        machine["problem"] = f"torch could not be asked for GPUs: {ended}: {last_line(log)}"
    return machine


def seconds_of_probe(budget: float | None) -> float:
    return AMPLE_PROBE_SECONDS if budget is None else budget * PROBE_SHARE


def file_name(gpu: str) -> str:
    """The GPU's name as a file name, e.g. nvidia-h100-80gb-hbm3."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def why_lacking(need: str, machine: Json) -> str:
    """Why a stage with this need cannot run; empty if it can."""
    if need == TWO_GPUS:
        return "" if machine["gpus"] > 1 else "it needs two GPUs"
    if need == SM_90:
        return "" if "9.0" in machine["architectures"] else "it needs a GPU of sm_90"
    if need == SANITIZER:
        where = "compute-sanitizer was not found in CUDA_HOME or on the PATH"
        return "" if find_sanitizer() else where
    return "" if importlib.util.find_spec(need) else f"{need} is not installed"


def why_not(stage: Stage, machine: Json, request: Request) -> str:
    """Why a stage will not run; empty if it will."""
    extension = machine.get("extension", "")
    if stage.kind == "build":
        needed = request.names(stage) or extension
        return "" if needed else "there is no need: the compiled modules load"
    if request.anyway:
        return ""
    if extension:
        return f"the compiled modules cannot be used: {extension}"
    return next((why for need in stage.needs if (why := why_lacking(need, machine))), "")


def share_of(budget: float, stages: Sequence[Stage]) -> float:
    """The factor that scales these stages' seconds to the budget.

    Most stages end early, so the shares of all stages add up to more than the budget. If only a few
    stages run, they share the whole budget.
    """
    return budget / min(sum(stage.seconds for stage in stages), BUDGET_SECONDS)


def clear(stages: Sequence[Stage], check: Check) -> None:
    """Removes these stages' results of an earlier run."""
    for stage in stages:
        for path in (stage.rows, check.log_of(stage), check.results / f"{stage.name}.jsonl"):
            path.unlink(missing_ok=True)


def run_all(check: Check, rows: Sequence[Row], request: Request, scratch: Path) -> None:
    """Runs the rows of stages, or says why not; probes the extension again after a build."""
    for row in rows:
        reasons = {stage: why_not(stage, check.machine, request) for stage in row}
        for stage, reason in reasons.items():
            if reason:
                check.skip(stage, reason)
        chosen = tuple(stage for stage, reason in reasons.items() if not reason)
        check.run_row(chosen)
        if any(stage.kind == "build" for stage in chosen):
            seconds = min(seconds_of_probe(request.budget), check.left())
            found = look(scratch / "probe-built.log", seconds)
            extension = found.get("extension", found["problem"])
            check.machine |= {"extension": extension, "fused": found.get("fused", False)}
            check.say(f"behind the build: {extension or 'the compiled modules load'}")


def make_check(request: Request, machine: Json, scratch: Path, began: float) -> Check:
    results = request.results or RESULTS / file_name(machine.get("gpu", "no GPU"))
    results.mkdir(parents=True, exist_ok=True)
    deadline = None if request.budget is None else began + request.budget
    (scratch / "cache").mkdir()
    return Check(
        results, scratch / "cache", deadline, machine=machine,
        earlier=read_earlier(results / "summary.json", machine), began=began,
    )  # fmt: skip


def check_machine(request: Request, began: float, scratch: Path) -> int:
    """Probes the machine and runs the stages; returns the exit status."""
    machine = look(scratch / "probe.log", seconds_of_probe(request.budget))
    if machine["problem"] and not request.anyway:
        print(f"gpu-check: {machine['problem']}; nothing was run", file=sys.stderr)
        return 2
    ranks = min(1 << (int(machine.get("gpus", 1)).bit_length() - 1), MAX_RANKS)
    check = make_check(request, machine, scratch, began)
    shutil.copy(scratch / "probe.log", check.results / "machine.log")
    told = {key: text for key, text in machine.items() if text and key != "extension"}
    check.say(", ".join(f"{key} {text}" for key, text in told.items()))
    versions = tuple(machine.get("architectures", ("9.0",)))
    fused = bool(machine.get("fused", True))
    table = StageMaker(check.results, scratch, versions, ranks, fused=fused).table()
    rows = [tuple(stage for stage in row if request.asks_for(stage)) for row in table]
    stages = [stage for row in rows for stage in row]
    clear(stages, check)
    if request.budget is not None:
        built = machine | {"extension": ""}
        counted = [stage for stage in stages if not why_not(stage, machine, request)
                   or not why_not(stage, built, request)]  # fmt: skip
        check.scale = share_of(request.budget, counted or stages)
    try:
        run_all(check, rows, request, scratch)
    finally:
        check.show()
    return 0 if check.right else 1


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(settings: Mapping[str, str]) -> int:
    """Runs the stages that the settings ask for; returns the exit status."""
    began = time.monotonic()
    try:
        request = Request.of(settings)
    except ValueError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _exit)  # end the running stages and show the table
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        return check_machine(request, began, Path(scratch))


if __name__ == "__main__":
    sys.exit(main(os.environ))
