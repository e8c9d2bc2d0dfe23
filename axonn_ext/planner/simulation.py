"""Simulates the forward and backward passes of a step on one rank.

What runs on the path, products and what linear_passes.py runs with them, follows one after the
other. Beside it run the collectives over z, in the order in which they are issued. With overlap,
this is the order in which `axonn_ext.overlap` issues them; without it, the path waits for each.
Several axes may share a wire (the links of a GPU, or of a node). A collective over z then pauses
while the path uses its wire.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from axonn_ext.planner.held import (
    held_after_recomputation,
    held_share,
    table_bytes,
    table_is_held,
)
from axonn_ext.planner.job import Job
from axonn_ext.planner.prepared_step import OnPath, PointOfZ, PreparedStep
from axonn_ext.planner.rank_run import Part, Passes, Run, Uses
from axonn_ext.planner.step.program import has_table


class Simulation:
    """Runs a program with any number of layers and micro-batches."""

    def __init__(self, job: Job, step: PreparedStep, *, records: bool) -> None:
        self._job, self._program, self._records = job, step.program, records
        self._overlap = job.options.overlap
        self._budget = 0 if self._overlap is None else self._overlap.gathered_bytes
        self._in_stages, self._axes = job.grid.pipe > 1, step.axes
        self._items = step.items
        self._held = held_after_recomputation(job)
        layers, has_tables = step.program.num_layers, has_table(step.program)
        self._held_share = held_share(job, layers, has_table=has_tables)
        self._holds_table = table_is_held(job)

    def run_all_layers(self, numbers: Sequence[int]) -> list[Passes]:
        """Simulates all passes of steps with these numbers of micro-batches, which ascend."""
        # Where some of several blocks are recomputed, so many blocks are what repeats itself.
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
        parts = [p for i in range(numbers[-1]) for p in self._micro_batch(num_layers, i)]
        of_each = len(parts) // numbers[-1]
        uses, uses_before = self._uses(parts)
        run = Run(self._axes, overlaps=self._overlap is not None, records=self._records)
        begun, found = 0, []
        for stop in (of_each * number for number in numbers[:-1]):
            # The last parts whose uses start no gather of what comes after `stop`.
            last = uses_before[stop] - uses.prefetch
            alike = max(0, bisect_right(uses_before, last, hi=stop + 1) - 1)
            self._go_on(run, uses, parts[begun:alike])
            shorter = run.copy()
            self._go_on(shorter, uses.first(uses_before[stop]), parts[alike:stop])
            found.append(shorter.passed())
            begun = alike
        self._go_on(run, uses, parts[begun:])
        return [*found, run.passed()]

    def _go_on(self, run: Run, uses: Uses, parts: Iterable[Part]) -> None:
        """Runs these parts after those that have run."""
        deferred = 0 if self._overlap is None else self._overlap.deferred
        for part in parts:
            run.begin(part)
            for item in part.items:
                if isinstance(item, OnPath):
                    run.path(item)
                    if self._records:
                        run.record_path(item, part)
                elif item.kind == "use":
                    uses.use(run)
                elif item.kind == "scatter":
                    run.scatter(item, part, deferred)
                else:
                    run.wait_for_z(run.over_z(item.name, item.seconds, part))

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
        # The head's weight is used again at once. A weight that exceeds the budget is given up.
        of_head = 1.0 if table_bytes(self._job) > self._budget else 0.0
        yield Part(last_back, "", index, of_head, number, is_backward_begun=True)
        for layer in reversed(range(num_layers)):
            back = again_back if recomputation.has_block(layer) else block_back
            yield Part(back, f"{layer}.", index, _share(num_layers - held - layer), number)
        yield Part(first_back, "", index, 1.0, number)

    def _uses(self, parts: Sequence[Part]) -> tuple[Uses, list[int]]:
        """Returns all uses of weights, in their order, and how many come before each part."""
        overlap = self._overlap
        uses, before = Uses(0 if overlap is None else overlap.prefetch, self._budget), []
        for part in parts:
            before.append(uses.count)
            for item in part.items:
                if isinstance(item, PointOfZ) and item.kind == "use":
                    number = item.after_recomputation
                    spared = number is not None and self._held[number]
                    share = 1.0 if overlap is None else 0.0 if spared else part.share
                    uses.add(item, share, part, in_pass=part.number if self._in_stages else 0)
        return uses, before


def _share(layers: float) -> float:
    """Returns the part of one layer that a fractional number of layers covers, from 0 to 1."""
    return min(1.0, max(0.0, layers))
