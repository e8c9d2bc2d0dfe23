"""Messages between fake GPUs, whose streams are threads and whose transfers go over gloo."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext import GridShape
from axonn_ext.pipeline import Pipeline, PipelineError, PipelineOptions, threads
from axonn_ext.pipeline.failures import Failures
from axonn_ext.pipeline.gpu import Pace
from axonn_ext.pipeline.gpu_channels import rounds, steps
from axonn_ext.pipeline.inbox import ROOM, Inbox
from axonn_ext.pipeline.messages import BACKWARD, DIRECTIONS, FORWARD, Form, Message
from axonn_ext.pipeline.neighbours import Neighbours
from axonn_ext.ranks.side_groups import SideGroups
from axonn_ext.spec import settings
from fake_gpu import FakeGpu, pipelines_on
from grids import grid_of
from limits import HANG_SECONDS
from pipeline_cases import OPTIONS, failures
from worker_pool import WorkerError, WorkerPool

pytestmark = pytest.mark.long

COUNT = 12


@pytest.mark.parametrize("size", range(2, 10))
def test_a_stage_is_in_one_pair_of_a_round(size: int) -> None:
    found = rounds(size)
    for firsts in found:
        stages = [stage for first in firsts for stage in (first, (first + 1) % size)]
        assert len(stages) == len(set(stages))
    assert sorted(first for firsts in found for first in firsts) == list(range(size))
    assert len(found) == 2 + size % 2


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("size", range(2, 10))
def test_both_ends_of_a_connection_are_made_in_the_same_step(size: int, wraps: bool) -> None:
    ranks = [3 * stage + 1 for stage in range(size)]
    channels = []
    # All ranks have the same number of steps, with both ends of a channel in the same step. So no
    # two ranks wait for each other at different channels, and a group has the same name on both.
    for found in zip(*(steps(stage, ranks, wraps=wraps) for stage in range(size)), strict=True):
        for stage, step in enumerate(found):
            assert ranks[stage] in step.ranks and step.ranks == sorted(step.ranks)
            assert step.sends == (step.source == stage and len(step.ranks) == 2)
            for rank in step.ranks:
                other = found[ranks.index(rank)]
                assert (other.what, other.ranks, other.source) == (
                    step.what, step.ranks, step.source,
                )  # fmt: skip
                assert (other.is_used, other.direction) == (step.is_used, step.direction)
            if step.is_used and step.sends:
                (to,) = (ranks.index(rank) for rank in step.ranks if rank != ranks[stage])
                channels.append((stage, to, step.direction))
    ring = [(stage, (stage + step) % size, d) for d, step in DIRECTIONS.items()
            for stage in range(size)]  # fmt: skip
    used = [e for e in ring if wraps or e[1] - e[0] == DIRECTIONS[e[2]]]
    assert sorted(channels) == sorted(used)


class Ends:
    """This rank's neighbours in a ring, with a fake GPU."""

    def __init__(self, shape: GridShape, *, shares: bool = True) -> None:
        self.axis, self.gpu = grid_of(shape).axis("pipe"), FakeGpu()
        self.failures = Failures(settings.load().timeout_seconds)
        self.inbox = Inbox(self.axis, self.failures, self.gpu)
        self.neighbours = Neighbours(
            self.axis, self.inbox, self.failures, SideGroups(), gpu=self.gpu, shares=shares
        )

    def incoming(self, direction: str, number: int) -> Message:
        return Message(direction, self.axis.rank, number)

    def outgoing(self, direction: str, number: int) -> Message:
        to = (self.axis.rank + DIRECTIONS[direction]) % self.axis.size
        return Message(direction, to, number)

    def announce(self, form: Form) -> None:
        """Announces a forward message that is never sent."""
        outgoing = self.neighbours._senders[FORWARD]._outgoing
        outgoing.send(form.header())
        outgoing.send(torch.zeros(1, dtype=torch.uint8))

    def threads(self) -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "axonn pipeline"]


def full(shares: bool) -> tuple[list[int], list[int], bool]:
    """The numbers of started and ended transfers while the receiver has no room, and at the end."""
    ends = Ends(GridShape(pipe=2), shares=shares)
    many, tensors = 2 * ROOM, torch.arange(6.0 * ROOM).view(-1, 3)
    begins, is_right = len(ends.gpu.begun), True
    if ends.axis.rank == 0:
        for number in range(many):
            ends.neighbours.send("training", ends.outgoing(FORWARD, number), tensors[number])
    else:
        ends.neighbours.expect("training", [ends.incoming(FORWARD, n) for n in range(many)])
    while len(ends.gpu.ended) < begins + ROOM:
        time.sleep(0.01)
    time.sleep(0.3)  # another transfer would start in this time
    counts = [len(ends.gpu.begun) - begins, len(ends.gpu.ended) - begins]
    dist.barrier()
    if ends.axis.rank == 1:
        for number in range(many):
            got = ends.inbox.take(ends.incoming(FORWARD, number))
            is_right &= torch.equal(got, tensors[number])
    ends.neighbours.wait_for_sends()
    ends.neighbours.close()
    return counts, [len(ends.gpu.begun) - begins, len(ends.gpu.ended) - begins], is_right


