"""Estimates steps by closed forms, which select the candidates to simulate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from axonn_ext.planner.job import Job, Options
from axonn_ext.planner.machines.machine import Machine
from axonn_ext.planner.memory.kept_weights import held_share, share_gathered_again
from axonn_ext.planner.simulation.costs import Costs
from axonn_ext.planner.simulation.linear_passes import LinearPasses, Unit
from axonn_ext.planner.simulation.updates import closed_form_s as closed_form_of_optimizer
from axonn_ext.planner.step.blocks import block_backward, block_forward
from axonn_ext.planner.step.linears import collective_of_weight
from axonn_ext.planner.step.optimizer import optimizer_work
from axonn_ext.planner.step.parameters import parameters_of_rank
from axonn_ext.planner.step.program import ends_of
from axonn_ext.planner.step.rank import Rank
from axonn_ext.planner.step.stage_models import shares_of
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.pipeline import bubble_seconds
from axonn_ext.spec.recompute import Recomputation

_NONE, _FULL = Recomputation(), Recomputation(blocks=1)


class Pieces(NamedTuple):
    """The seconds of parts of a micro-batch, which do not depend on recomputation or overlap.

    forward, backward, gather, scatter: one block on the path and over z.
    attention: the part of a block's forward that lies between the Linears of its attention.
    fixed, fixed_z: what runs once per micro-batch, on the path and over z.
    sums: the sums of all gradients over the remaining axes after backward.
    wire_*: the part of these times in which collectives on the path use z's wire.
    """

    forward: float
    backward: float
    gather: float
    scatter: float
    attention: float
    wire_forward: float
    wire_backward: float
    fixed: float = 0.0
    fixed_z: float = 0.0
    sums: float = 0.0
    wire_fixed: float = 0.0


class _Path(NamedTuple):
    """The seconds of a block on the path, and the seconds in which each axis uses its wire."""

    forward: float
    backward: float
    attention: float
    busy_forward: Mapping[str, float]
    busy_backward: Mapping[str, float]


class _OverZ(NamedTuple):
    """The seconds of a block's collectives over z, and the other axes on z's wire."""

    gather: float
    scatter: float
    beside: frozenset[str]


class ClosedForms:
    """The closed forms on one machine.

    Many grids have blocks that take equally long on the path: those with the same x, y and rows,
    whatever z, data and pipe are. Their times are computed once and kept.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._numbers: dict[ModelConfig, int] = {}  # of models: quicker keys than the models
        self._last: tuple[ModelConfig, int] | None = None
        self._paths: dict[tuple[object, ...], _Path] = {}
        self._over_z: dict[tuple[object, ...], _OverZ] = {}
        self._whole: dict[tuple[object, ...], Pieces] = {}
        self._updates: dict[tuple[object, ...], float] = {}

    def seconds(self, job: Job, *, all_held: bool = False) -> float:
        """Returns the seconds of a step of a legal job; all_held: see closed_form_s."""
        return closed_form_s(self._pieces_of(job), job, all_held=all_held) + self._optimizer_s(job)

    def least_seconds(self, job: Job, *, all_held: bool = False) -> float:
        """Returns a lower bound of `seconds` that holds for every recomputation policy."""
        return least_s(self._pieces_of(job), job, all_held=all_held) + self._optimizer_s(job)

    def _number_of(self, model: ModelConfig) -> int:
        """Returns a distinct number for each model."""
        if self._last is None or self._last[0] is not model:
            self._last = model, self._numbers.setdefault(model, len(self._numbers))
        return self._last[1]

    def _pieces_of(self, job: Job) -> Pieces:
        options, number = job.options, self._number_of(job.model)
        key = (number, job.grid, options.layout, options.save_gathered, options.algorithm,
               options.micro_batches, options.dtype, options.pipeline, job.batch_size)  # fmt: skip
        if key not in self._whole:
            self._whole[key] = self._with_ends(job, self.blocks_of(job))
        return self._whole[key]

    def _optimizer_s(self, job: Job) -> float:
        """Returns the seconds of AdamW; in a pipeline, those of the last stage."""
        options, last = job.options, job.grid.pipe - 1
        overlaps, number = options.overlap is not None, self._number_of(job.model)
        key = (number, job.grid, options.layout, options.dtype, options.optimizer, overlaps,
               options.pipeline.chunks)  # fmt: skip
        if key not in self._updates:
            costs = Costs(self._machine, job.grid, options.dtype)
            work = optimizer_work(Rank(job, last))
            self._updates[key] = closed_form_of_optimizer(work, costs, overlaps=overlaps)
        return self._updates[key]

    def blocks_of(self, job: Job) -> Pieces:
        """Returns the pieces of a legal job's blocks; embedding, head and sums take no time.

        With these, closed_form_s is at most what it is with all pieces.
        """
        grid, path = job.grid, self._path_of(job)
        key = (grid.size, grid.x, grid.y, grid.z, job.options.dtype, self._number_of(job.model))
        if key not in self._over_z:
            costs, rank = Costs(self._machine, grid, job.options.dtype), Rank(_plain(job))
            gather, scatter = (
                sum(
                    costs.collective(c)
                    for w in job.model.block_linears
                    if (c := collective_of_weight(rank, w, kind)) is not None
                )
                for kind in ("all_gather", "reduce_scatter")
            )
            self._over_z[key] = _OverZ(gather, scatter, costs.beside("z"))
        over_z = self._over_z[key]
        return Pieces(
            path.forward, path.backward, over_z.gather, over_z.scatter, path.attention,
            *(sum(t for axis, t in busy.items() if axis in over_z.beside)
              for busy in (path.busy_forward, path.busy_backward)),
        )  # fmt: skip

    def _path_of(self, job: Job) -> _Path:
        """Returns the times of a block on the path, which z does not change."""
        grid, options, number = job.grid, job.options, self._number_of(job.model)
        defers = grid.pipe > 1 and options.pipeline.defers
        splits = grid.x * grid.y > 1  # else blocks are the same in every layout
        key = (number, grid.size, grid.x, grid.y, job.rows, options.dtype, defers,
               splits and (options.layout, options.save_gathered, options.algorithm))  # fmt: skip
        if key not in self._paths:
            self._paths[key] = self._make_path(_plain(job))
        return self._paths[key]

    def _make_path(self, job: Job) -> _Path:
        rank, costs = Rank(job), Costs(self._machine, job.grid, job.options.dtype)
        passes = LinearPasses(job, self._machine, costs)
        forward = passes.units(block_forward(rank))
        backward = passes.units(block_backward(rank))
        attention = next(unit for unit in forward if unit.tasks[0].scores is not None)
        return _Path(
            sum(unit.seconds for unit in forward), sum(unit.seconds for unit in backward),
            attention.seconds, _busy(forward), _busy(backward),
        )  # fmt: skip

    def _with_ends(self, job: Job, blocks: Pieces) -> Pieces:
        """Adds the parts outside the blocks; in a pipeline, those of the last stage."""
        job, last = _plain(job), job.grid.pipe - 1
        rank, costs = Rank(job, last), Costs(self._machine, job.grid, job.options.dtype)
        passes = LinearPasses(job, self._machine, costs)
        ends = [unit for part in ends_of(rank) for unit in passes.units(part)]
        over_z = (c for unit in ends for c in (unit.gather, unit.scatter) if c is not None)
        num_bytes = parameters_of_rank(job, last) * job.options.width
        return blocks._replace(
            fixed=sum(unit.seconds for unit in ends),
            fixed_z=sum(map(costs.collective, over_z)),
            wire_fixed=sum(t for a, t in _busy(ends).items() if a in costs.beside("z")),
            sums=costs.all_reduce("data", num_bytes),
        )


