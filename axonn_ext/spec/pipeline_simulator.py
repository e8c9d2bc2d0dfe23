"""Simulates one step of a pipeline: when each stage runs which task, and what it holds.

A stage runs one task at a time. Its messages arrive later; sending does not delay its next task.
The messages of one direction between two ranks arrive in the order in which they were sent: a late
one holds up those behind it. This needs no code: stages of every schedule take the messages of a
channel in the order in which they were sent, so none waits for one that is behind a late one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from axonn_ext.spec.pipeline import Task, check_sizes, fixed_order
from axonn_ext.spec.pipeline_options import PipelineOptions

# (direction, "forward" or "backward"; sending virtual stage; micro-batch) -> seconds
MessageSeconds = Callable[[str, int, int], float]
Run = list[tuple[Task, float, float]]  # the tasks of a stage: (task, start, end) in order


@dataclass(frozen=True)
class StageTimes:
    """The seconds of a stage for one micro-batch of one chunk.

    backward: only the input gradient. weight: the weight gradients.
    """

    forward: float
    backward: float
    weight: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step. Stages hold units of one micro-batch of one chunk.

    seconds         from the first task's start to the last one's end
    busy            per stage: the seconds spent on tasks
    peak_in_flight  per stage: the most units at a time whose forward has begun and whose backward
                    has not ended
    peak_deferred   per stage: the most units at a time whose backward has ended and whose weight
                    task has not
    peak_held       per stage: the most units of both kinds together
    tasks           per stage: (task, start, end) in order
    """

    seconds: float
    busy: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    peak_deferred: tuple[int, ...]
    peak_held: tuple[int, ...]
    tasks: tuple[tuple[tuple[Task, float, float], ...], ...]


def simulate(
    schedule: str,
    times: Sequence[StageTimes],
    micro_batches: int,
    *,
    chunks: int = 1,
    message_seconds: MessageSeconds | None = None,
    in_flight: Sequence[int] | None = None,
    defer_weights: bool = False,
    max_deferred: int | Sequence[int] | None = None,
) -> Simulation:
    """Simulates a step of a schedule of `axonn_ext.spec.pipeline`, with the times of each stage.

    message_seconds: the transfer time of a message; None: no time. It is called once per message.

    A fixed schedule runs its order and waits for the message that each task needs. A free stage of
    message_driven runs the first of these that it can: the backward whose message has arrived; the
    forward whose message has arrived, while fewer than in_flight[stage] micro-batches are in flight
    (None: the limits of PipelineOptions()); the oldest deferred weight task.

    defer_weights (only for message_driven; zero_bubble always does, the other schedules never): a
    backward leaves its weight gradients for later. When max_deferred of them wait (one number, or
    one for each stage; None: no limit), the oldest runs before the next backward. Otherwise a
    backward includes them.

    Raises ValueError for sizes that the schedule does not support, times that are negative or not
    finite, and in_flight or max_deferred without a number >= 1 per stage.
    """
    stages = len(times)
    check_sizes(schedule, stages=stages, micro_batches=micro_batches, chunks=chunks)
    _check_times(times)
    limits = _limits(in_flight, stages)
    if isinstance(max_deferred, int):
        max_deferred = [max_deferred] * stages
    if max_deferred is not None:
        _check_each("max_deferred", max_deferred, stages)
    fixed = schedule != "message_driven"
    defers = schedule == "zero_bubble" if fixed else defer_weights
    seconds = [
        {"forward": t.forward, "backward": t.backward + (0 if defers else t.weight),
         "weight": t.weight}
        for t in times
    ]  # fmt: skip
    messages = _Messages(stages, chunks, micro_batches, message_seconds)
    if fixed:
        orders = [fixed_order(schedule, stages=stages, stage=stage, micro_batches=micro_batches,
                              chunks=chunks) for stage in range(stages)]  # fmt: skip
        return _simulation(_run_fixed(orders, messages, seconds), defers=defers)
    most: Sequence[float] = [0] * stages
    if defers:
        most = [math.inf] * stages if max_deferred is None else max_deferred
    arrived = zip(messages.arrived["forward"], messages.arrived["backward"], strict=True)
    states = [
        _Stage(*lists, limit, deferred)
        for lists, limit, deferred in zip(arrived, limits, most, strict=True)
    ]
    return _simulation(_run_message_driven(states, messages, seconds), defers=defers)


