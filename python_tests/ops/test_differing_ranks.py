"""Ranks that differ in a call get an error that names both calls: each at once, not in the end.

Ranks wait for each other for 600 s by default, and the tests for less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_ext import Grid, nn
from axonn_ext.kernels import extension
from axonn_ext.overlap.watch import Watch
from axonn_ext.spec import settings
from differing_ranks import Case, cotangent, draw_case, expected
from grids import bound, relative_error
from limits import HANG_SECONDS
from worker_pool import WorkerError, WorkerPool

ops = torch.ops.axonn
ALGORITHMS = ("fused", "chunked", "sequential")


@contextlib.contextmanager
def configured(**changes: object) -> Iterator[None]:
    """Settings for the groups that are met inside; the time limit also holds for earlier ones."""
    loaded = settings.load()
    extension.configure(dataclasses.replace(loaded, symmetric_memory_bytes=1 << 28, **changes))
    try:
        yield
    finally:
        extension.configure(loaded)


def new_group(size: int | None = None) -> Any:
    """Of the first ranks; a test's own, which is broken afterwards. All ranks must call it."""
    return dist.new_group(list(range(size or dist.get_world_size())))


def error_of(function: Callable[[], object]) -> str:
    """The first line of the error."""
    try:
        function()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return "no error"


# --- Each way to differ, by each algorithm --------------------------------------------------------


def ones(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=grad)


def differences(algorithm: str) -> dict[str, tuple[Callable[..., object], Callable[..., object]]]:
    """Two calls that are not the same one, each to be given the name and size of a group."""

    def gather_matmul(
        *, rows: int = 4, dtype: torch.dtype = torch.float32, grad: bool = False,
        own_grad: bool = False, how: str = algorithm,
    ) -> Callable[..., object]:  # fmt: skip
        return lambda *group: ops.all_gather_matmul(
            ones(rows, 4, dtype=dtype, grad=grad), ones(4, 4, dtype=dtype, grad=own_grad),
            0, *group, how,
        )  # fmt: skip

    def reduce(*, columns: int = 4) -> Callable[..., object]:
        return lambda *group: ops.matmul_reduce_scatter(
            ones(4, 4), ones(4, columns), 0, *group, algorithm
        )

    other = "sequential" if algorithm == "fused" else "fused"
    return {
        "order": (gather_matmul(), reduce()),
        "shape": (gather_matmul(), gather_matmul(rows=6)),
        "shape of a sum": (reduce(), reduce(columns=6)),
        "dtype": (gather_matmul(), gather_matmul(dtype=torch.float64)),
        "gradient": (gather_matmul(), gather_matmul(grad=True)),
        "gradient of the own operand": (gather_matmul(), gather_matmul(own_grad=True)),
        "algorithm": (gather_matmul(), gather_matmul(how=other)),
        "collectives": (
            lambda *group: ops.all_gather(ones(4), 0, *group, algorithm),
            lambda *group: ops.all_reduce(ones(4), "sum", *group, algorithm),
        ),
        "empty": (gather_matmul(), gather_matmul(rows=0)),
    }


def call_differently(algorithm: str, known: bool) -> dict[str, str]:
    """Rank 0 makes the one call, all others the other."""
    found = {}
    for name, calls in differences(algorithm).items():
        group = new_group()
        where = (group.group_name, group.size())
        if known:  # both calls, on every rank
            for call in calls:
                call(*where)
        found[name] = error_of(lambda: calls[min(dist.get_rank(), 1)](*where))  # noqa: B023
    return found


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_that_differ_get_an_error_that_names_both_calls(pool, algorithm, known):
    first, second = pool(2).run(call_differently, algorithm, known)
    for name in first:
        for rank, message in enumerate((first[name], second[name])):
            assert f"rank {rank} waited for rank {1 - rank} of group" in message, (name, message)
            assert "instead: all ranks of a group must make the same calls" in message, name
        text = first["shape"]
        assert "all_gather_matmul a_shard=float32[4,4] gather_dim=0" in text
        assert (
            "called all_gather_matmul a_shard=float32[6,4] (here a_shard=float32[4,4]) "
            f"gather_dim=0 algorithm={algorithm} instead"
        ) in text
    assert "requires_grad=a_shard" in first["gradient"]
    assert "requires_grad=b" in first["gradient of the own operand"]


