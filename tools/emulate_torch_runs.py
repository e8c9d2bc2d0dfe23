"""The runs of `make emulate-torch`: test files, each on one of the machines below.

For each machine it prints how many tests ran and passed, and how many did not run and why.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from gpu_runs import ROOT, gpu_tests

# Each of these files runs in its own process, the longest first. The others share a process and its
# ranks, as starting ranks takes longer than many tests.
LONGEST = ("fused", "overlap", "training", "triton", "products", "failures", "optim", "pipeline")


@dataclass(frozen=True)
class Machine:
    """A machine in software; its variables override those of the shell."""

    devices: int = 4
    capability: int = 90

    @property
    def name(self) -> str:
        return f"{self.devices} GPU{'s' * (self.devices > 1)} of sm_{self.capability}"

    @property
    def variables(self) -> dict[str, str]:
        return {"GPU_MACHINE_DEVICES": str(self.devices), "GPU_MACHINE_SM": str(self.capability)}


WHOLE, ONE, OLDER = Machine(), Machine(devices=1), Machine(capability=80)


@dataclass(frozen=True)
class Run:
    """The tests marked gpu of some files, on a machine; `only` is pytest's -k."""

    paths: tuple[str, ...]  # from the root
    machine: Machine = WHOLE
    only: str = ""

    @property
    def name(self) -> str:
        return f"{', '.join(Path(path).name for path in self.paths)} on {self.machine.name}"


def files(*subjects: str) -> tuple[str, ...]:
    return tuple(f"python_tests/gpu/test_gpu_{subject}.py" for subject in subjects)


# The fused ops on a GPU that has only Triton's kernels.
OLDER_TRAINING = Run(files("training"), OLDER, "fused and not again")
# Ranks that share one GPU: all tests of two files, and some of a third.
_WHOLE_FILES = ("communicators", "layers")
SHARED = Run(
    files(*_WHOLE_FILES, "fused"), ONE,
    " or ".join([*(f"test_gpu_{subject}" for subject in _WHOLE_FILES),
                 "(values_and_gradients and small-2)"]),
)  # fmt: skip


def all_runs() -> list[Run]:
    """All runs in starting order, long ones early, so that none of them runs alone at the end."""
    longest = [Run((path,)) for path in files(*LONGEST)]
    rest = tuple(path for path in gpu_tests() if path not in files(*LONGEST))
    return [Run(rest), *longest, OLDER_TRAINING, SHARED]


@dataclass
class Counts:
    """Test results as the plugin writes them; `ended` lists the runs that ended abnormally."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)

    def add(self, written: Path, of: str, status: int) -> None:
        found = json.loads(written.read_text()) if written.exists() else None
        if found is None or status != (1 if found["failed"] else 0):
            self.ended.append(f"{of}: pytest ended with {status}")
        if found is None:
            return
        self.passed += found["passed"]
        self.failed += found["failed"]
        self.skipped.update(found["skipped"])

    def is_right(self) -> bool:
        return bool(self.passed) and not self.failed and not self.ended

    def show(self, machine: str) -> None:
        run = self.passed + len(self.failed)
        print(f"emulate-torch: {machine}: {run} tests marked gpu ran, {self.passed} passed")
        for reason, number in self.skipped.most_common():
            print(f"emulate-torch: {number:4} not run: {reason}")
        for name in self.failed:
            print(f"emulate-torch: failed: {name}")
        for name in self.ended:
            print(f"emulate-torch: {name}")


@dataclass(frozen=True)
class Starter:
    """How to start pytest.

    command      makes the command from pytest's arguments
    environment  makes the environment from the folder in which the ranks meet
    folder       the working directory; outside the checkout, to import the installed package
    """

    command: Callable[[Sequence[str | Path]], list[str | Path]]
    environment: Callable[[str], dict[str, str]]
    folder: Path


def execute(run: Run, counted: Path, options: Sequence[str], starter: Starter) -> tuple[int, str]:
    """Returns pytest's exit status and output; the plugin writes the counts to `counted`."""
    start = time.monotonic()
    wire = counted.with_suffix(".wire")
    wire.mkdir()
    selection = ["-k", run.only] if run.only else []
    paths = [ROOT / path for path in run.paths]
    done = subprocess.run(
        starter.command([*paths, "-q", *selection, *options, "--counts", counted]),
        cwd=starter.folder, env=starter.environment(str(wire)) | run.machine.variables,
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    took = f"{run.name}: {time.monotonic() - start:.0f} s\n"
    return done.returncode, done.stdout + took


def run_all(scratch: Path, options: Sequence[str], starter: Starter) -> int:
    """Executes the runs, MAX_JOBS at a time, and prints the results; returns the exit status."""
    counts: dict[str, Counts] = {}
    jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(jobs) as pool:
        started = {}
        for number, run in enumerate(all_runs()):
            counted = scratch / f"{number}.json"
            started[pool.submit(execute, run, counted, options, starter)] = run, counted
        for done in as_completed(started):
            (run, counted), (status, output) = started[done], done.result()
            print(f"\n--- {run.name}\n{output}", flush=True)
            counts.setdefault(run.machine.name, Counts()).add(counted, run.name, status)
    for machine in sorted(counts, key=lambda name: name != WHOLE.name):
        counts[machine].show(machine)
    return 0 if all(found.is_right() for found in counts.values()) else 1
