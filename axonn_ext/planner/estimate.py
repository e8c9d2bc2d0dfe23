"""Predicts a configuration by simulating the schedule of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axonn_ext.planner.job import Job
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.memory.peak import Memory
from axonn_ext.planner.simulation.events import Timeline
from axonn_ext.planner.simulation.pipelines import StageSteps, simulate_pipeline
from axonn_ext.planner.simulation.prepared_step import PreparedStep
from axonn_ext.planner.simulation.simulate import simulate


@dataclass(frozen=True)
class Estimate:
    """A configuration, and the prediction for one step of it.

    compute_s      the seconds of products, elementwise work and the optimizer
    exposed_s      axis -> the seconds for which computation waits for the axis's collectives
    peak_fraction  model flops per second (no recomputation, and half of attention, since it is
                   causal) over the machine's peak
    tokens_per_s   the rate of all ranks together
    binding        what limits the step, in words
    memory_share   the share of a rank's memory in use at the peak, including communicators and the
                   machine's reserve
    deferred_binds  whether the step may differ with a larger Overlap.deferred
    """

    job: Job
    step_time_s: float
    compute_s: float
    exposed_s: Mapping[str, float]
    optimizer_s: float
    memory: Memory
    peak_fraction: float
    tokens_per_s: float
    binding: str
    memory_share: float
    deferred_binds: bool

    @property
    def whole_peak_fraction(self) -> float:
        """The same with all of attention counted, as Megatron-LM does (see flops_per_token)."""
        model = self.job.model
        whole, half = model.flops_per_token(whole_attention=True), model.flops_per_token()
        return self.peak_fraction * whole / half


def simulate_step(
    job: Job,
    machine: Machine,
    *,
    steps: StageSteps | None = None,
    step: PreparedStep | None = None,
) -> Timeline:
    """Simulates a step of a legal job, with pipeline stages or without.

    steps: see simulate_pipeline. step: see simulate.
    """
    if job.grid.pipe == 1:
        return simulate(job, machine, step=step)
    return simulate_pipeline(job, machine, steps=steps).step


def estimate(
    job: Job,
    machine: Machine,
    memory: Memory,
    *,
    steps: StageSteps | None = None,
    step: PreparedStep | None = None,
) -> Estimate:
    """Predicts a configuration by simulating its step; see simulate_step."""
    result = simulate_step(job, machine, steps=steps, step=step)
    exposed = {axis: seconds for axis, seconds in result.exposed_s.items() if seconds > 0}
    tokens = job.batch_size * job.model.sequence_length
    flops = job.model.flops_per_token() * tokens // job.grid.size  # per rank
    return Estimate(
        job=job,
        step_time_s=result.step_time_s,
        compute_s=result.compute_s,
        exposed_s=exposed,
        optimizer_s=result.optimizer_s,
        memory=memory,
        peak_fraction=flops / result.step_time_s / machine.peak_flops[job.options.dtype],
        tokens_per_s=tokens / result.step_time_s,
        binding=_binding(result.compute_s, exposed, machine, memory),
        memory_share=_full_bytes(job, machine, memory) / machine.memory_bytes,
        deferred_binds=result.deferred_binds,
    )


def _full_bytes(job: Job, machine: Machine, memory: Memory) -> int:
    others = machine.memory_reserved_bytes + machine.communicators_bytes(job.grid, job.options)
    return memory.total + others


def _binding(
    compute_s: float, exposed_s: Mapping[str, float], machine: Machine, memory: Memory
) -> str:
    """Says what takes most of a step's time, and whether memory is nearly used up."""
    axis = max(exposed_s, key=lambda a: exposed_s[a], default="")
    limit = "compute"
    if axis and exposed_s[axis] > 0.25 * compute_s:
        limit = "the pipeline's bubble" if axis == "pipe" else f"communication over {axis}"
    if memory.total > 0.8 * machine.memory_bytes:
        limit += f"; memory ({memory.largest.replace('_', ' ')})"
    return limit
