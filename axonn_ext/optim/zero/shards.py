"""This rank's parts of the gradients summed over the data axis."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext.nn.sharded import ShardedParameter, axes_left
from axonn_ext.optim.zero.buckets import Bucket, Run, buckets_of, whole_buckets_of
from axonn_ext.optim.zero.exchange import BlockingExchange, Exchange, Pending

_SHARDS = "_axonn_gradient_shards"  # attribute of a parameter: the GradientShards with its sums
# One bucket is being summed and the next one is queued. More would not keep an axis busier.
_MOST_UNDER_WAY = 2


@dataclass(eq=False)
class SummedBucket:
    """A bucket of gradients, and this rank's part of their sum.

    before    the axes over which the gradients must be summed before data
    name      of its first parameter
    on_ends   the last stage of a pipeline also has a part of these gradients
    gradient  the part, in the gradients' dtype; None: no gradient has been summed
    given     the ids of the parameters whose gradients have been summed
    """

    bucket: Bucket
    before: tuple[str, ...]
    name: str
    on_ends: bool
    runs: tuple[Run, ...]  # of this rank's part
    gradient: Tensor | None = None
    given: set[int] = field(default_factory=set)
    filling: Tensor | None = None  # gradients not yet summed
    filled: set[int] = field(default_factory=set)  # the ids of their parameters


class GradientShards:
    """Sums gradients over data so that each rank gets only a part of each sum.

    `sync_gradients` and the orchestrator pass it the gradients of its parameters, whose `grad` is
    None afterwards. `gradients` yields the parts of the sums.

    stage: 1 sums the gradients of a step once, when they are complete; 2 sums those of each
    backward pass as soon as a bucket is full, so that no rank ever holds more than a few buckets of
    whole gradients. bucket_elements: of one bucket, before it is divided; None: a bucket has one
    parameter for each rank of data, of which that rank gets the whole sum.

    All ranks of data must have gradients of the same parameters, in the same order, since a bucket
    does not record which of its elements are set. `finish` compares this.

    Collectives: for each bucket a reduce-scatter over data, preceded by all-reduces over x, y and z
    if needed; in `finish`, unless an orchestrator's lanes compare what they send, an all-gather
    over data of 8 bytes for each parameter.

    Raises ValueError for parameters of several grids, whose gradients are not summed over data, or
    whose sums another GradientShards keeps.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], *, bucket_elements: int | None, stage: int
    ) -> None:
        _check(parameters)
        self.stage, self.grid = stage, parameters[0].grid
        self.buckets = list(_buckets(parameters, bucket_elements))
        self._by_id = {id(p.parameter): p for p in parameters}
        # The destination of each parameter's gradient.
        self._runs_of: dict[int, list[tuple[SummedBucket, Run]]] = {i: [] for i in self._by_id}
        for summed in self.buckets:
            for run in summed.bucket.runs:
                self._runs_of[id(run.parameter)].append((summed, run))
        self._blocking = BlockingExchange(self.grid, parameters[0].parameter.device)
        self._exchange: Exchange = self._blocking
        self._under_way: deque[tuple[SummedBucket, set[int], Pending]] = deque()
        # Since the last `finish`: the number of sums begun, and the last one of each parameter.
        self._num_begun = 0
        self._last_of = dict.fromkeys(self._by_id, 0)
        self._hooks = []
        for p in parameters:
            setattr(p.parameter, _SHARDS, self)
            if stage > 1:
                hook = p.parameter.register_post_accumulate_grad_hook(self.add)
                self._hooks.append(hook)

    def detach(self) -> None:
        """Makes gradients stay with their parameters again."""
        for hook in self._hooks:
            hook.remove()
        for p in self._by_id.values():
            if shards_of(p.parameter) is self:
                delattr(p.parameter, _SHARDS)

    def __reduce__(self) -> tuple[Any, ...]:
        """Allows a parameter to be pickled; when unpickled, it has None and keeps its gradient."""
        return type(None), ()

    @property
    def parameters(self) -> list[ShardedParameter]:
        """The parameters whose sums it keeps."""
        return list(self._by_id.values())

    def use(self, exchange: Exchange | None) -> None:
        """Uses this exchange from now on; None: one that does not overlap."""
        self._exchange = self._blocking if exchange is None else exchange

    @property
    def exchange(self) -> Exchange:
        """The exchange in use."""
        return self._exchange

    @torch.no_grad()
    def add(self, parameter: nn.Parameter) -> None:
        """Takes a parameter's gradient, and sums full buckets.

        Parameters that both ends of a pipeline hold are left to `finish`.
        """
        runs = self._runs_of[id(parameter)]
        if runs and not runs[0][0].on_ends:
            self._take(parameter)
            for summed, _ in runs:
                if len(summed.filled) == len(summed.bucket.runs):
                    self._start(summed)

    def _take(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            for summed, run in self._runs_of[id(parameter)]:
                _fill(summed, run, gradient)

    @torch.no_grad()
    def finish(self) -> None:
        """Takes all remaining gradients, and completes all sums.

        Gradients of parameters that both ends of a pipeline hold must already be summed over these.
        Raises RuntimeError, on all ranks, if the ranks of data have gradients of different
        parameters. (An orchestrator, whose lanes compare what they send, raises its own error
        later.)
        """
        # Bucket by bucket, so that ranks with different gradients use the same order.
        for summed in self.buckets:
            for run in summed.bucket.runs:
                self._take(run.parameter)
            if summed.filling is not None:
                self._start(summed)
        while self._under_way:
            self._complete()
        differs = self._exchange.first_difference(list(self._last_of.values()))
        self._forget_order()
        if differs is not None:
            raise RuntimeError(
                "sync_gradients: with ZeRO all ranks of data must compute gradients of the same "
                f"parameters in the same order, but that of {self.parameters[differs].name} was "
                "there only on some ranks, or in another order"
            )

    def check_summed(self) -> None:
        """Raises RuntimeError if `finish` has not yet summed all gradients."""
        left = [p for p in self._by_id.values() if p.parameter.grad is not None]
        names = [p.name for p in left if p.parameter.numel()]
        names += [s.name for s in self.buckets if s.filling is not None]
        names += [summed.name for summed, *_ in self._under_way]
        if names:
            raise RuntimeError(
                f"AdamW.step: the gradient of {names[0]} is not summed over the ranks; with zero, "
                "call sync_gradients of axonn_ext, or of the orchestrator, after backward"
            )

    def discard(self) -> None:
        """Drops gradients that are not yet summed. Complete sums stay."""
        while self._under_way:
            self._under_way.popleft()[2]()
        for summed in self.buckets:
            summed.filling = None
            summed.filled = set()
        self._forget_order()

    def _forget_order(self) -> None:
        self._num_begun = 0
        self._last_of = dict.fromkeys(self._by_id, 0)

    def drop_sums(self) -> None:
        """Drops the sums."""
        for summed in self.buckets:
            summed.gradient = None
            summed.given = set()

    def gradients(self) -> Iterator[tuple[ShardedParameter, Tensor]]:
        """Yields each run of a parameter whose sum this rank has."""
        for summed in self.buckets:
            for run in summed.runs:
                if summed.gradient is not None and id(run.parameter) in summed.given:
                    yield self._by_id[id(run.parameter)], run.inside(summed.gradient)

    def whole(self) -> dict[int, Tensor]:
        """Returns the whole sums by parameter id. Collectives: all-gathers over data."""
        found: dict[int, Tensor] = {}
        for summed in self.buckets:
            if summed.gradient is None:
                continue
            flat = self._exchange.all_gather(summed.gradient, f"{summed.name}.grad")()
            for run in summed.bucket.runs:
                if id(run.parameter) in summed.given:
                    like = run.parameter
                    whole = found.setdefault(id(like), torch.empty_like(like, requires_grad=False))
                    run.of(whole).copy_(run.inside(flat))
        return found

    def _start(self, summed: SummedBucket) -> None:
        for _ in (*summed.before, "data"):
            if len(self._under_way) >= _MOST_UNDER_WAY:
                self._complete()
        flat, filled = summed.filling, summed.filled
        assert flat is not None
        summed.filling, summed.filled = None, set()
        for run in summed.bucket.runs:
            if id(run.parameter) not in filled:
                run.inside(flat).zero_()
        if summed.before:
            dtype = flat.dtype
            wide = flat.to(torch.promote_types(dtype, torch.float32))
            for axis in summed.before:
                wide = self._exchange.all_reduce(wide, axis, summed.name)()
            flat = wide.to(dtype)
        self._num_begun += 1
        self._last_of |= dict.fromkeys(filled, self._num_begun)
        what = f"{summed.name}.grad and more{_without(summed.bucket, filled)}"
        self._under_way.append((summed, filled, self._exchange.reduce_scatter(flat, what)))

    def _complete(self) -> None:
        summed, filled, pending = self._under_way.popleft()
        total = pending()
        summed.gradient = total if summed.gradient is None else summed.gradient.add_(total)
        summed.given |= filled


def shards_of(parameter: nn.Parameter) -> GradientShards | None:
    """Returns the holder of a parameter's summed gradient; None: it is in `grad`."""
    found = getattr(parameter, _SHARDS, None)
    assert found is None or isinstance(found, GradientShards)
    return found


def all_shards(parameters: Iterable[ShardedParameter]) -> list[GradientShards]:
    """Returns the holders of these parameters' summed gradients, each once."""
    found = {id(s): s for p in parameters if (s := shards_of(p.parameter)) is not None}
    return list(found.values())


def _fill(summed: SummedBucket, run: Run, gradient: Tensor) -> None:
    """Adds a run of a gradient to the bucket's gradients that are not yet summed."""
    if summed.filling is None:
        summed.filling = gradient.new_empty(summed.bucket.numel)
        _zero_gaps(summed)
    place = run.inside(summed.filling)
    if id(run.parameter) in summed.filled:
        place.add_(run.of(gradient))
    else:
        place.copy_(run.of(gradient))
    summed.filled.add(id(run.parameter))


def _without(bucket: Bucket, filled: set[int]) -> str:
    """Returns a note on which of a bucket's gradients are missing; "" if none."""
    missing = [i for i, run in enumerate(bucket.runs) if id(run.parameter) not in filled]
    return f", without {missing} of {len(bucket.runs)}" if missing else ""


def _zero_gaps(summed: SummedBucket) -> None:
    """Zeroes the gaps between the runs and after the last one, which are sent with them."""
    assert summed.filling is not None
    at = 0
    for run in summed.bucket.runs:
        summed.filling[at : run.at].zero_()
        at = run.at + run.numel
    summed.filling[at:].zero_()


def _buckets(
    parameters: Sequence[ShardedParameter], elements: int | None
) -> Iterator[SummedBucket]:
    """Yields buckets of parameters summed in the same way, the last ones first, as in backward."""
    groups: defaultdict[tuple[torch.dtype, tuple[str, ...], bool], list[ShardedParameter]]
    groups = defaultdict(list)
    for p in reversed(parameters):
        on_ends = p.spec.on_ends and p.grid.ends.size > 1
        before = tuple(axis for axis in axes_left(p) if axis != "data")
        groups[p.parameter.dtype, before, on_ends].append(p)
    axis = parameters[0].grid.axis("data")
    for (_, before, on_ends), group in groups.items():
        names = {id(p.parameter): p.name for p in group}
        tensors = [p.parameter for p in group]
        found = (
            whole_buckets_of(tensors, num_parts=axis.size)
            if elements is None
            else buckets_of(tensors, elements=elements, num_parts=axis.size)
        )
        for bucket in found:
            name = names[id(bucket.runs[0].parameter)]
            yield SummedBucket(bucket, before, name, on_ends, bucket.part(axis.rank))


def _check(parameters: Sequence[ShardedParameter]) -> None:
    if not parameters:
        raise ValueError("GradientShards: parameters must not be empty, got none")
    grid = parameters[0].grid
    for p in parameters:
        problem = ""
        if p.grid is not grid:
            problem = "lies on another Grid than the first parameter"
        elif "data" not in p.spec.summed_over:
            problem = "has a gradient that is not summed over data"
        elif shards_of(p.parameter) is not None:
            problem = "has another optimizer with ZeRO already"
        elif not p.parameter.is_contiguous():
            problem = f"must be contiguous, got strides {p.parameter.stride()}"
        if problem:
            raise ValueError(f"GradientShards: {p.name} {problem}")
