"""Keeps the collectives of weights and gradients off the critical path of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from axonn_ext import _C
from axonn_ext.nn.sharded import ShardedModule, ShardedParameter, axes_left, sharded_parameters
from axonn_ext.optim.gradients import sum_over_ends
from axonn_ext.optim.zero import BlockingExchange, all_shards, shards_of
from axonn_ext.overlap.busy_sms import NCCL_SMS, BusySms
from axonn_ext.overlap.exchange import LaneExchange
from axonn_ext.overlap.host_lane import HostLane
from axonn_ext.overlap.lane import Lane
from axonn_ext.overlap.stream_lane import StreamLane
from axonn_ext.overlap.sums import BucketedSums, ScatteredSums
from axonn_ext.overlap.transport import C10dTransport, NcclTransport
from axonn_ext.overlap.watch import Watch
from axonn_ext.overlap.weights import GatheredWeights
from axonn_ext.ranks.grid import AxisGroup, Grid
from axonn_ext.spec import settings
from axonn_ext.spec.grid import SUM_ORDER
from axonn_ext.spec.parallel import Overlap

if TYPE_CHECKING:
    from axonn_ext._cuda import CommunicatorGrid


class Orchestrator:
    """Gathers a model's weights before they are used, and sums its gradients during backward.

        with Orchestrator(model, Overlap(prefetch=2)) as orchestrator:
            for step in ...:
                for micro_batch in all but the last:
                    with orchestrator.no_sync():
                        loss(micro_batch).backward()
                loss(the last).backward()
                orchestrator.sync_gradients()       instead of axonn_ext.sync_gradients
                clip, optimizer step, zero_grad

    Weights that are split over z are gathered over z in the order in which earlier steps used them
    in forward and backward. Their gradients are reduce-scattered over z while backward runs, and
    these sums are complete when backward returns. All gradients are summed over the other axes in
    buckets, which start during the backward pass outside `no_sync`. From then until
    `sync_gradients`, a gradient that is being summed is not in `grad`. A backward pass outside
    no_sync that is not the last one of the step only causes more communication.

    Only the program decides which collectives are issued and in which order; timing does not
    matter. Ranks that run the same program therefore issue the same collectives. All sums have a
    fixed order, and `set_wait_at_once` does not change any bit.

    On GPUs, collectives go over the grid's own NCCL communicators, or over its c10d groups: see
    Overlap. With the former, a failed collective aborts those of all ranks, and every rank gets an
    error; with the latter, c10d's watchdog ends the process.

    All ranks must make the same orchestrators in the same order. A process may have several, each
    for its own modules. torch.utils.checkpoint can be used. Gradients must be computed by
    `backward`, not by torch.autograd.grad. A CUDA graph may capture a whole step, from `end_step`
    to `sync_gradients`, after one step has run without capture; not with ZeRO.

    Raises:
        ValueError: the parameters lie on several grids or devices, or belong to another
            orchestrator already; or options of GPUs are set for parameters on the CPU.
        RuntimeError: own communicators are required but some rank cannot have them; or a rank does
            not take part in making them within AXONN_TIMEOUT_SECONDS.
        CommunicationError (from any later call, backward included; on GPUs from `sync_gradients`
            and `settle`): a collective failed, took more than AXONN_TIMEOUT_SECONDS, or ranks
            issued different collectives.
    """

    def __init__(self, model: nn.Module, overlap: Overlap | None = None) -> None:
        self.overlap = overlap or Overlap()
        self._parameters = list(sharded_parameters(model))
        grid = _only_grid(self._parameters)
        self._device = _only_device(self._parameters)
        split = [p for p in self._parameters if grid.size("z") > 1 and _is_split_over_z(p)]
        self._by_id = {id(p.parameter): p for p in self._parameters}
        self._modules = _owners(model, {id(p.parameter) for p in split})
        self._recorder = _C.Lanes()
        self._lanes = self._make_lanes(grid, {"z"} if split else set())
        self._buckets = BucketedSums(self._lanes, bucket_bytes=self.overlap.bucket_bytes)
        self._exchange = LaneExchange(self._lanes, BlockingExchange(grid, self._device))
        self._syncs = True
        # The number of gradients still missing for each gathered weight, by id of the parameter.
        self._gradients_to_come: Counter[int] = Counter()
        self._graph_task = -1
        self._weights: GatheredWeights | None = None
        self._scattered: ScatteredSums | None = None
        if split:
            self._scattered = ScatteredSums(self._lanes["z"], deferred=self.overlap.deferred)
            self._weights = GatheredWeights(
                split, self._lanes["z"], self,
                prefetch=self.overlap.prefetch, gathered_bytes=self.overlap.gathered_bytes,
            )  # fmt: skip
            for module in self._modules:
                module.weight_source = self._weights
        gathered = {id(p.parameter) for p in split}
        self._hooks = [
            p.parameter.register_post_accumulate_grad_hook(partial(self._accumulated, p))
            for p in self._parameters
            if id(p.parameter) not in gathered and p.parameter.requires_grad
        ]
        for shards in all_shards(self._parameters):
            shards.use(self._exchange)

    def _make_lanes(self, grid: Grid, axes: set[str]) -> dict[str, Lane]:
        axes = axes.union(*(axes_left(p) for p in self._parameters))
        loaded = settings.load()
        watches = [
            Watch(
                grid.axis(name), timeout_s=loaded.timeout_seconds, compare=loaded.debug_collectives
            )
            for name in SUM_ORDER
            if name in axes
        ]
        for watch in watches:
            watch.siblings = [other for other in watches if other is not watch]
        own = self._own_communicators(grid)
        busy = BusySms(self._device, sms=self.overlap.max_ctas or NCCL_SMS)
        return {
            watch.axis: self._make_lane(grid.axis(watch.axis), watch, own, busy)
            for watch in watches
        }

    def _make_lane(
        self, axis: AxisGroup, watch: Watch, own: CommunicatorGrid | None, busy: BusySms
    ) -> Lane:
        if self._device.type == "cpu":
            return HostLane(axis, self._recorder, watch)
        transport = C10dTransport(axis) if own is None else NcclTransport(axis, own)
        return StreamLane(
            axis, self._recorder, watch, transport=transport, device=self._device, busy=busy
        )

    def _own_communicators(self, grid: Grid) -> CommunicatorGrid | None:
        """Returns the grid's NCCL communicators; None where c10d's groups are used."""
        overlap = self.overlap
        if self._device.type == "cpu":
            if overlap.needs_own_communicators:
                raise ValueError(
                    f"Orchestrator: communicators={overlap.communicators!r} with "
                    f"max_ctas={overlap.max_ctas} is for GPUs, but the parameters lie on the cpu"
                )
            return None
        if overlap.communicators == "c10d":
            return None
        return grid.communicators.get(
            self._device, required=overlap.needs_own_communicators, max_ctas=overlap.max_ctas
        )

    def __enter__(self) -> Orchestrator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.settle()
        self.close()

    def close(self) -> None:
        """Detaches the orchestrator from the model, whose modules then gather their own weights.

        It does not wait for collectives that are under way, so call it between steps or after a
        failure.
        """
        for module in self._modules:
            module.weight_source = None
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for shards in all_shards(self._parameters):
            shards.use(None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Must enclose all backward passes of a step but the last.

        Their gradients are summed over z, and with zero=2 of `optim.AdamW` over data, too, but over
        no other axis.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Completes all gradients, like `axonn_ext.sync_gradients`, and ends the step.

        Raises: CommunicationError, also if ranks issued different collectives in this step (on
            GPUs: in the step before).
        """
        whole = [p for p in self._parameters if shards_of(p.parameter) is None]
        for shards in all_shards(self._parameters):
            shards.use(self._exchange)
            sum_over_ends(shards.parameters)
            shards.finish()
        self._buckets.finish(whole)
        sum_over_ends(whole)
        # Lanes are settled one by one, so that the peers on the next axis notice a failure here.
        for lane in self._lanes.values():
            lane.start_check()
            if self._device.type == "cpu":
                lane.settle()
        self.end_step()

    def settle(self) -> None:
        """Waits, on the host, for every collective of the step that `sync_gradients` has ended.

        On the CPU `sync_gradients` does this itself. On GPUs it settles only the previous step, so
        that the host can run a step ahead of the GPU. Call `settle` where the host is about to wait
        for the GPU anyway.

        Raises: CommunicationError, also if ranks issued different collectives in that step.
        """
        for lane in self._lanes.values():
            lane.settle()

    def end_pass(self) -> None:
        """Ends a pass of a step whose passes come in no fixed order.

        A pass is, for example, the forward or backward of one micro-batch. The order of weights is
        then learned and predicted for each pass separately, whatever came before it. Weights stay
        gathered as the budget allows.
        """
        if self._weights is not None:
            self._weights.end_pass()

    def end_step(self) -> None:
        """Drops the gathered weights and the gradients that are being summed.

        Call it after a step that does not end with `sync_gradients`, for example one that all ranks
        skip, and before a CUDA graph is captured.
        """
        self._gradients_to_come.clear()
        self._buckets.discard()
        for shards in all_shards(self._parameters):
            shards.discard()
        if self._scattered is not None:
            self._scattered.discard()
        if self._weights is not None:
            self._weights.end_step()

    def set_wait_at_once(self, on: bool) -> None:
        """Makes the program wait for every collective at once, or lets them overlap again.

        This takes effect with the next collective, and changes no bit of the results.
        """
        for lane in self._lanes.values():
            lane.wait_at_once = on

    @property
    def num_mispredictions(self) -> int:
        """How often a step used weights in another order than was predicted for it."""
        return 0 if self._weights is None else self._weights.num_mispredictions

    def gathered_storages(self) -> list[torch.UntypedStorage]:
        """Returns the storage of each weight split over z; it is empty while not gathered."""
        return [] if self._weights is None else self._weights.gathered_storages()

    def totals(self) -> dict[str, _C.LaneTotals]:
        """Returns each axis's totals so far: tasks, bytes, and seconds busy, exposed, hidden."""
        return {axis: lane.totals for axis, lane in self._lanes.items()}

    def progress(self) -> dict[str, tuple[str, int, str]]:
        """Returns, by axis, the group's name, the number of collectives issued, and the last."""
        return {axis: lane.progress for axis, lane in self._lanes.items()}

    def record(self, on: bool) -> None:
        """Turns recording for `take_records` on or off, from the next awaited collective on."""
        self._recorder.record(on)

    def take_records(self) -> dict[str, list[_C.LaneTask]]:
        """Returns each axis's recorded collectives, in the order in which they were waited for."""
        return {axis: lane.take_records() for axis, lane in self._lanes.items()}

    # --- What GatheredWeights reports (its GradientSink) ------------------------------------------

    def expect(self, parameter: nn.Parameter) -> None:
        self._gradients_to_come[id(parameter)] += 1

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        assert self._scattered is not None
        self.backward_runs()
        with torch.no_grad():
            for p in self._scattered.start(self._by_id[id(parameter)], gradient):
                self._summed_over_z(p)

    def backward_runs(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_of_backward)  # type: ignore[attr-defined]

    @torch.no_grad()
    def _end_of_backward(self) -> None:
        assert self._weights is not None and self._scattered is not None
        self._graph_task = -1
        self._weights.end_backward()
        for p in self._scattered.finish():
            self._summed_over_z(p)

    def _summed_over_z(self, p: ShardedParameter) -> None:
        self._gradients_to_come[id(p.parameter)] -= 1
        if self._gradients_to_come[id(p.parameter)] <= 0:
            self._sum(p)

    @torch.no_grad()
    def _accumulated(self, p: ShardedParameter, _: Tensor) -> None:
        """Called when autograd has accumulated the gradient of a parameter that is not gathered."""
        self._sum(p)

    def _sum(self, p: ShardedParameter) -> None:
        """Sums a gradient over the axes left after backward, in a bucket."""
        shards = shards_of(p.parameter)
        if shards is None:
            if self._syncs:
                self._buckets.add(p)
        elif self._syncs or shards.stage > 1:
            shards.use(self._exchange)
            shards.add(p.parameter)