def _plain(job: Job) -> Job:
    """Returns the job without the options that the closed forms add themselves."""
    options = job.options
    plain = Options(
        layout=options.layout, dtype=options.dtype, micro_batches=options.micro_batches,
        pipeline=options.pipeline, save_gathered=options.save_gathered,
        algorithm=options.algorithm, overlap=None,
    )  # fmt: skip
    return replace(job, options=plain)


def _busy(units: Iterable[Unit]) -> dict[str, float]:
    """Returns the seconds for which each axis uses its wire on the path."""
    busy: dict[str, float] = {}
    for unit in units:
        for done in unit.passes:
            for axis, seconds in done.busy.items():
                busy[axis] = busy.get(axis, 0.0) + seconds
    return busy


def closed_form_s(pieces: Pieces, job: Job, *, all_held: bool = False) -> float:
    """Returns the seconds of a step without the optimizer.

    all_held: whether, with overlap, all weights are held gathered, as if the budget had no limit.

    Products and the collectives of activations are on the path. The collectives of weights and
    gradients run alongside it, as far as it is long enough. In a pipeline, the bubble assumes that
    all stages take as long as the slowest one, and that messages are free.

    Source: the volumes of arXiv:2305.13525, section 4, each over its axis' bandwidth; see
    bubble_seconds.
    """
    again = job.options.recomputation
    return _step_s(pieces, job, again=again, hides=again, all_held=all_held)