@pytest.mark.parametrize("shares", [True, False])
def test_no_gpu_waits_for_room_on_another_one(pool, shares: bool) -> None:
    for counts, in_the_end, is_right in pool(2).run(full, shares):
        assert counts == [ROOM, ROOM]
        assert in_the_end == [2 * ROOM, 2 * ROOM] and is_right


SHAPES = ((3, 5), (0, 5), (1,), (64, 33))


def content(sender: int, direction: str, phase: int, number: int) -> Tensor:
    """The values of a message, which are different for each message."""
    seed = ((sender * 2 + (direction == FORWARD)) * len(SHAPES) + phase) * COUNT + number
    return torch.randn(SHAPES[phase], generator=torch.Generator().manual_seed(seed)).double()


def exchange(shape: GridShape, shares: bool) -> list[str]:
    """Sends messages of several shapes to both neighbours; returns the incorrect ones."""
    ends = Ends(shape, shares=shares)
    wrong: list[str] = []
    rank, size, computes = ends.axis.rank, ends.axis.size, ends.gpu.cuda.computes
    shuffled = random.Random(rank)
    for phase in range(len(SHAPES)):
        ends.neighbours.expect(
            str(phase), [ends.incoming(d, n) for d in DIRECTIONS for n in range(COUNT)]
        )
        for number in range(COUNT):
            for direction in DIRECTIONS:
                tensor = torch.zeros(SHAPES[phase][::-1], dtype=torch.float64).T
                # The GPU computes the values after the host has called `send`.
                values, seconds = content(rank, direction, phase, number), shuffled.uniform(0, 3e-3)
                computes.run(lambda s=seconds, t=tensor, v=values: (time.sleep(s), t.copy_(v)))
                ends.neighbours.send(str(phase), ends.outgoing(direction, number), tensor)
        todo = [direction for direction in DIRECTIONS for _ in range(COUNT)]
        shuffled.shuffle(todo)
        numbers = {direction: count() for direction in DIRECTIONS}
        for direction in todo:
            message = ends.incoming(direction, next(numbers[direction]))
            time.sleep(shuffled.uniform(0, 3e-3))
            got, sender = ends.inbox.take(message), (rank - DIRECTIONS[direction]) % size
            if not torch.equal(got, content(sender, direction, phase, message.micro_batch)):
                wrong.append(f"phase {phase}, {message}")
        ends.neighbours.wait_for_sends()
    ends.neighbours.close()
    assert len(ends.gpu.used) == len(SHAPES) * 2 * COUNT
    return wrong


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_have_their_values_and_their_order(pool, size, shares) -> None:
    assert pool(size).run(exchange, GridShape(pipe=size), shares) == [[]] * size


def on_fake_gpus(*arguments: object) -> list[str]:
    with pipelines_on(FakeGpu(slow=2e-3)):
        return failures(*arguments)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (GridShape(pipe=4), list(OPTIONS)),
        (GridShape(pipe=2, x=2), ["message_driven", "interleaved"]),
        (GridShape(pipe=2, data=2), ["message_driven", "1f1b"]),
    ],
    ids=str,
)
def test_pipelines_equal_one_process(pool, shape, options) -> None:
    for found in pool(shape.size).run(on_fake_gpus, "gpt2", 8, [shape], options):
        assert found == []


def other_shapes(forgets: bool) -> float:
    """The largest error of losses against one process if shapes change between steps."""
    grid, gpu = grid_of(GridShape(pipe=2)), FakeGpu(slow=1e-3)
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    worst = 0.0
    with pipelines_on(gpu):
        pipeline = Pipeline(layers, grid, PipelineOptions(), loss=F.mse_loss)
    with pipeline:
        for rows in (2, 5, 3):
            inputs = torch.randn(3, rows, 4, generator=torch.Generator().manual_seed(rows))
            if forgets:
                pipeline.forget_shapes()
            loss = pipeline.step([(x, x) for x in inputs])
            want = F.mse_loss(layers[1](layers[0](inputs)), inputs)
            worst = max(worst, abs(loss.item() - want.item()))
    return worst


