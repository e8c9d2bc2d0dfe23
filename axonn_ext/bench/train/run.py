"""The work of one process: builds systems, checks their losses, and measures time or memory."""

from __future__ import annotations

import dataclasses
import gc
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_ext.bench.benchmark import take_turns
from axonn_ext.bench.train.check import NUM_STEPS, Trace, Verdict, compare, first_steps
from axonn_ext.bench.train.plan import BF16, SINGLE, MemoryUse, Plan, Row, SystemSpec
from axonn_ext.bench.train.systems import State, System, build_system, whole_initial_state
from axonn_ext.calibrate.find_machine import find_machine, machine_of_gpu
from axonn_ext.calibrate.measure import Ranks, Timing, ranks_of

Build = Callable[[SystemSpec, Plan, State | None], System]
_KIB = 1024


@dataclass(frozen=True)
class Tried:
    """A system after its first steps.

    memory: on GPUs, the peak of these steps on the rank where it is largest; None on CPUs.
    """

    system: System
    verdict: Verdict
    memory: MemoryUse | None

    def sentence(self) -> str:
        text = self.verdict.problem or f"trains right, loss error {self.verdict.loss_error:.0e}"
        if self.memory is not None:
            text += f", peak memory {self.memory.peak_bytes / 2**20:,.0f} MiB"
        return f"{self.system.name}: {text}"


def time_systems(
    plan: Plan,
    on_round: Callable[[], None] = lambda: None,
    *,
    tell: Callable[[str], None] = lambda text: None,
    build: Build = build_system,
) -> list[Row]:
    """Returns a row for each system of the plan; all ranks must call this.

    Only systems that train like `single` are timed; every plan has `single`. tell: called on every
    rank with a sentence about each system, before any is timed.
    """
    tried = try_systems(plan, ranks_of(plan.device), tell, build=build)
    right = [each.system for each in tried if each.verdict.problem is None]
    timings = time_steps(right, plan.device, plan.rounds, on_round)
    peak = peak_of(plan.device, plan.workload.dtype)
    return [
        _row(spec, plan, each, timings, peak)
        for spec, each in zip(plan.systems, tried, strict=True)
    ]


def try_systems(
    plan: Plan,
    ranks: Ranks,
    tell: Callable[[str], None] = lambda text: None,
    *,
    build: Build = build_system,
) -> list[Tried]:
    """Builds all systems, and compares their first steps with those of `single`, the first one."""
    _load_libraries(plan)
    state = whole_initial_state(plan)
    found: list[Tried] = []
    reference: Trace | None = None
    for spec in plan.systems:
        before = _begin_peak(plan.device)
        system = build(spec, plan, state)
        trace = first_steps(system, ranks)
        memory = _end_peak(plan.device, before, ranks)
        reference = reference or trace
        verdict = compare(trace, reference, dtype=plan.workload.dtype)
        found.append(Tried(system, verdict, memory))
        tell(found[-1].sentence())
    return found


def time_steps(
    systems: Sequence[System], device: str, rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing[None]]:  # fmt: skip
    """Times a step of each system, in turns; all ranks must call this."""
    calls = {system.name: _call(system) for system in systems}
    return take_turns(calls, device, rounds=rounds, on_round=on_round)


def peak_of(device: str, dtype: str) -> float | None:
    """Returns the peak of this rank's GPU in flop/s, as the trainer knows it; None if unknown."""
    if device != "cuda":
        return None
    name = machine_of_gpu(torch.cuda.get_device_name())
    return None if name is None else find_machine(name).peak_flops.get(dtype)


def _begin_peak(device: str) -> int:
    """Returns the bytes allocated on this rank's GPU, and starts recording their peak."""
    if device != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _end_peak(device: str, before: int, ranks: Ranks) -> MemoryUse | None:
    """Returns the peak since `_begin_peak` on the rank where it is largest; None on CPUs."""
    if device != "cuda":
        return None
    peaks = ranks.exchange(torch.cuda.max_memory_allocated() - before)
    return MemoryUse(int(max(peak for (peak,) in peaks)), 0)


def weigh_system(plan: Plan) -> MemoryUse:
    """Measures the peak memory of some steps of the plan's only system, on CPUs.

    All ranks must call this. It must run in new processes, since memory freed by another system
    would be reused.
    """
    (spec,) = plan.systems
    _load_libraries(plan)
    before = _status("VmRSS")
    system = build_system(spec, plan, None)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    call = _call(system)
    for _ in range(NUM_STEPS):
        call()
    own = torch.tensor([_status("VmHWM") - before, _status("RssShmem")])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    peak, shared = max((t.tolist() for t in everyone), key=lambda pair: pair[0])
    return MemoryUse(peak, shared)


def _call(system: System) -> Callable[[], None]:
    """Returns a step with the system's number of threads; an empty one if this rank has no part."""
    step, num_threads = system.step, system.num_threads

    def call() -> None:
        if step is None:
            return
        if num_threads == 1:
            step()
            return
        torch.set_num_threads(num_threads)
        step()
        torch.set_num_threads(1)

    return call


def _load_libraries(plan: Plan) -> None:
    """Triggers torch's one-time loads and allocations, so that no system is charged for them."""
    dtype = torch.bfloat16 if plan.workload.dtype == BF16 else torch.float32
    layer = torch.nn.Linear(64, 64, device=plan.device, dtype=dtype)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(64, 64, device=plan.device, dtype=dtype)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(plan.workload.model.hidden_size, device=plan.device))


def _status(name: str) -> int:
    """Returns a number from /proc/self/status in bytes."""
    match = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no line {name}: memory cannot be measured here")
    return int(match[1]) * _KIB


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _row(
    spec: SystemSpec,
    plan: Plan,
    tried: Tried,
    timings: dict[str, Timing[None]],
    peak_flops: float | None,
) -> Row:
    verdict, workload = tried.verdict, plan.workload
    row = Row(
        system=spec.name,
        kind=spec.kind,
        grid=spec.grid.as_dict() if spec.grid else None,
        num_ranks=1 if spec.kind == SINGLE else plan.num_ranks,
        num_threads=tried.system.num_threads,
        batch_size=workload.batch_size,
        dtype=workload.dtype,
        device=plan.device,
        loss_error=_finite(verdict.loss_error),
        norm_error=_finite(verdict.norm_error),
        problem=verdict.problem,
        memory=tried.memory,
    )
    timing = timings.get(spec.name)
    if timing is None:
        return row
    tokens_per_s = workload.tokens_per_step / timing.median_us * 1e6
    flops = tokens_per_s * workload.model.flops_per_token()
    return dataclasses.replace(
        row,
        median_ms=timing.median_us / 1e3,
        min_ms=timing.min_us / 1e3,
        spread_ms=timing.iqr_us / 1e3,
        rounds=len(timing.samples_us),
        tokens_per_s=tokens_per_s,
        ratio_to_single=timings[SINGLE].median_us / timing.median_us,
        tflops=flops / 1e12,
        peak_fraction=None if peak_flops is None else flops / (peak_flops * row.num_ranks),
    )