def make_legal_differences() -> None:
    """What ranks need not agree on, by every algorithm, twice on one group."""
    group, rank = new_group(), dist.get_rank()
    where = (group.group_name, group.size())
    for algorithm, _ in itertools.product((*ALGORITHMS, "auto"), range(2)):
        own = ones(4, 3 + rank, grad=True)
        y = ops.all_gather_matmul(ones(2, 4), own, 0, *where, algorithm)
        assert torch.equal(y, torch.full((4, 3 + rank), 4.0))
        y.sum().backward()
        y = ops.matmul_all_reduce(
            ones(4, 2 + rank, grad=rank == 0), ones(2 + rank, 4), *where, algorithm, True
        )
        assert torch.equal(y, torch.full((4, 4), 5.0))
        with torch.set_grad_enabled(rank == 0):  # nothing here needs a gradient
            ops.all_gather(ones(2), 0, *where, algorithm)
    collective = ("chunked", "sequential")[rank]  # the same thing, for a collective on its own
    assert torch.equal(ops.all_gather(ones(2), 0, *where, collective), ones(4))
    with torch.no_grad():
        ops.all_gather(ones(2, grad=rank == 0), 0, *where, "sequential")


def test_what_ranks_need_not_agree_on_stays_legal(pool):
    pool(2).run(make_legal_differences)


LINEARS = ("weight", "input", "rows", "bias", "backward")


def differ_in_a_linear(algorithm: str) -> list[str]:
    """Which gradients are needed, and whether the weight is kept: rank 3 differs."""
    found = []
    for case in LINEARS:
        grid = Grid(x=2, y=2)
        layer = nn.Linear(8, 8, grid=grid, role="expand", algorithm=algorithm)
        odd = dist.get_rank() == 3
        if case == "weight" and odd:
            layer.requires_grad_(False)
        if case == "bias" and odd:
            layer.bias.requires_grad_(False)
        needs_grad = case == "backward" or (case == "input" and odd)
        x = ones(4 + 4 * (case == "rows" and odd), 4, grad=needs_grad)
        wanted = () if case != "backward" else (x,) if odd else (x, layer.weight)
        layer_of, x_of, wanted_of = layer, x, wanted

        def both() -> None:
            for _ in range(2):
                y = layer_of(x_of)  # noqa: B023
                if wanted_of:  # noqa: B023
                    torch.autograd.grad(y.sum(), wanted_of)  # noqa: B023

        found.append(error_of(both))
    return found


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "auto"])
def test_a_linear_of_ranks_that_differ_ends_on_every_rank(pool, algorithm):
    by_rank = pool(4).run(differ_in_a_linear, algorithm)
    for case, errors in zip(LINEARS, zip(*by_rank, strict=True), strict=True):
        op = "linear_backward" if case == "backward" else "linear_forward"
        for message in errors:
            assert op in message, (case, errors)
            assert " waited for " in message or f" calls {op}" in message, (case, errors)
        # Rank 0 shares no axis with rank 3: it hears that a rank in between has failed.
        assert any(f"called {op}" in m or "rank 0 calls" in m for m in errors[1:]), (case, errors)
        if case == "rows":
            assert any("(here x=float32[" in message for message in errors), "other rows on z"


def one_group_twice() -> str:
    """Ranks that wait for two calls of one group at once would wait in vain."""
    group, twos = new_group().group_name, ones(2, 2)
    with configured(timeout_seconds=20.0):
        return error_of(
            lambda: ops.linear_forward(
                twos, twos, None, [group, group, ""], [2, 2, 1], True, 0, 0, False, False,
                "sequential", False,
            )
        )  # fmt: skip


def test_a_linear_needs_a_group_for_each_axis(pool):
    for message in pool(2).run(one_group_twice):
        assert "group_names must be three different groups, got '" in message


# --- Groups whose ranks share no memory -----------------------------------------------------------


