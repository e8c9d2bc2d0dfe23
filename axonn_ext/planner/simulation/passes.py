"""Simulates the forward and backward passes of a step on one rank.

Work on the path (products, and what linear_passes.py runs with them) is sequential. The collectives
over z run alongside it, in the order in which they are issued. With overlap, this is the order in
which `axonn_ext.overlap` issues them; without it, the path waits for each.
Several axes may share a wire (the links of a GPU, or of a node). A collective over z then pauses
while the path uses its wire.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from axonn_ext.planner.job import Job
from axonn_ext.planner.memory.kept_weights import (
    held_after_recomputation,
    held_share,
    table_bytes,
    table_is_held,
)
from axonn_ext.planner.simulation.prepared_step import Part, PointOfZ, PreparedStep, Schedule, Use
from axonn_ext.planner.simulation.rank_clock import Gathers, Passes, Run
from axonn_ext.planner.step.program import has_table


class Simulation:
    """Runs a program with any number of layers and micro-batches."""

    def __init__(self, job: Job, step: PreparedStep, *, records: bool) -> None:
        self._job, self._program, self._records = job, step.program, records
        self._overlap = job.options.overlap
        self._budget = 0 if self._overlap is None else self._overlap.gathered_bytes
        self._in_stages, self._axes = job.grid.pipe > 1, step.axes
        self._items, self._schedules = step.items, step.schedules
        self._held = held_after_recomputation(job)
        layers, has_tables = step.program.num_layers, has_table(step.program)
        self._held_share = held_share(job, layers, has_table=has_tables)
        self._holds_table = table_is_held(job)

    def run_all_layers(self, numbers: Sequence[int]) -> list[Passes]:
        """Simulates all passes of steps with these numbers of micro-batches, in ascending order."""
        # If only some blocks are recomputed, the pattern repeats after this many blocks.
        layers, period = self._program.num_layers, self._program.recomputation.of
        few = 4 + (layers - 4) % period
        some = few + period * -(-4 // period)
        if layers <= some:
            return self._runs(layers, numbers)
        factor = (layers - few) / (some - few)
        lows, highs = self._runs(few, numbers), self._runs(some, numbers)
        return [low.extended(high, factor) for low, high in zip(lows, highs, strict=True)]

    def run(self, num_layers: int, num_parts: int) -> Passes:
        """Simulates all passes of a step with that many layers and micro-batches."""
        return self._runs(num_layers, (num_parts,))[0]

    def _runs(self, num_layers: int, numbers: Sequence[int]) -> list[Passes]:
        """Simulates all passes with each of the numbers of micro-batches.

        The shorter runs are the beginning of the longest one, up to where it gathers weights ahead
        that they do not use.
        """
        schedule = self._schedule(num_layers, numbers[-1])
        parts, before = schedule.parts, schedule.before
        of_each = len(parts) // numbers[-1]
        overlap = self._overlap
        prefetch, deferred = (overlap.prefetch, overlap.deferred) if overlap else (0, 0)
        gathers = Gathers(schedule, prefetch, self._budget)
        run = Run(self._axes, overlaps=overlap is not None, records=self._records)
        begun, found = 0, []
        for stop in (of_each * number for number in numbers[:-1]):
            # The last parts whose uses start no gather beyond `stop`.
            last = before[stop] - prefetch
            alike = max(0, bisect_right(before, last, hi=stop + 1) - 1)
            run.go_on(parts[begun:alike], gathers, deferred)
            shorter = run.copy()
            shorter.go_on(parts[alike:stop], gathers.first(before[stop]), deferred)
            found.append(shorter.passed())
            begun = alike
        run.go_on(parts[begun:], gathers, deferred)
        return [*found, run.passed()]

    def _schedule(self, num_layers: int, num_parts: int) -> Schedule:
        """Returns what runs, and all uses of weights, which prefetch and deferred do not change."""
        key = num_layers, num_parts, self._budget
        if key not in self._schedules:
            parts = [p for i in range(num_parts) for p in self._micro_batch(num_layers, i)]
            self._schedules[key] = self._with_uses(parts)
        return self._schedules[key]

    # --- The parts of a step ---------------------------------------------------------------------

    def _micro_batch(self, num_layers: int, index: int) -> Iterator[Part]:
        first, block, last, last_back, block_back, again_back, first_back = self._items
        recomputation = self._program.recomputation
        # When a pass ends and the next one begins, the weights of `held` layers are still gathered.
        held = self._held_share * num_layers
        of_ends = 1.0 if index == 0 or self._held_share < 1 else 0.0
        number = 2 * index
        yield Part(first, "", index, of_ends, number)
        for layer in range(num_layers):
            share = _share(layer + 1 - held) if index else 1.0
            yield Part(block, f"{layer}.", index, share, number)
        yield Part(last, "", index, 0.0 if self._holds_table else of_ends, number)
        number += 1
        # The head's weight is used again at once. A weight that exceeds the budget is evicted.
        of_head = 1.0 if table_bytes(self._job) > self._budget else 0.0
        yield Part(last_back, "", index, of_head, number, is_backward_begun=True)
        for layer in reversed(range(num_layers)):
            back = again_back if recomputation.has_block(layer) else block_back
            yield Part(back, f"{layer}.", index, _share(num_layers - held - layer), number)
        yield Part(first_back, "", index, 1.0, number)

    def _with_uses(self, parts: Sequence[Part]) -> Schedule:
        uses: list[Use] = []
        sums, before, last = [0.0], [], None
        for part in parts:
            before.append(len(uses))
            for item in part.items:
                if isinstance(item, PointOfZ) and item.kind == "use":
                    number = item.after_recomputation
                    spared = number is not None and self._held[number]
                    share = 1.0 if self._overlap is None else 0.0 if spared else part.share
                    in_pass = part.number if self._in_stages else 0
                    uses.append(Use(item.name, item.seconds * share, part, in_pass))
                    # Two uses in a row of one weight, such as the head's, take its room once.
                    sums.append(sums[-1] + (0.0 if item.weight == last else item.num_bytes))
                    last = item.weight
        return Schedule(parts, uses, sums, before)


def _share(layers: float) -> float:
    """Returns the part of one layer that a fractional number of layers covers, from 0 to 1."""
    return min(1.0, max(0.0, layers))