def test_shapes_may_change_when_they_are_forgotten(pool) -> None:
    # A mean of 60 squares in fp32, in a different order.
    assert max(pool(2).run(other_shapes, True)) < 1e-5


def test_a_shape_that_changes_is_named(pool) -> None:
    with pytest.raises(WorkerError, match="forget_shapes"):
        pool(2).run(other_shapes, False)


def stopped(announced: bool) -> tuple[int, int, bool]:
    """The numbers of threads left and of aborted groups, and whether the message arrived.

    Threads that should end by themselves get plenty of time; after an announcement, a thread soon
    counts as blocked in a transfer.
    """
    ends, message = Ends(GridShape(pipe=2)), Message(FORWARD, 1, 0)
    form = Form((4,), torch.float32)
    if ends.axis.rank == 1:
        ends.neighbours.expect("training", [message])
        time.sleep(0.2)  # the thread is waiting by now
    elif announced:
        ends.announce(form)
    time.sleep(0.5)
    with mock.patch.object(threads, "_JOIN_SECONDS", 1.0 if announced else HANG_SECONDS):
        ends.neighbours.abandon()
    return len(ends.threads()), len(ends.gpu.aborted), ends.inbox.has(message)


def test_a_receive_that_is_not_announced_is_stopped(pool) -> None:
    assert pool(2).run(stopped, False) == [(0, 0, False)] * 2


def test_a_transfer_that_does_not_end_is_aborted() -> None:
    pool = WorkerPool(2)  # a new one, as gloo's transfers stay behind
    sender, receiver = pool.run(stopped, True)
    pool.close()
    assert sender == (0, 0, False)
    assert receiver == (0, 1, False), "nothing comes of a transfer that was aborted"


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes new ranks wait for only 4 s, since no GPU notices that another's process has ended."""
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "4")


@pytest.fixture
def two(soon: None) -> Iterator[WorkerPool]:
    """New ranks for each test, as some of them end."""
    started = WorkerPool(2)
    yield started
    started.close()


def dies_after_announcing() -> tuple[str, int]:
    ends, message = Ends(GridShape(pipe=2)), Message(FORWARD, 1, 0)
    if ends.axis.rank == 0:
        ends.announce(Form((4,), torch.float32))
        time.sleep(0.5)  # the other rank's GPU requests it
        os._exit(9)
    ends.neighbours.expect("training", [message])
    with pytest.raises(PipelineError) as error:
        ends.inbox.take(message)
    ends.neighbours.abandon()
    return str(error.value), len(ends.threads())


def dies_after_calling() -> tuple[str, int]:
    ends = Ends(GridShape(pipe=2))
    if ends.axis.rank == 0:
        ends.neighbours._receivers[BACKWARD]._calls.send(torch.zeros(1, dtype=torch.uint8))
        time.sleep(1)  # the other rank's GPU starts to send
        os._exit(9)
    with pytest.raises(PipelineError) as error:
        ends.neighbours.send("training", Message(BACKWARD, 0, 0), torch.ones(4))
        ends.neighbours.wait_for_sends()
    assert len(ends.gpu.begun) > len(ends.gpu.ended)
    ends.neighbours.abandon()
    return str(error.value), len(ends.threads())


def dies_before_it_takes() -> tuple[str, int]:
    ends = Ends(GridShape(pipe=2))
    if ends.axis.rank == 0:
        os._exit(9)
    with pytest.raises(PipelineError) as error:
        ends.neighbours.send("training", Message(BACKWARD, 0, 0), torch.ones(4))
        ends.neighbours.wait_for_sends()
    ends.neighbours.abandon()
    return str(error.value), len(ends.threads())


GRADIENT = "stage 0, micro-batch 0, backward: the gradient of the output was not sent to rank 0"


@pytest.mark.parametrize(
    ("dies", "text"),
    [
        (dies_after_announcing, "stage 1, micro-batch 0, forward: the input did not come from"),
        (dies_after_calling, GRADIENT),
        (dies_before_it_takes, GRADIENT),
    ],
)
def test_a_neighbour_that_dies(two, dies: Callable[[], object], text: str) -> None:
    with pytest.raises(WorkerError, match="rank 0: the process ended"):
        two.run(dies)
    found, threads = two.answers[1]
    assert text in found and threads == 0


class NoMemory(FakeGpu):
    """A GPU that cannot be connected, while the others wait for it in a call."""

    def follow(self, work: dist.Work) -> None:
        raise RuntimeError("the GPU has no memory left")


class Dying(FakeGpu):
    """A GPU whose process ends while it is being connected."""

    def follow(self, work: dist.Work) -> None:
        os._exit(9)