def _is_split_over_z(p: ShardedParameter) -> bool:
    axes = p.spec.dims.get(0, ())
    split = any("z" in axes for axes in p.spec.dims.values())
    if split and axes[-1:] != ("z",):
        raise NotImplementedError(
            f"Orchestrator: {p.name} must be split over z in blocks of rows, got {p.spec.dims}"
        )
    return split


def _only_grid(parameters: list[ShardedParameter]) -> Grid:
    grids = {id(p.grid): p.grid for p in parameters}
    if len(grids) != 1:
        raise ValueError(
            f"Orchestrator: the parameters must lie on one Grid, got {len(grids)} grids"
        )
    return next(iter(grids.values()))


def _only_device(parameters: list[ShardedParameter]) -> torch.device:
    devices = {p.parameter.device for p in parameters}
    if len(devices) != 1 or min(device.type for device in devices) not in ("cpu", "cuda"):
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"Orchestrator: parameters must lie on the cpu or one GPU, got {found}")
    return next(iter(devices))


def _owners(model: nn.Module, parameters: set[int]) -> list[ShardedModule]:
    """Returns the modules that use one of these parameters."""
    owners = []
    for name, module in model.named_modules():
        if not isinstance(module, ShardedModule):
            continue
        if any(id(p) in parameters for p in module.parameters(recurse=False)):
            if module.weight_source is not None:
                raise ValueError(f"Orchestrator: {name or 'the model'} has another one already")
            owners.append(module)
    return owners