@contextlib.contextmanager
def separate_memory(**changes: object) -> Iterator[None]:
    """As on several hosts: no address space is left for the symmetric memory of groups met here."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    loaded = settings.load()
    # Groups that earlier tests met in this process have reserved terabytes.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 40), limits[1]))
    extension.configure(dataclasses.replace(loaded, symmetric_memory_bytes=1 << 43, **changes))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        extension.configure(loaded)


def differ_through_the_store(every_call: bool) -> dict[str, str]:
    """New calls that differ; with `every_call` (AXONN_DEBUG_COLLECTIVES) calls that are known."""
    found = {}
    with separate_memory(debug_collectives=every_call):
        for algorithm in ("sequential", "chunked"):
            for name, calls in differences(algorithm).items():
                if name == "algorithm":
                    continue  # the other is "fused", which has no memory here
                group = new_group()
                where = (group.group_name, group.size())
                with pytest.raises(ValueError, match="'fused' needs shared memory"):
                    ops.all_gather(ones(2), 0, *where, "fused")
                if every_call:
                    for call in calls:
                        call(*where)
                call = calls[dist.get_rank()]
                found[f"{name}, {algorithm}"] = error_of(lambda: call(*where))  # noqa: B023
                again = error_of(lambda: calls[0](*where))  # noqa: B023
                assert f"{group.group_name} cannot be used any more" in again
        group = new_group()
        for _ in range(3):
            y = ops.all_gather(ones(2), 0, group.group_name, group.size(), "auto")
            assert torch.equal(y, ones(4))
    return found


@pytest.mark.parametrize("every_call", [False, True], ids=["new", "known"])
def test_ranks_without_shared_memory_compare_through_the_store(pool, every_call):
    for rank, found in enumerate(pool(2).run(differ_through_the_store, every_call)):
        for name, message in found.items():
            assert f"rank {rank} waited for rank {1 - rank} of group" in message, (name, message)
            assert "which called " in message and " instead: all ranks" in message, (name, message)


def count_keys_of_calls() -> list[int]:
    """Keys in the world's store after each call, all of which are compared."""
    store = dist.distributed_c10d._get_default_store()
    counts = []
    with separate_memory(debug_collectives=True):
        group = new_group()
        for _ in range(8):
            ops.all_gather(ones(2), 0, group.group_name, group.size(), "sequential")
            dist.barrier()
            counts.append(store.num_keys())
            dist.barrier()
    return counts


def test_compared_calls_leave_nothing_behind_in_the_store(pool):
    for counts in pool(2).run(count_keys_of_calls):
        assert len(set(counts[2:])) == 1, counts


def gather_nothing(group: Any, columns: int = 1) -> None:
    """A call that moves no bytes: its ranks only meet where they compare it."""
    ops.all_gather(ones(0, columns), 0, group.group_name, group.size(), "sequential")


def met_group() -> Any:
    """A group without shared memory whose ranks have compared `gather_nothing(group)`."""
    with separate_memory():
        group = new_group()
        gather_nothing(group)
    dist.barrier()
    return group


def repeat_a_call_alone() -> None:
    group = met_group()
    if dist.get_rank() == 0:
        with configured(timeout_seconds=1.0):
            gather_nothing(group)


def test_a_call_that_is_known_is_not_compared_again(pool):
    pool(2).run(repeat_a_call_alone)


def give_up_before_a_late_rank() -> str:
    """The error of rank 1, which gives up while rank 0 waits on; then rank 2 comes."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    group = met_group()
    num_keys = store.num_keys()
    dist.barrier()
    error = ""
    if rank == 1:
        while store.num_keys() == num_keys:  # rank 0 has not begun
            time.sleep(0.01)
        with configured(timeout_seconds=1.0):
            error = error_of(lambda: gather_nothing(group, columns=2))
        store.set(f"{group.group_name}: given up", "")
    else:
        if rank == 2:
            store.wait([f"{group.group_name}: given up"])
        gather_nothing(group, columns=2)
    return error


def test_the_rank_that_is_late_is_named(pool):
    _, message, _ = pool(3).run(give_up_before_a_late_rank)
    assert "rank 1 waited for 'call' of rank 2 of group" in message
    assert "has not answered after 1 s (AXONN_TIMEOUT_SECONDS)" in message


def give_up_in_turn() -> str:
    """The error of this rank, which comes when the rank before has given up."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    group = met_group()
    if rank > 0:
        store.wait([f"{group.group_name}: rank {rank - 1} gave up"])
    error = ""
    if rank < 3:
        with configured(timeout_seconds=1.0):
            error = error_of(lambda: gather_nothing(group, columns=3))
    store.set(f"{group.group_name}: rank {rank} gave up", "")
    return error


