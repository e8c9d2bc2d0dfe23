"""What "auto" stands for: measured in a warm-up only, the same on all ranks, kept on disk."""

from __future__ import annotations

import contextlib
import random
import time
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axonn_ext import GridShape, nn, ops, warm_up
from axonn_ext.kernels import extension, tuning
from axonn_ext.spec import settings
from grids import grid_of
from named_groups import group_named
from tuning_cache import cache_in, edit, files
from worker_pool import WorkerPool

# A call: rows, inner size, columns of what each rank multiplies.
SMALL = (8, 16, 8)
Report = tuple[str, str, str]  # signature, algorithm, source


def call(
    shape: tuple[int, int, int] = SMALL,
    *,
    algorithm: str = "auto",
    group: dist.ProcessGroup | None = None,
    transposed: bool = False,
) -> None:
    """One op, whose sum every rank checks."""
    m, k, n = shape
    a = torch.ones(k, m).t() if transposed else torch.ones(m, k)
    group = group or dist.group.WORLD
    assert group is not None
    block = ops.matmul_reduce_scatter(a, torch.ones(k, n), group, algorithm=algorithm)
    assert torch.equal(block, torch.full((m // group.size(), n), float(k * group.size())))


def reports() -> list[Report]:
    return [(c.signature, c.algorithm, c.source) for c in tuning.choices()]


# --- Outside and inside of a warm-up ------------------------------------------------------------


def outside_and_inside(directory: Path) -> tuple[list[Report], list[tuning.Choice]]:
    with cache_in(directory):
        call()
        outside = reports()
        assert files(directory) == []
        tuning.clear()
        with warm_up(), warm_up():
            call()
        call()
        return outside, tuning.choices()


@pytest.mark.parametrize("world_size", [2, 4])
def test_only_a_warm_up_measures(pool, tmp_path: Path, world_size: int):
    answers = pool(world_size).run(outside_and_inside, tmp_path)
    assert all(answer == answers[0] for answer in answers)
    [(signature, algorithm, source)], [choice] = answers[0]
    assert (algorithm, source) == ("fused", "default")
    assert signature == (
        "matmul_reduce_scatter float32 M=8 N=8 scatter_dim=0 "
        f"layouts=rows[8,16],rows[16,8] ranks={world_size} memory=shared threads=1"
    )
    assert (choice.signature, choice.source) == (signature, "measured")
    assert set(choice.median_us) == {"fused", "chunked", "sequential"}
    fused, sequential = choice.median_us["fused"], choice.median_us["sequential"]
    assert 0 < fused < 1e6 and 0 < sequential < 1e6
    assert choice.algorithm == ("fused" if fused <= 1.05 * sequential else "sequential")
    [file] = files(tmp_path)
    record = tomllib.loads(file.read_text())
    assert (record["signature"], record["algorithm"]) == (signature, choice.algorithm)
    assert record["median_us"] == pytest.approx(choice.median_us, rel=1e-3, abs=1e-3)
    assert record["torch"] == torch.__version__


def measure_twice(directory: Path) -> tuple[tuning.Choice, tuning.Choice]:
    with cache_in(directory), warm_up():
        call()
        [first] = tuning.choices()
        call()
        with warm_up():
            call()
        [second] = tuning.choices()
        return first, second


def test_a_measured_signature_is_not_measured_again(pool, tmp_path: Path):
    for first, second in pool(2).run(measure_twice, tmp_path):
        assert first == second


def sources_of_calls(directory: Path, warm_calls: list[bool]) -> list[str]:
    with cache_in(directory):
        sources = []
        for warm in warm_calls:
            with warm_up() if warm else contextlib.nullcontext():
                call()
            sources.append(tuning.choices()[0].source)
        return sources


def test_a_default_is_measured_in_a_later_warm_up(pool, tmp_path: Path):
    warm_calls = [False, False, True, True, False]
    expected = ["default", "default", "default", "measured", "measured"]
    assert pool(4).run(sources_of_calls, tmp_path, warm_calls) == [expected] * 4


def test_one_call_in_a_warm_up_is_not_enough_for_a_default(pool, tmp_path: Path):
    warm_calls = [False, True, False, False, True, True]
    expected = ["default"] * 5 + ["measured"]
    assert pool(2).run(sources_of_calls, tmp_path, warm_calls) == [expected] * 2


# --- Ranks that would differ --------------------------------------------------------------------


def partial_warm_up(
    directory: Path, warm_ranks: list[int], known: bool
) -> tuple[list[Report], list[Report]]:
    with cache_in(directory):
        if known:
            call()
        with warm_up() if dist.get_rank() in warm_ranks else contextlib.nullcontext():
            for _ in range(4):
                call()
        partial = reports()
        with warm_up():
            for _ in range(2):
                call()
        return partial, reports()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("warm_ranks", [[0], [1, 2, 3]])
def test_some_ranks_in_a_warm_up(pool, tmp_path: Path, warm_ranks: list[int], known: bool):
    answers = pool(4).run(partial_warm_up, tmp_path, warm_ranks, known)
    assert all(answer == answers[0] for answer in answers)
    [(*_, partial)], [(*_, whole)] = answers[0]
    # Rank 0 decides for a signature that all ask about; one that is known waits for all ranks.
    assert partial == ("measured" if 0 in warm_ranks and not known else "default")
    assert whole == "measured"


def random_warm_ups(directory: Path, num_calls: int) -> list[list[Report]]:
    """Every rank enters and leaves warm-ups as it likes, also for several calls at a time."""
    own = random.Random(dist.get_rank())
    shared = random.Random(7)
    seen = []
    with cache_in(directory):
        for _ in range(num_calls):
            shape = (8, shared.choice([8, 16, 24]), 8)
            if shared.random() < 0.1:
                tuning.clear()
            with warm_up() if own.random() < 0.7 else contextlib.nullcontext():
                call(shape)
            seen.append(reports())
    return seen


def test_ranks_agree_whichever_enter_warm_ups(pool, tmp_path: Path):
    answers = pool(4).run(random_warm_ups, "", 60)
    assert all(answer == answers[0] for answer in answers)
    sources = {source for seen in answers[0] for *_, source in seen}
    assert sources == {"default", "measured"}


def fused_bytes(directories: list[Path]) -> tuple[list[Report], int]:
    with cache_in(directories[dist.get_rank()]):
        before = extension.symmetric_memory_bytes_in_use()
        call()
        return reports(), extension.symmetric_memory_bytes_in_use() - before


def measure_in(directory: Path) -> None:
    with cache_in(directory), warm_up():
        call()


def test_rank_0_decides_where_disks_differ(tmp_path: Path, pool):
    directories = [tmp_path / name for name in ("fused", "sequential", "none")]
    for directory in directories[:2]:
        pool(2).run(measure_in, directory)
        edit(files(directory)[0], directory.name)
    fused, sequential, none = directories
    for dirs in ([sequential, fused], [fused, sequential], [sequential, none], [none, sequential]):
        expected = (dirs[0].name, "disk") if dirs[0] != none else ("fused", "default")
        for [(_, *got)], _ in pool(2).run(fused_bytes, dirs):
            assert tuple(got) == expected, dirs


def test_another_process_obeys_the_file(pool, tmp_path: Path):
    kept, none = tmp_path / "kept", tmp_path / "none"
    pool(2).run(measure_in, kept)
    [file] = files(kept)
    edit(file, "sequential")
    before = file.stat().st_mtime_ns
    started = WorkerPool(2)
    try:
        for [(_, *got)], num_bytes in started.run(fused_bytes, [kept, none]):
            assert got == ["sequential", "disk"]
            assert num_bytes == 0  # it is what was run, too
        started.run(measure_in, kept)
    finally:
        started.close()
    assert file.stat().st_mtime_ns == before


def mismatch(seen_before: bool, warm: bool) -> str:
    """Rank 1 makes another call than rank 0, on a group that is broken afterwards."""
    group = dist.new_group()
    with cache_in(""), warm_up() if warm else contextlib.nullcontext():
        if seen_before:
            call(group=group)
        try:
            call(SMALL if dist.get_rank() == 0 else (8, 16, 24), group=group)
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("warm", [False, True])
def test_shapes_that_differ_are_an_error_at_once_on_every_rank(pool, warm: bool):
    first, text = pool(2).run(mismatch, False, warm)
    assert "rank 0 waited for" in first or "rank 1" in first
    assert "N=24" in text and "rank 1 waited for rank 0" in text and "(here " in text


def test_a_rank_that_alone_meets_something_new_does_not_wait(pool):
    first, text = pool(2).run(mismatch, True, False)
    assert "rank 0 waited for rank 1" in first and "failed; see the error" in first
    assert "rank 1 waited for 'answer' of rank 0" in text
    assert "has gone on to matmul_reduce_scatter" in text


def mixed_layouts() -> list[tuning.Choice]:
    with cache_in(""), warm_up():
        call(transposed=dist.get_rank() == 1)
        call(transposed=dist.get_rank() == 0)
        return tuning.choices()


def test_layouts_may_differ(pool):
    answers = pool(2).run(mixed_layouts)
    assert answers[0] == answers[1]
    [choice] = answers[0]
    assert choice.source == "measured" and "layouts=rows[8,16],rows[16,8]" in choice.signature


def own_sizes() -> list[tuning.Choice]:
    """Calls that differ only in K, on which ranks need not agree."""
    with cache_in(""), warm_up():
        call((8, 16, 8))
        call((8, 256, 8))
        call((8, 16, 8))
        return tuning.choices()


def test_calls_that_differ_in_a_size_of_their_own_are_measured_each(pool):
    answers = pool(2).run(own_sizes)
    assert answers[0] == answers[1]
    assert [choice.source for choice in answers[0]] == ["measured", "measured"]


def late_ranks_of_a_linear() -> list[str]:
    """A replicated Linear that was met before the warm-up; half the ranks always come late."""
    grid = grid_of(GridShape(x=2, y=2))
    linear = nn.Linear(16, 16, grid=grid, role="expand", layout="replicated", bias=False)
    x = torch.ones(4, 8)
    with cache_in(""), torch.no_grad():
        linear(x)
        with warm_up():
            for _ in range(4):
                time.sleep(0.02 * grid.coords["x"])
                linear(x)
        return [choice.source for choice in tuning.choices()]


def test_a_linear_met_before_a_warm_up_keeps_its_default(pool):
    assert pool(4).run(late_ranks_of_a_linear) == [["default"]] * 4


def linear_in_a_warm_up() -> list[tuple[str, str]]:
    linear = nn.Linear(16, 16, grid=grid_of(GridShape(x=2, y=2)), role="expand", bias=False)
    x = torch.ones(8, 8, requires_grad=True)
    with cache_in(""), warm_up():
        linear(x).sum().backward()
        return [(choice.signature.split()[0], choice.algorithm) for choice in tuning.choices()]


def test_a_linear_is_measured_as_a_whole_and_ranks_agree(pool):
    answers = pool(4).run(linear_in_a_warm_up)
    assert [op for op, _ in answers[0]] == ["linear_backward", "linear_forward"]
    assert answers == [answers[0]] * 4


# --- Disks that fail ----------------------------------------------------------------------------


def damage_and_repair(directory: Path, damage: str) -> list[Report]:
    with cache_in(directory):
        with warm_up():
            call()
        if dist.get_rank() == 0:
            [file] = files(directory)
            content = file.read_bytes()
            damages = {
                "truncated": content[:-20],
                "empty": b"",
                "noise": random.Random(1).randbytes(500),
                "other": content.replace(b'signature = "', b'signature = "other '),
                "unknown": content.replace(b'm = "', b'm = "no_'),
            }
            file.write_bytes(damages[damage])
        dist.barrier()
        tuning.clear()
        call()
        seen = reports()
        tuning.clear()
        with warm_up():
            call()
        return seen + reports()


@pytest.mark.parametrize("damage", ["truncated", "empty", "noise", "other", "unknown"])
def test_a_damaged_file_is_as_good_as_none(pool, tmp_path: Path, damage: str):
    answers = pool(2).run(damage_and_repair, tmp_path, damage)
    assert answers[0] == answers[1]
    (*_, before), (signature, algorithm, after) = answers[0]
    assert (before, after) == ("default", "measured")
    record = tomllib.loads(files(tmp_path)[0].read_text())
    assert (record["signature"], record["algorithm"]) == (signature, algorithm)


@pytest.mark.parametrize("directory", ["", "blocked"])
def test_no_disk_is_needed(pool, tmp_path: Path, directory: str):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, where a folder should be")
    answers = pool(2).run(sources_of_calls, blocked if directory else "", [True, False])
    assert answers == [["measured", "measured"]] * 2
    assert files(tmp_path) == [blocked]


# --- Groups -------------------------------------------------------------------------------------


def used_name_again(directory: Path) -> list[list[Report]]:
    """Two groups of one name, one after the other; the file changes between them."""
    seen = []
    with cache_in(directory):
        for attempt, algorithm in enumerate(("sequential", "fused")):
            if dist.get_rank() == 0:
                edit(files(directory)[0], algorithm)
            dist.barrier()
            with group_named("tuned", attempt) as name:
                ops.matmul_reduce_scatter(torch.ones(8, 16), torch.ones(16, 8), name)
                seen.append(reports())
            assert tuning.choices() == []
    return seen


def test_a_group_is_forgotten_with_its_name(pool, tmp_path: Path):
    pool(2).run(measure_in, tmp_path)
    for seen in pool(2).run(used_name_again, tmp_path):
        assert [(algorithm, source) for [(_, algorithm, source)] in seen] == [
            ("sequential", "disk"),
            ("fused", "disk"),
        ]


def too_large() -> list[str]:
    with cache_in("", symmetric_memory_bytes=settings.MIN_SYMMETRIC_MEMORY_BYTES), warm_up():
        group = dist.new_group()
        errors = []
        for shape in [(8, 16, 8), (512, 1, 1024)]:
            try:
                call(shape, group=group)
            except RuntimeError as error:
                errors.append(str(error))
        call((16, 8, 8), group=group)
        assert [c.source for c in tuning.choices()] == ["measured"] * 2
        dist.destroy_process_group(group)
        return errors


def test_an_algorithm_that_fails_is_an_error_and_no_choice(pool):
    for [error] in pool(2).run(too_large):
        assert "bytes of symmetric memory" in error