def unconnected(bad: type[FakeGpu]) -> str:
    """The error if rank 1 of four stages has a bad GPU."""
    grid = grid_of(GridShape(pipe=4))
    gpu = bad() if grid.rank == 1 else FakeGpu(blocks=True)
    layers = [nn.Linear(4, 4) for _ in range(4)]
    with pipelines_on(gpu), pytest.raises(RuntimeError) as error:
        Pipeline(layers, grid, loss=F.mse_loss)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.fixture
def four() -> Iterator[WorkerPool]:
    """New ranks for each test, as some of them end."""
    started = WorkerPool(4)
    yield started
    started.close()


def connected_later() -> tuple[str, float]:
    """The error of a pipeline that cannot be connected, and the loss of the next one."""
    grid = grid_of(GridShape(pipe=2))
    layers, x = [nn.Linear(4, 4), nn.Linear(4, 4)], torch.ones(2, 4)
    bad = NoMemory() if grid.rank == 1 else FakeGpu()
    with pipelines_on(bad), pytest.raises(RuntimeError) as error:
        Pipeline(layers, grid, loss=F.mse_loss)
    with pipelines_on(FakeGpu()), Pipeline(layers, grid, loss=F.mse_loss) as pipeline:
        return str(error.value), pipeline.step([(x, x)] * 3).item()


def test_a_new_pipeline_after_a_failed_connection(two) -> None:
    (told, loss), (own, same) = two.run(connected_later)
    assert told == f"rank 1, the connections of its GPU: {own}"
    assert loss == same > 0


def test_a_gpu_that_cannot_be_connected_ends_all_waiting(four) -> None:
    found = four.run(unconnected, NoMemory)
    assert found.pop(1) == "RuntimeError: the GPU has no memory left"
    for text in found:
        assert "rank 1, the connections of its GPU: the GPU has no memory left" in text
        assert text.startswith("PipelineError")


def test_a_rank_that_dies_while_gpus_are_connected(soon, four) -> None:
    with pytest.raises(WorkerError, match="rank 1: the process ended"):
        four.run(unconnected, Dying)
    for rank in (0, 2, 3):
        assert "connection" in four.answers[rank]


def paced() -> tuple[float, str, float]:
    """The time tasks wait, the error if another rank fails, and the idle time of the GPU.

    The second task is launched before the first one ends.
    """
    grid, gate, gpu = grid_of(GridShape(pipe=2)), threading.Event(), FakeGpu()
    failing = Failures(settings.load().timeout_seconds)
    pace = Pace(gpu, failing)
    gpu.cuda.computes.run(lambda: gate.wait())
    began = time.monotonic()
    pace.end_task()
    threading.Timer(0.5, gate.set).start()
    pace.end_task()
    waited = time.monotonic() - began
    pace.finish()
    idle = failing.waited_seconds
    never = threading.Event()
    gpu.cuda.computes.run(lambda: never.wait())
    if grid.rank == 0:
        failing.tell("rank 0 has failed")
    with pytest.raises(PipelineError) as error:
        for _ in range(2):
            pace.end_task()
    never.set()
    return waited, str(error.value), idle


def test_the_host_is_one_task_ahead_at_most(pool) -> None:
    for waited, text, idle in pool(2).run(paced):
        assert waited >= 0.5
        assert text == "rank 0 has failed"
        assert idle == 0.0, "a GPU that computes is not idle"


def on_one_gpu() -> str:
    """The error if only the first stage is on a GPU."""
    grid = grid_of(GridShape(pipe=2))
    here = pipelines_on(FakeGpu()) if grid.rank == 0 else nullcontext()
    with pytest.raises(PipelineError) as error, here:
        Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], grid, loss=F.mse_loss)
    return str(error.value)


def test_stages_are_on_gpus_on_all_ranks_or_on_none(pool) -> None:
    for text in pool(2).run(on_one_gpu):
        assert "all ranks must have the same stages on a GPU" in text and "from 0 to 1" in text


def groups_after_a_failure() -> int:
    """The number of the grid's groups that are the same before and after a failure."""
    grid = grid_of(GridShape(pipe=2))
    x = torch.ones(2, 4)
    seen = []
    for bad in (True, False):
        with pipelines_on(FakeGpu()):
            pipeline = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], grid, loss=F.mse_loss)
        seen.append({id(group) for group in grid.side_groups._groups.values()})
        if bad:
            with pytest.raises(RuntimeError), pipeline:
                pipeline.step([(x, torch.ones(2, 3))])
        else:
            with pipeline:
                pipeline.step([(x, x)])
    return len(seen[0] & seen[1])


def test_a_new_pipeline_after_a_failure_has_new_groups(pool) -> None:
    assert pool(2).run(groups_after_a_failure) == [0, 0]