def test_a_rank_that_came_late_is_not_named_later(pool):
    for rank, message in enumerate(pool(4).run(give_up_in_turn)[:3]):
        assert f"rank {rank} waited for 'call' of rank {rank + 1} of group" in message


# --- Time limits ----------------------------------------------------------------------------------


def wait_for_ranks_that_never_come(algorithm: str, lazy: str) -> tuple[str, float]:
    """The error of rank 0, and after how many seconds it came."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
        group = new_group()
    if dist.get_rank() != 0:
        return "", 0.0
    began = time.monotonic()
    with configured(timeout_seconds=1.0):
        error = error_of(lambda: ops.all_gather(ones(4), 0, group.group_name, 3, algorithm))
    return error, time.monotonic() - began


@pytest.mark.parametrize("lazy", ["0", "1"], ids=["connected", "connected on demand"])
@pytest.mark.parametrize("algorithm", ["fused", "sequential"])
def test_the_first_call_of_a_group_ends_in_time(pool, algorithm, lazy):
    message, seconds = pool(3).run(wait_for_ranks_that_never_come, algorithm, lazy)[0]
    missing = "1" if lazy == "0" else "[12]"  # neither comes; either may be connected first
    assert re.search(f"all_gather: rank 0 waited for rank {missing} of group", message), message
    assert "has not come after 1 s (AXONN_TIMEOUT_SECONDS)" in message
    assert seconds >= 1.0


def meet_in_two_orders() -> list[str]:
    """A thread makes the first call of one group while the main one makes that of another."""
    groups = [new_group(), new_group()]
    if dist.get_rank() == 1:
        groups.reverse()
    errors = []

    def first_call(group: Any) -> None:
        errors.append(
            error_of(lambda: ops.all_gather(ones(2), 0, group.group_name, 2, "sequential"))
        )

    thread = threading.Thread(target=first_call, args=(groups[0],))
    thread.start()
    time.sleep(0.5)  # it waits for the peer, whose main thread comes now
    first_call(groups[1])
    thread.join()
    return errors


def test_a_group_that_waits_for_its_ranks_keeps_no_other_from_meeting(pool):
    for errors in pool(2).run(meet_in_two_orders):
        assert errors == ["no error"] * 2


def lose_a_peer_before_the_first_call() -> str:
    group = new_group()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    return error_of(lambda: ops.all_gather(ones(4), 0, group.group_name, 2, "sequential"))


def lose_a_peer_between_calls() -> str:
    group = new_group()
    ops.all_gather(ones(4), 0, group.group_name, 2, "sequential")
    if dist.get_rank() == 1:
        os._exit(0)
    return error_of(lambda: ops.all_gather(ones(4), 0, group.group_name, 2, "sequential"))


@pytest.mark.parametrize("where", [lose_a_peer_before_the_first_call, lose_a_peer_between_calls])
def test_a_peer_that_has_ended_is_noticed(where):
    pool = WorkerPool(2)
    try:
        with pytest.raises(WorkerError, match="rank 1: the process ended"):
            pool.run(where)
        message = pool.answers[0]
        assert "all_gather: rank 0 waited for rank 1" in message
        assert "which has died" in message or "which has left the group" in message
    finally:
        pool.close()


# --- A fork is no rank ----------------------------------------------------------------------------


def errors_in_a_fork(*calls: Callable[[], object]) -> list[str]:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(theirs, "\n".join(error_of(call) for call in calls).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        errors = pipe.read().splitlines()
    os.waitpid(child, 0)
    return errors


def call_in_a_fork() -> list[str]:
    """The errors of a forked child, which must leave its parent's groups as they were."""
    grid = Grid(x=2)
    axis = grid.axis("x")
    own = torch.full((4,), float(dist.get_rank()))
    watch = Watch(
        axis, timeout_s=HANG_SECONDS, compare=False
    )  # of the collectives of axonn_ext.overlap

    def gather(algorithm: str) -> Tensor:
        result = ops.all_gather(own, 0, axis.name, 2, algorithm)
        assert isinstance(result, Tensor)
        return result

    for algorithm in ("fused", "sequential"):
        gather(algorithm)
    errors = errors_in_a_fork(
        lambda: gather("fused"),
        lambda: gather("sequential"),
        lambda: gather("auto"),
        lambda: ops.all_gather_matmul(ones(2, 2), ones(2, 2), 0, axis.name, 2, "auto"),
        lambda: watch.issue("all_gather of a weight", compare=False),
    )
    for algorithm in ("fused", "sequential"):
        assert torch.equal(gather(algorithm), torch.tensor([0.0] * 4 + [1.0] * 4))
    return errors