def _check_times(times: Sequence[StageTimes]) -> None:
    for stage, t in enumerate(times):
        if not all(0 <= seconds < math.inf for seconds in (t.forward, t.backward, t.weight)):
            raise ValueError(f"times[{stage}] must be finite and >= 0, got {t}")


def _limits(in_flight: Sequence[int] | None, stages: int) -> Sequence[int]:
    """The most micro-batches in flight per stage."""
    if in_flight is None:
        return [PipelineOptions().most_in_flight(stages, stage) for stage in range(stages)]
    _check_each("in_flight", in_flight, stages)
    return in_flight


def _check_each(name: str, numbers: Sequence[int], stages: int) -> None:
    if len(numbers) != stages or min(numbers) < 1:
        raise ValueError(
            f"{name} must have a number >= 1 for each of {stages} stages, got {list(numbers)}"
        )


class _Messages:
    """The messages sent so far, and when they arrive.

    arrived[direction][v]: the arrival times of the messages that virtual stage v needs for its
    tasks of that name, by micro-batch, as if no message held up another. They are known once the
    sending task begins.
    """

    def __init__(
        self, stages: int, chunks: int, micro_batches: int, seconds: MessageSeconds | None
    ) -> None:
        self._stages, self._last, self._seconds = stages, stages * chunks - 1, seconds
        self.arrived: dict[str, list[list[float]]] = {
            direction: [[] for _ in range(stages * chunks)] for direction in ("forward", "backward")
        }
        self.arrived["forward"][0] = [0.0] * micro_batches

    def send(self, kind: str, sender: int, micro_batch: int, end: float) -> tuple[int, float]:
        """Sends a task's message when it ends: returns (the receiving rank or -1, the arrival)."""
        if kind == "forward" and sender == self._last:  # its loss
            self.arrived["backward"][sender].append(end)
            return sender % self._stages, end
        receiver = sender + 1 if kind == "forward" else sender - 1
        if kind == "weight" or receiver < 0:
            return -1, end
        arrival = end
        if self._seconds is not None and self._stages > 1:
            arrival += self._seconds(kind, sender, micro_batch)
        self.arrived[kind][receiver].append(arrival)
        return receiver % self._stages, arrival


def _run_fixed(
    orders: Sequence[Sequence[Task]], messages: _Messages, seconds: Sequence[Mapping[str, float]]
) -> list[Run]:
    """The runs of stages that wait for the message of each task in their orders.

    Arrival times do not depend on the order in which stages are simulated, so each runs until it
    needs a message that has not been sent yet.
    """
    stages = len(orders)
    runs: list[Run] = [[] for _ in orders]
    ready = deque(range(stages))
    waiting = [False] * stages
    while ready:
        stage = ready.popleft()
        waiting[stage] = False
        run, order = runs[stage], orders[stage]
        now = run[-1][2] if run else 0.0
        while len(run) < len(order):
            task = order[len(run)]
            virtual = task.chunk * stages + stage
            if task.kind != "weight":
                arrivals = messages.arrived[task.kind][virtual]
                if len(arrivals) <= task.micro_batch:
                    waiting[stage] = True
                    break
                now = max(now, arrivals[task.micro_batch])
            end = now + seconds[stage][task.kind]
            run.append((task, now, end))
            receiver, _ = messages.send(task.kind, virtual, task.micro_batch, end)
            now = end
            if receiver >= 0 and waiting[receiver]:
                waiting[receiver] = False
                ready.append(receiver)
    assert not any(waiting), "the orders deadlock"
    return runs


