"""Simulates what follows the forward and backward passes of a step on one rank.

These are the sums of gradients that backward does not hide, the gradient norm, and the optimizer.
"""

from __future__ import annotations

from axonn_ext.planner.job import Job
from axonn_ext.planner.simulation.events import Timeline
from axonn_ext.planner.simulation.prepared_step import PreparedStep
from axonn_ext.planner.simulation.rank_clock import Passes
from axonn_ext.planner.simulation.streams import Streams
from axonn_ext.planner.simulation.updates import optimizer_step
from axonn_ext.planner.step.gradients import ORDER
from axonn_ext.planner.step.tasks import Collective
from axonn_ext.spec.grid import COMMUNICATING

_MOST_UNDER_WAY = 2  # buckets of ZeRO whose sums are under way at a time, as in optim/zero


class AfterPasses:
    """What follows the passes of a program, however long they took."""

    def __init__(self, job: Job, step: PreparedStep, *, records: bool) -> None:
        program, costs = step.program, step.costs
        self._overlaps, self._records = job.options.overlap is not None, records
        self._others = program.num_micro_batches - 1
        self._sums = [(c, costs.collective(c)) for c in program.gradient_sums]
        self._sums_in_each = [(c, costs.collective(c)) for c in program.sums_in_each]
        self._norms = [(c, costs.collective(c)) for c in program.norm_sums]
        self._optimizer = optimizer_step(program.optimizer, costs, overlaps=self._overlaps)

    def finish(self, passes: Passes) -> Timeline:
        """Returns the whole step, given its passes.

        Delays by the sums of earlier micro-batches (zero=2) are added here as well, as one piece.
        """
        streams = Streams(
            passes.end_s,
            passes.compute_s,
            passes.exposed_s,
            micro_batch=self._others,
            records=self._records,
        )
        streams.free["z"] = passes.z_free_s
        self._sum_gradients(streams, passes)
        for axis in COMMUNICATING:
            streams.wait_for(axis, streams.free[axis])
        for c, seconds in self._norms:
            streams.wait_for(c.axis, streams.issue(c, seconds))
        self._update(streams)
        return Timeline(
            streams.now, streams.computed, dict(streams.exposed), self._optimizer.update_s,
            (*passes.events, *streams.events), passes.deferred_binds,
        )  # fmt: skip

    def _sum_gradients(self, streams: Streams, passes: Passes) -> None:
        """Adds the sums of gradients after backward.

        With overlap, the last micro-batch's backward fills buckets of weight gradients, which cross
        the data axis whenever no other axis uses its wire. A bucket is full when backward has
        computed its share of all bytes. The last one never fills up: it is sent once backward has
        ended and its gradients have crossed z. The gradients that cross other axes, those of biases
        and norms, are small and follow then; the ranks' order check comes last.
        """
        sums, others = [*self._sums_in_each, *self._sums], self._others
        if not self._overlaps:
            for c, seconds in self._sums_in_each if others else ():
                streams.wait_for(c.axis, streams.issue(c, others * seconds))
            for c, seconds in sums:
                streams.wait_for(c.axis, streams.issue(c, seconds))
            return
        buckets = [s for s in sums if _is_bucket(s[0])]
        backward = streams.now - passes.backward_s
        left = max(0.0, 1 - passes.used_s / backward) if backward else 1.0  # the wire's free share
        free = 0.0  # counts only the seconds since backward began in which the wire is free
        crossing_z = max(0.0, passes.z_free_s - streams.now)
        filled, whole = 0, sum(c.num_bytes for c, _ in buckets)
        for c, seconds in buckets:
            filled += c.num_bytes
            computed = left * backward * filled / whole
            start = max(free, computed + crossing_z * (filled == whole))
            free = start + seconds
            _beside_backward(streams, c, start, free, left=left, began=passes.backward_s)
        for c, seconds in sums:
            if not _is_bucket(c):
                streams.issue(c, seconds)
        if others and self._sums_in_each:
            forward = left * (passes.end_s / (others + 1) - backward)
            self._delay_others(streams, free - left * backward, forward)

    def _delay_others(self, streams: Streams, late: float, forward: float) -> None:
        """Adds the delays by the sums of all micro-batches but the last, with overlap.

        late: how long after backward the sums of a micro-batch end. At most _MOST_UNDER_WAY buckets
        continue during the next forward pass, in which the wire is free for `forward` seconds; the
        all-reduces over other axes before them are waited for.
        """
        slowest = max(seconds for c, seconds in self._sums_in_each if c.axis == "data")
        hidden = max(0.0, min(_MOST_UNDER_WAY * slowest, forward))
        delays = {"data": max(0.0, late - hidden)}
        for c, seconds in self._sums_in_each:
            if c.axis != "data":
                delays[c.axis] = delays.get(c.axis, 0.0) + seconds
        for axis, seconds in delays.items():
            streams.free[axis] += self._others * seconds

    def _update(self, streams: Streams) -> None:
        """Adds the optimizer, and the all-gathers of parameters that it does not hide."""
        step = self._optimizer
        for c, seconds in step.waits:
            streams.wait_for(c.axis, streams.issue(c, seconds))
        start = streams.now
        streams.compute("optimizer", step.update_s)
        for began, ended in step.gathers:
            streams.free["data"] = start + ended
            name = "parameters: all_gather"
            streams.record("data", name, start + began, start + ended, ended - began)
        streams.wait_for("data", start + step.seconds)


def _is_bucket(c: Collective) -> bool:
    """Whether it is a bucket of gradients that crosses the data axis, which backward may hide."""
    return c.axis == "data" and c.what != ORDER


def _beside_backward(
    streams: Streams, c: Collective, start: float, end: float, *, left: float, began: float
) -> None:
    """Runs a collective from `start` to `end` on the data axis.

    `start` and `end` count only seconds in which the wire is free: a share (`left`) of the backward
    pass, which began at `began`, and all time after it.
    """
    whole = left * (streams.now - began)

    def real(seconds: float) -> float:
        return began + seconds / left if seconds < whole else streams.now + seconds - whole

    streams.free["data"] = real(end)
    streams.record("data", f"{c.what}: {c.kind}", real(start), real(end), end - start)