def test_a_fork_is_refused_and_harms_nobody(pool):
    for rank, errors in enumerate(pool(2).run(call_in_a_fork)):
        assert len(errors) == 5
        for message in errors:
            assert f"is a fork of rank {rank} of " in message and "'spawn'" in message
        assert all("of group x (ranks 0, 1) and no rank of it" in message for message in errors[:4])


def call_in_a_fork_without_shared_memory() -> list[str]:
    group = met_group()
    return errors_in_a_fork(lambda: gather_nothing(group))


def test_a_fork_is_refused_where_ranks_share_no_memory(pool):
    for rank, [message] in enumerate(pool(2).run(call_in_a_fork_without_shared_memory)):
        assert f"is a fork of rank {rank} of " in message


# --- Random programs ------------------------------------------------------------------------------


def limit_of(case: Case) -> float:
    """AXONN_TIMEOUT_SECONDS: short where ranks may wait in vain, long where each will come."""
    return HANG_SECONDS if case.is_certain() and case.first_difference() is None else 30.0


def run_program(case: Case, rank: int, group: Any) -> str:
    """ "right", an error's first line, or "WRONG: ..."; of this rank's calls."""
    where = (group.group_name, case.world)
    outcome = "right"
    try:
        for number, call in enumerate(case.programs[rank]):
            operands = call.operands(rank, case.world)
            for tensor, needed in zip(operands, call.gradients, strict=False):
                tensor.requires_grad_(needed)
            wanted = [t for t in operands if t.requires_grad]
            arguments = (*call.arguments(), *where, call.algorithm, *call.options())
            result = getattr(ops, call.op)(*operands, *arguments)
            backward = case.backward and bool(wanted) and call.reduce_op == "sum"
            given = cotangent(call, result, rank)
            grads = torch.autograd.grad(result, wanted, given) if backward else ()
            if case.first_difference() in range(number + 1):
                continue  # an error must still come
            same = [program[number] for program in case.programs]
            y, gradients = expected(same, rank, backward=backward)
            limit = 4 * bound(call.dtype, 8 * max(1, *call.sizes) * case.world)
            for got, want in zip([result, *grads], [y, *gradients], strict=True):
                if relative_error(got.detach(), want) > limit:
                    return f"WRONG: call {number}, {call}"
    except RuntimeError as error:
        outcome = str(error).splitlines()[0]
    finally:
        dist.destroy_process_group(group)
    return outcome


def run_cases(seeds: range, folder: str) -> dict[int, str]:
    """What came of each seed on this rank; the one that is run is in a file, should it abort."""
    rank, found = dist.get_rank(), {}
    for seed in seeds:
        case = draw_case(seed)
        group = new_group(case.world)
        if rank >= case.world:
            continue
        Path(folder, f"rank{rank}").write_text(str(seed))
        with configured(timeout_seconds=limit_of(case)):
            found[seed] = run_program(case, rank, group)
    return found


def check_cases(pool: Callable[[int], WorkerPool], seeds: range, folder: Path) -> None:
    try:
        by_rank = pool(4).run(run_cases, seeds, str(folder), timeout_s=6 * HANG_SECONDS)
    except WorkerError as error:
        reached = {path.name: path.read_text() for path in sorted(folder.glob("rank*"))}
        raise AssertionError(f"the ranks had come to the seeds {reached}: {error}") from error
    for seed in seeds:
        case = draw_case(seed)
        texts = [by_rank[rank][seed] for rank in range(case.world)]
        detail = (seed, case.deviation, texts, case)
        assert not any(text.startswith("WRONG") for text in texts), detail
        right = [text == "right" for text in texts]
        differs = case.first_difference() is not None
        if case.is_certain():
            assert all(right) if not differs else not any(right), detail
        else:
            assert all(right) or not any(right), detail
        for text in texts:
            assert text == "right" or ("rank" in text and ": " in text), detail


def test_a_few_random_programs(pool, tmp_path):
    check_cases(pool, range(24), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 125))
def test_random_programs(pool, tmp_path, first):
    check_cases(pool, range(first, first + 125), tmp_path)