def least_s(pieces: Pieces, job: Job, *, all_held: bool = False) -> float:
    """Returns a lower bound of closed_form_s that holds for every recomputation policy."""
    return _step_s(pieces, job, again=_NONE, hides=_FULL, all_held=all_held)


def _step_s(
    pieces: Pieces, job: Job, *, again: Recomputation, hides: Recomputation, all_held: bool
) -> float:
    """Returns closed_form_s if `again` takes time, and `hides` hides sums of gradients."""
    options, parts = job.options, job.options.micro_batches
    shares = shares_of(job)
    if job.grid.pipe == 1:
        layers = job.model.num_layers
        passes = _passes_s(pieces, job, layers, parts, again, all_held)
    else:
        layers = max(share.num_layers for share in shares)
        without_ends = pieces._replace(fixed=0.0, fixed_z=0.0, wire_fixed=0.0)
        one = max(
            _passes_s(pieces, job, shares[-1].num_layers, 1, again, all_held),
            _passes_s(without_ends, job, layers, 1, again, all_held),
        )
        passes = parts * one + _bubble_s(job, one)
    beside = 0.0
    if options.overlap is not None:
        beside = _again_s(pieces, hides, layers) + layers * pieces.backward
    if job.num_parts > 1:
        # A reduce-scatter in the gradients' dtype sends half as much. The all-gather that sends
        # the other half is part of the optimizer.
        times = parts if options.optimizer.zero > 1 else 1
        return passes + times * max(0.0, pieces.sums / 2 - beside)
    wide = options.overlap is not None and options.width == 2  # gradients are sent in fp32
    return passes + max(0.0, (2 if wide else 1) * pieces.sums - beside)


def _bubble_s(job: Job, one: float) -> float:
    """Returns how long stages idle that take `one` seconds for a micro-batch, a third each for
    forward, input gradient and weight gradient."""
    options = job.options.pipeline
    schedule = options.schedule
    if schedule == "message_driven":
        schedule = "zero_bubble" if options.defers else "1f1b"
    return bubble_seconds(
        schedule, stages=job.grid.pipe, forward=one / 3, backward=one / 3, weight=one / 3,
        chunks=options.chunks,
    )  # fmt: skip


def _again_s(pieces: Pieces, again: Recomputation, layers: int) -> float:
    """Returns the seconds on the path for the recomputation in that many blocks."""
    of_attention = layers * pieces.attention if again.attention else 0.0
    return again.num_blocks(layers) * pieces.forward + of_attention


def _passes_s(
    pieces: Pieces, job: Job, layers: int, parts: int, again: Recomputation, all_held: bool
) -> float:
    """Returns the seconds of the forward and backward passes of `parts` micro-batches."""
    options, recomputed = job.options, again.num_blocks(layers)
    on_path = pieces.fixed + layers * (pieces.forward + pieces.backward)
    on_path += _again_s(pieces, again, layers)
    if options.overlap is None:
        gathers = layers * (1 + options.reshard_after_forward) + recomputed
        over_z = pieces.fixed_z + gathers * pieces.gather + layers * pieces.scatter
        return parts * (on_path + over_z)
    # Each pass gathers the weights once, except those that the budget keeps at the turn between two
    # passes.
    again_z, held = 0.0, 1.0
    if job.grid.z > 1 and not all_held:
        again_z = share_gathered_again(job) * recomputed / layers if recomputed else 0.0
        held = held_share(job, layers, has_table=job.grid.pipe == 1)
    passes = (2 + again_z) * parts - (2 * parts - 1) * held
    over_z = parts * (pieces.fixed_z + layers * pieces.scatter) + passes * layers * pieces.gather
    if over_z:
        path = pieces.wire_fixed + layers * (pieces.wire_forward + pieces.wire_backward)
        path += recomputed * pieces.wire_forward
        over_z += parts * path
    return max(parts * on_path, over_z)
