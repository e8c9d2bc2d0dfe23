"""Turns the arguments of `axonn-ext plan` into a request to the planner."""

from __future__ import annotations

import argparse

from axonn_ext.calibrate.find_machine import find_machine
from axonn_ext.cli.plan import cells
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.search.axes import AxisRules
from axonn_ext.planner.search.optimizers import optimizers_of, tried_offloads, tried_zeros
from axonn_ext.planner.search.remedies import smallest_that_fits
from axonn_ext.planner.search.request import PIPELINES, Request
from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.model_files import load_model, load_optimizer
from axonn_ext.spec.optimizer import OptimizerOptions
from axonn_ext.spec.parallel import LAYOUTS
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.terminal.errors import UserError

AUTO = "auto"  # for --zero and --offload: searched


def make_request(args: argparse.Namespace) -> Request:
    """Returns the request of the arguments, which must include --gpus.

    Raises: UserError for a request that cannot be fulfilled, which says what could be. PlannerError
    for one that cannot even be searched, such as more GPUs than the machine has.
    """
    try:
        machine = _load_changed(args.machine, args.set)
        name, model = load_model(args.model, sequence_length=args.seq)
        optimizer = load_optimizer(args.model)
    except InputError as error:
        raise UserError(str(error)) from None
    fixed: dict[str, object] = {}
    if args.recompute is not None:
        fixed["recompute"] = args.recompute
    if args.overlap is not None:
        fixed["overlap"] = None if args.overlap == "off" else args.overlap
    request = Request(
        model=model,
        model_name=name,
        num_ranks=max(1, args.gpus),
        machine=machine,
        batch_size=_batch_size(args, model.sequence_length),
        dtype=args.dtype,
        layouts=LAYOUTS if args.layout is None else (args.layout,),
        fixed=fixed,
        micro_batches=None if args.micro_batches is None else (args.micro_batches,),
        top=max(args.top, args.explain or 1),
        memory_fraction=args.memory_fraction,
        max_pipe=_most_stages(args.pipe, args.grid),
        pipelines=_pipelines(args.schedule),
        optimizers=_optimizers(optimizer, machine, zero=args.zero, offload=args.offload),
        axes=args.grid,
    )
    if args.gpus < 1:
        raise UserError(
            f"--gpus: expected a whole number >= 1, got {args.gpus}; {_smallest(request)}"
        )
    return request


def _optimizers(
    own: OptimizerOptions, machine: Machine, *, zero: str | None, offload: str | None
) -> tuple[OptimizerOptions, ...]:
    """Returns the options of the optimizer to try. own: those of the model's file, or the defaults.

    Raises UserError for offload with Muon.
    """
    if own.is_muon and offload not in (None, AUTO, "none"):
        raise UserError(
            f"--offload: expected none with optim.name muon in the model's file, got {offload}"
        )
    zeros = tried_zeros() if zero == AUTO else (own.zero if zero is None else int(zero),)
    offloads = tried_offloads(machine) if offload == AUTO else (offload or own.offload,)
    return optimizers_of(own, zeros, offloads)


def _load_changed(name: str, changes: list[str]) -> Machine:
    """Returns the machine with the changes of --set. Raises InputError."""
    machine = find_machine(name)  # first without --set, to tell its mistakes apart
    try:
        return find_machine(name, changes=changes) if changes else machine
    except InputError as error:
        raise InputError(f"--set: {error}") from None


def _most_stages(pipe: int, axes: AxisRules) -> int:
    """Returns the most stages to try, from --pipe or from the condition of --grid on pipe."""
    bound = axes.most("pipe")
    if axes.names("pipe") and bound is None and pipe == 1:
        raise UserError(
            f"--grid: got {axes}; a condition on pipe without an upper bound needs --pipe N, "
            "the most stages that are tried"
        )
    return max(pipe, bound or 1)


def _pipelines(schedule: str | None) -> tuple[PipelineOptions, ...]:
    """Returns the schedules to try: all of them, or the requested one."""
    if schedule is None:
        return PIPELINES
    chosen = tuple(p for p in PIPELINES if p.schedule == schedule)
    return chosen or (PipelineOptions(schedule),)


def _smallest(request: Request) -> str:
    """Says how many GPUs would be enough."""
    least = smallest_that_fits(request)
    what = f"{request.model_name} with a batch of {request.batch_size:,} sequences"
    if least is None:
        return f"{what} fits no number of GPUs of {request.machine.name}"
    return f"{what} fits {cells.gpus(least)} of {request.machine.name}"


def _batch_size(args: argparse.Namespace, sequence_length: int) -> int:
    """Returns the number of sequences of a step."""
    if args.global_batch_tokens is None:
        return int(args.global_batch)
    sequences, rest = divmod(args.global_batch_tokens, sequence_length)
    if rest or sequences < 1:
        near = max(1, sequences) * sequence_length
        raise UserError(
            f"--global-batch-tokens: expected a multiple of the sequence length {sequence_length}, "
            f"such as {near}, got {args.global_batch_tokens}"
        )
    return int(sequences)
