"""Saving and loading any kind of model and optimizer, and states that cannot be saved."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from axonn_ext import Grid, GridShape, checkpoint
from axonn_ext.checkpoint import CheckpointError, Saver
from axonn_ext.checkpoint.files import find_problems
from axonn_ext.checkpoint.folder import CheckpointFolder, find_checkpoint, replaced_path
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.nn import Linear
from axonn_ext.optim import AdamW
from axonn_ext.train.checkpoints import find_resumed
from axonn_ext.train.config import CheckpointTable, Config
from grids import grid_of
from limits import HANG_SECONDS


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd without momentum": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "ours": lambda p: AdamW(list(p), lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_model_goes_on_as_if_nothing_had_happened(tmp_path, make) -> None:
    def steps(model: nn.Module, optimizer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = nn.functional.dropout(model(torch.randn(16, 8))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = small()
    optimizer = make(model.parameters())
    steps(model, optimizer, 3)
    extra = {"epoch": 2, "scaler": {"scale": 1024.0}, "nothing": None}
    checkpoint.save(tmp_path / "one", model=model, optimizer=optimizer, extra=extra)
    want = steps(model, optimizer, 3)

    other = small(seed=1)
    other_optimizer = make(other.parameters())
    steps(other, other_optimizer, 1)
    assert checkpoint.load(tmp_path / "one", model=other, optimizer=other_optimizer) == extra
    assert steps(other, other_optimizer, 3) == want  # including the random numbers of dropout
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_a_name_is_on_the_disk_when_a_save_returns(tmp_path, monkeypatch) -> None:
    """The folder is renamed after all files are on the disk, and then its name is synced, too."""
    calls: list[str] = []
    rename, fsync = os.rename, os.fsync

    def renamed(source, target) -> None:
        rename(source, target)
        calls.append(f"rename {Path(target).name}")

    def synced(file: int) -> None:
        fsync(file)
        name = Path(os.readlink(f"/proc/self/fd/{file}")).name
        calls.append(f"sync {name.removeprefix('.').removesuffix('.partial')}")

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "fsync", synced)
    checkpoint.save(tmp_path / "one", model=small())
    assert calls[-2:] == ["rename one", f"sync {tmp_path.name}"]
    before = {call for call in calls[:-2] if call.startswith("sync")}
    assert {f"sync {file.name}" for file in (tmp_path / "one").iterdir()} <= before


def numbers_after_a_load(folder: Path) -> tuple[list[float], list[float]]:
    """The numbers that a rank draws after saving, and those that it draws after loading."""
    model = small()
    torch.manual_seed(100 + dist.get_rank())
    checkpoint.save(folder, model=model)
    want = torch.rand(3).tolist()
    torch.manual_seed(0)
    checkpoint.load(folder, model=model)
    return want, torch.rand(3).tolist()


def test_each_rank_goes_on_with_its_own_random_numbers(pool, tmp_path) -> None:
    wanted, found = zip(*pool(4).run(numbers_after_a_load, tmp_path / "one"), strict=True)
    assert found == wanted and len({first for first, *_ in found}) == 4


def test_options_of_the_optimizer_are_restored_if_asked(tmp_path) -> None:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.025
    checkpoint.save(tmp_path / "one", model=model, optimizer=optimizer)
    for options, lr in ((True, 0.025), (False, 0.5)):
        other = torch.optim.AdamW(model.parameters(), lr=0.5)
        checkpoint.load(tmp_path / "one", model=model, optimizer=other, options=options)
        assert other.param_groups[0]["lr"] == lr
        assert other.param_groups[0]["betas"] == (0.9, 0.999)


def test_masters_are_saved_in_fp32_and_load_in_any_dtype(tmp_path) -> None:
    model = small().bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-4)
    with torch.no_grad():
        for p in model.parameters():
            optimizer.pieces_of(p)[0].master.add_(1e-6)
    checkpoint.save(tmp_path / "one", model=model, optimizer=optimizer)
    stored = read_manifest(tmp_path / "one").tensors
    assert {t.dtype for name, t in stored.items() if name.startswith("model.")} == {"float32"}
    whole, low = small(seed=1), small(seed=2).bfloat16()
    checkpoint.load(tmp_path / "one", model=whole)
    checkpoint.load(tmp_path / "one", model=low)
    for p, q, r in zip(model.parameters(), whole.parameters(), low.parameters(), strict=True):
        assert torch.equal(q, optimizer.pieces_of(p)[0].master)
        assert torch.equal(r, optimizer.pieces_of(p)[0].master.bfloat16())


def test_another_model_is_refused_with_names_and_shapes(tmp_path) -> None:
    model, wider = small(), small()
    wider[2] = nn.Linear(8, 3)
    checkpoint.save(tmp_path / "one", model=model)
    before = [p.clone() for p in model.parameters()]
    for other, message in (
        (nn.Sequential(nn.Linear(8, 9)), r"model\.0\.weight has shape \[8, 8\], in .* \[9, 8\]"),
        (nn.Sequential(nn.Linear(8, 8)), r"the model does not have buffer\.1\.num_batches_tracked"),
        (nn.ModuleDict({"a": nn.Linear(8, 8)}), r"it does not have model\.a\.bias"),
        (wider, r"model\.2\.weight has shape \[2, 8\], in the model \[3, 8\]$"),  # no hint about @
    ):
        with pytest.raises(CheckpointError, match=f"of another model: .*{message}"):
            checkpoint.load(tmp_path / "one", model=other)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path) -> None:
    model = small()
    for extra, message in (
        ({"a": {1}}, r"extra\['a'\]: a set cannot be kept; expected None, bool, int"),
        ([1], "extra: expected a mapping, got a list"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.save(tmp_path / "one", model=model, extra=extra)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make"):
        checkpoint.save(tmp_path / "file" / "one", model=model)
    checkpoint.save(tmp_path / "two", model=model)
    with pytest.raises(CheckpointError, match="expected a new folder, got one that exists"):
        checkpoint.save(tmp_path / "two", model=model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "two"]


def test_another_optimizer_is_refused(tmp_path) -> None:
    model = small()
    checkpoint.save(tmp_path / "none", model=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="has no optimizer; without one, only the model is"):
        checkpoint.load(tmp_path / "none", model=model, optimizer=optimizer)
    checkpoint.save(tmp_path / "one", model=model, optimizer=optimizer)
    first, *rest = model.parameters()
    other = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
    with pytest.raises(CheckpointError, match="with 1 groups of parameters, and this one has 2"):
        checkpoint.load(tmp_path / "one", model=model, optimizer=other)


def test_a_run_keeps_what_it_should(tmp_path) -> None:
    model = small()
    with torch.no_grad():
        saver = Saver(tmp_path / "c", keep_last=2, keep_every=4)
        for step in range(1, 8):
            next(model.parameters()).fill_(step)
            saver.save(step, model=model)
        saver.wait()
    folder = CheckpointFolder(tmp_path / "c")
    assert folder.steps() == [4, 6, 7]
    assert find_checkpoint(tmp_path / "c") == folder.latest() == folder.path(7)
    for step in folder.steps():
        checkpoint.load(folder.path(step), model=model)
        assert next(model.parameters()).flatten()[0] == step, "copied before the next step"
    (folder.path(7) / "manifest.json").write_text("{")
    assert folder.latest() == folder.path(6)
    assert not list((tmp_path / "c").glob(".*"))


def test_a_save_is_written_behind_the_next_steps(tmp_path) -> None:
    model, next_steps, came = small(), threading.Event(), []
    saver = Saver(
        tmp_path, on_saved=lambda saved: came.append(next_steps.wait(HANG_SECONDS))
    )  # fmt: skip
    with torch.no_grad():
        next(model.parameters()).fill_(1)
        saver.save(1, model=model)
        next(model.parameters()).fill_(2)
    next_steps.set()
    saver.wait()
    assert came == [True], "save has returned before the checkpoint was on the disk"
    checkpoint.load(saver.folder.path(1), model=model)
    assert next(model.parameters()).flatten()[0] == 1


def test_what_a_run_left_that_was_resumed_further_back_is_not_taken_for_newer(tmp_path) -> None:
    model = small()
    for steps in ((10, 20, 30), (11, 12, 20)):
        saver = Saver(tmp_path / "c", keep_last=1, keep_every=10)
        for step in steps:
            saver.save(step, model=model)
            saver.wait()
            assert saver.folder.latest() == saver.folder.path(step)
        saver.wait()
    assert saver.folder.steps() == [10, 20, 30]


def test_a_replacement_that_was_interrupted_leaves_the_old_checkpoint(tmp_path) -> None:
    """A job may be killed after it has renamed the old folder, and before it names the new one."""
    model = small()
    with torch.no_grad():
        saver = Saver(tmp_path / "run" / "checkpoints", background=False)
        next(model.parameters()).fill_(1)
        saver.save(1, model=model)
        folder = saver.folder.path(1)
        shutil.copytree(folder, folder.with_name(f".{folder.name}.partial"))
        folder.rename(replaced_path(folder))
        assert saver.folder.steps() == []
        next(model.parameters()).fill_(2)
        saver.save(2, model=model)
    assert saver.folder.steps() == [1, 2]
    checkpoint.load(folder, model=model)
    assert next(model.parameters()).flatten()[0] == 1
    assert not list(saver.folder.root.glob(".*"))
    folder.rename(replaced_path(folder))
    shutil.rmtree(saver.folder.path(2))
    (saver.folder.root / "latest").unlink()
    resume = Config(checkpoint=CheckpointTable(interval=1, resume="auto"))
    assert find_resumed(resume, tmp_path / "run") == str(folder)


def test_what_is_half_removed_is_no_checkpoint_and_is_removed_with_the_next_save(tmp_path) -> None:
    saver, model = Saver(tmp_path, keep_last=1, background=False), small()
    saver.save(1, model=model)
    saver.folder.path(1).rename(tmp_path / ".step-00000001.pruned.partial")
    assert saver.folder.steps() == []
    for step in (1, 2):
        saver.save(step, model=model)
    assert saver.folder.steps() == [2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


def test_a_full_disk_is_an_error_and_leaves_the_last_checkpoint(tmp_path) -> None:
    model, limits = nn.Linear(600, 600), resource.getrlimit(resource.RLIMIT_FSIZE)
    saver = Saver(tmp_path, background=False)
    saver.save(1, model=model)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: File too large"):
            saver.save(2, model=model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert saver.folder.steps() == [1] and not list(tmp_path.glob(".*"))
    assert not list(find_problems(saver.folder.path(1), read_manifest(saver.folder.path(1))))
    saver.save(3, model=model)
    assert saver.folder.steps() == [1, 3]


# --- Several ranks --------------------------------------------------------------------------------


def save_where_rank_1_cannot(folder: Path) -> str:
    grid = grid_of(GridShape(2))
    model = nn.ModuleDict({"linear": Linear(8, 8, role="expand", grid=grid)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if grid.rank == 1:
        weight = model["linear"].weight
        optimizer.state[weight]["odd"] = torch.zeros(3)
    try:
        checkpoint.save(folder, model=model, optimizer=optimizer)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_an_error_of_one_rank_is_raised_on_all(pool, tmp_path) -> None:
    messages = pool(2).run(save_where_rank_1_cannot, tmp_path / "one")
    want = "rank 1: optimizer.linear.weight.odd has shape [3]: expected that of the parameter"
    assert all(message.startswith(want) for message in messages), messages
    assert not list(tmp_path.iterdir())


def save_behind_where_rank_1_cannot(folder: Path) -> list[str]:
    """A background save that fails on one rank, and one that succeeds."""
    grid = grid_of(GridShape(2))
    model = nn.ModuleDict({"linear": Linear(8, 8, role="expand", grid=grid)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saver, said = Saver(folder), []
    for step in (1, 2):
        state = {"odd": torch.zeros(3)} if grid.rank == 1 and step == 1 else {}
        optimizer.state[model["linear"].weight] = state
        saver.save(step, model=model, optimizer=optimizer)
        try:
            saver.wait()
        except CheckpointError as error:
            said.append(str(error))
    return [*said, str(saver.folder.steps())]


def test_a_save_that_one_rank_cannot_make_leaves_all_in_step(pool, tmp_path) -> None:
    for answer in pool(2).run(save_behind_where_rank_1_cannot, tmp_path):
        assert len(answer) == 2
        assert answer[0].startswith("rank 1: optimizer.linear.weight.odd has shape [3]")
        assert answer[1] == "[2]"


def save_to_a_folder_of_its_own(folder: Path) -> str:
    """Saves as if each host had its own file system; returns the error."""
    try:
        checkpoint.save(folder / str(torch.distributed.get_rank()), model=small())
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_file_system_that_hosts_do_not_share_is_named(pool, tmp_path) -> None:
    messages = pool(2).run(save_to_a_folder_of_its_own, tmp_path)
    want = (
        f"rank 1: {tmp_path / '.1.partial'} is not here, where rank 0 has made it: the folder must "
        "be in a file system that all hosts share"
    )
    assert messages == [want, want]
    assert not list(tmp_path.iterdir())


def load_one_damaged_file(folder: Path) -> str:
    grid = grid_of(GridShape(2))
    model = nn.ModuleDict({"linear": Linear(64, 64, role="expand", grid=grid)})
    checkpoint.save(folder, model=model)
    torch.distributed.barrier()
    if grid.rank == 0:
        path = folder / "rank-00001.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    torch.distributed.barrier()
    try:
        checkpoint.load(folder, model=model, random=False)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_damage_that_one_rank_sees_is_raised_on_all(pool, tmp_path) -> None:
    messages = pool(2).run(load_one_damaged_file, tmp_path / "one")
    assert len(set(messages)) == 1
    assert "rank-00001.safetensors is damaged: bytes" in messages[0]


def save_what_differs(folder: Path) -> list[str]:
    """Saves models that differ: in a name, in a shape, and on one rank of a pipeline stage."""
    rank, errors = torch.distributed.get_rank(), []
    grid = grid_of(GridShape(pipe=2, x=2))
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (nn.Linear(2, 3), nn.Linear(2, 3, bias=False)),
        (nn.Linear(2, 3), nn.Linear(3, 3)),
        (
            nn.ModuleList([Linear(8, 8, role="expand", grid=grid)]),
            nn.ModuleList([Linear(8, 8, role="expand", grid=grid, dtype=torch.bfloat16)]),
        ),
    ]
    for one, other in pairs:
        try:
            checkpoint.save(folder / "one", model=other if rank == 3 else one)
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def test_ranks_whose_tensors_differ_are_refused_before_anything_is_written(pool, tmp_path) -> None:
    for errors in pool(4).run(save_what_differs, tmp_path):
        assert errors == [
            "ranks 0 and 3 have different tensors: model.bias is float32 [3] on rank 0, missing "
            "on rank 3",
            "ranks 0 and 3 have different tensors: model.weight is float32 [3, 2] on rank 0, "
            "float32 [3, 3] on rank 3",
            "ranks 2 and 3 have different tensors: model.0.bias is float32 [8] on rank 2, "
            "bfloat16 [8] on rank 3, model.0.weight is float32 [8, 8] on rank 2, bfloat16 [8, 8] "
            "on rank 3",
        ]
    assert not list(tmp_path.iterdir())


def written_bytes(folder: Path) -> int:
    grid: Grid = grid_of(GridShape(1, 2, 1, 2))
    model = nn.ModuleDict({"linear": Linear(64, 64, role="expand", grid=grid, bias=False)})
    checkpoint.save(folder, model=model)
    return model["linear"].weight.nbytes


def test_copies_are_written_once_and_by_several_ranks(pool, tmp_path) -> None:
    pool(4).run(written_bytes, tmp_path / "one")
    manifest = read_manifest(tmp_path / "one")
    tensor = manifest.tensors["model.linear.weight"]
    blocks = [*tensor.layout.overlapping((0, 0), tensor.shape)]
    assert sum(tensor.num_bytes(block.sizes) for block in blocks) == 64 * 64 * 4
    assert len({block.file for block in blocks}) == 2


def save_and_load_sharded(folder: Path) -> list[str]:
    model = small()
    fully_shard(model)
    errors = []
    for act in (checkpoint.save, checkpoint.load):
        try:
            act(folder, model=model)
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def test_a_model_of_fsdp2_is_refused(pool, tmp_path) -> None:
    checkpoint.save(tmp_path / "one", model=small())
    for errors in pool(2).run(save_and_load_sharded, tmp_path / "one"):
        assert len(errors) == 2
        assert "0.weight is a DTensor: expected a model of axonn_ext" in errors[1]
    for errors in pool(2).run(save_and_load_sharded, tmp_path / "two"):
        assert "0.weight is a DTensor: expected a model of axonn_ext" in errors[0]