class _Stage:
    """A stage of message_driven: the tasks it has begun, and the next one it can run.

    most_deferred: 0 where no weight gradients are deferred.
    """

    def __init__(
        self, forwards: list[float], backwards: list[float], limit: int, most_deferred: float
    ) -> None:
        self._forwards, self._backwards = forwards, backwards
        self._limit, self._most_deferred = limit, most_deferred
        self.begun = {"forward": 0, "backward": 0, "weight": 0}
        self.free_at = 0.0
        self.look_at = math.inf  # when it is looked at next

    def next_kind(self, now: float) -> str | None:
        """The kind of the task to run now; None if the stage must wait."""
        begun, most = self.begun, self._most_deferred
        deferred = begun["backward"] - begun["weight"] if most else 0
        if self._backward_arrival() <= now:
            return "weight" if most and deferred >= most else "backward"
        if self._forward_arrival() <= now:
            return "forward"
        return "weight" if deferred else None

    def next_arrival(self) -> float:
        """When a message arrives that lets the stage run a task; infinite if none is known."""
        return min(self._forward_arrival(), self._backward_arrival())

    def _forward_arrival(self) -> float:
        number = self.begun["forward"]
        if number - self.begun["backward"] >= self._limit or number >= len(self._forwards):
            return math.inf
        return self._forwards[number]

    def _backward_arrival(self) -> float:
        number = self.begun["backward"]
        return self._backwards[number] if number < len(self._backwards) else math.inf


def _run_message_driven(
    stages: Sequence[_Stage], messages: _Messages, seconds: Sequence[Mapping[str, float]]
) -> list[Run]:
    """The runs of stages that take whatever has arrived. Stages are visited in order of time.

    A message is known when its sending task begins, which is before it arrives. So a visited stage
    knows everything that has arrived.
    """
    runs: list[Run] = [[] for _ in stages]
    looks: list[tuple[float, int]] = []  # a heap: when to look at which stage

    def look(at: float, number: int) -> None:
        if at < stages[number].look_at:
            stages[number].look_at = at
            heapq.heappush(looks, (at, number))

    look(0.0, 0)
    while looks:
        now, number = heapq.heappop(looks)
        stage = stages[number]
        if now != stage.look_at:  # an earlier look has taken its place
            continue
        stage.look_at = math.inf
        kind = stage.next_kind(now)
        if kind is None:
            look(stage.next_arrival(), number)
            continue
        task = Task(kind, 0, stage.begun[kind])
        stage.begun[kind] += 1
        stage.free_at = end = now + seconds[number][kind]
        runs[number].append((task, now, end))
        look(end, number)
        receiver, arrival = messages.send(kind, number, task.micro_batch, end)
        if receiver >= 0:
            look(max(arrival, stages[receiver].free_at), receiver)
    return runs


def _simulation(runs: Sequence[Run], *, defers: bool) -> Simulation:
    """The runs of all stages, and the results derived from them."""
    peaks = [_peaks(run, defers=defers) for run in runs]
    return Simulation(
        seconds=max(run[-1][2] for run in runs),
        busy=tuple(sum(end - start for _, start, end in run) for run in runs),
        peak_in_flight=tuple(peak[0] for peak in peaks),
        peak_deferred=tuple(peak[1] for peak in peaks),
        peak_held=tuple(peak[2] for peak in peaks),
        tasks=tuple(tuple(run) for run in runs),
    )


def _peaks(run: Run, *, defers: bool) -> tuple[int, int, int]:
    """The most units of a run that are in flight, deferred, and both together."""
    in_flight = deferred = 0
    most_in_flight = most_deferred = most_held = 0
    for task, _, _ in run:
        if task.kind == "forward":
            in_flight += 1
            most_in_flight = max(most_in_flight, in_flight)
            most_held = max(most_held, in_flight + deferred)
        elif task.kind == "weight":
            deferred -= 1
        else:
            in_flight -= 1
            if defers:
                deferred += 1
                most_deferred = max(most_deferred, deferred)
    return most_in_flight, most_deferred, most_held
