"""Checkpoints whose files are damaged, truncated, missing, or malicious."""

from __future__ import annotations

import functools
import pickle
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

from axonn_ext import checkpoint
from axonn_ext.checkpoint import CheckpointError
from axonn_ext.checkpoint.files import find_problems
from axonn_ext.checkpoint.layout import MOST, MOST_RANKS, Layout
from axonn_ext.checkpoint.manifest import MANIFEST
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.checkpoint.rewrite import reshard
from axonn_ext.cli import main
from axonn_ext.optim import AdamW
from tampering import tamper

FILE, INDEX = "rank-00000.safetensors", "rank-00000.json"


def make_model(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model of four megabytes, after a step of AdamW."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 512)).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "step-00000001"
    model, optimizer = make_model()
    checkpoint.save(folder, model=model, optimizer=optimizer, extra={"step": 1})
    return folder


@functools.cache
def other_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    return make_model(seed=1)


def load(folder: Path) -> None:
    model, optimizer = other_model()
    checkpoint.load(folder, model=model, optimizer=optimizer)


@pytest.mark.parametrize("seed", range(100))
def test_every_flip_and_every_cut_is_named(good, tmp_path, seed) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "step-00000002"
    shutil.copytree(good, folder)
    (tmp_path / good.name).symlink_to(good)
    path = folder / draw.choice([FILE, FILE, FILE, INDEX, MANIFEST])
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    if seed % 4:
        content[place] ^= 1 << draw.randrange(8)
    else:
        del content[place:]
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        load(folder)
    message = str(raised.value)
    assert str(path) in message
    assert path.name == MANIFEST or "tensor" in message
    assert f"the newest other one that is whole is {tmp_path / good.name}" in message
    if path.name != MANIFEST:
        assert str(path) in "\n".join(find_problems(folder, read_manifest(folder)))


def test_the_tensor_that_is_damaged_is_named(good, tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    manifest = read_manifest(folder)
    name = "optimizer.0.weight.exp_avg_sq"
    start = manifest.index(folder, FILE).starts[f"{name}@0,0"]
    with (folder / FILE).open("r+b") as file:
        file.seek(start + 700_000)
        file.write(b"\xff\xff")
    with pytest.raises(CheckpointError, match=rf"is damaged: bytes .* of tensors .*{name}"):
        load(folder)
    (problem,) = find_problems(folder, manifest)
    assert name in problem


def test_a_file_that_is_missing_is_named(good, tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"{FILE}: cannot be read: No such file .*tensors "):
        load(folder)


class Harm:
    """Creates a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [FILE, INDEX, MANIFEST, ".metadata"])
def test_nothing_that_is_loaded_runs_code(good, tmp_path, name) -> None:
    folder, harmed = tmp_path / "copy", tmp_path / "harmed"
    shutil.copytree(good, folder)
    content = pickle.dumps(Harm(harmed))
    (folder / name).write_bytes(content)
    if name == FILE:  # give it a matching index
        tamper(folder, lambda body: body.update(
            num_bytes=len(content), checksums=[zlib.crc32(content)]), INDEX)  # fmt: skip
    if name == ".metadata":  # torch's own format, which torch would unpickle
        load(folder)
    else:
        with pytest.raises(CheckpointError):
            load(folder)
    assert not harmed.exists()


def layout(body: dict, name: str = "model.0.bias") -> dict:
    return body["tensors"][name]


TAMPERED = {
    "a dtype": lambda b: layout(b).update(dtype="os.system"),
    "no files": lambda b: b.pop("num_files"),
    "no file": lambda b: b.update(num_files=0),
    "more files than can be": lambda b: b.update(num_files=10**12),
    "text for a size": lambda b: b.update(num_bytes="many"),
    "no mapping": lambda b: b.update(extra=[1]),
    "a grid of another size": lambda b: layout(b).update(grid=[2, 1, 1, 1, 1]),
    "a grid of four axes": lambda b: layout(b).update(grid=[1, 1, 1, 1]),
    "a grid of 10**30 ranks": lambda b: layout(b).update(grid=[10**15, 10**15, 1, 1, 1]),
    "an axis": lambda b: layout(b).update(dims=[["os"]]),
    "an axis twice": lambda b: layout(b, "model.0.weight").update(dims=[["x"], ["x"]]),
    "too few dims": lambda b: layout(b, "model.0.weight").update(dims=[[]]),
    "a fraction": lambda b: layout(b).update(shape=[0.5]),
    "sizes below 0": lambda b: layout(b).update(shape=[-1]),
    "a size of 31 digits": lambda b: layout(b).update(shape=[10**30]),
    "more elements than can be": lambda b: layout(b, "model.0.weight").update(
        shape=[1 << 40, 1 << 40]
    ),
    "padding below 0": lambda b: layout(b).update(padding=-1),
    "a place beyond the axis": lambda b: layout(b).update(where={"pipe": [1]}),
    "a place twice": lambda b: layout(b).update(where={"pipe": [0, 0]}),
    "a place that is no number": lambda b: layout(b).update(where={"pipe": [False]}),
    "no place": lambda b: layout(b).update(where={"pipe": []}),
    "runs with a gap": lambda b: layout(b).update(runs=[[0, 100, 0, 0], [101, 512, 0, 0]]),
    "runs that end early": lambda b: layout(b).update(runs=[[0, 511, 0, 0]]),
    "runs that overlap": lambda b: layout(b).update(runs=[[0, 100, 0, 0], [99, 512, 0, 0]]),
    "a run outside its bucket": lambda b: layout(b).update(runs=[[0, 512, 0, 511]]),
    "a turn below 0": lambda b: layout(b).update(turn=-1),
}  # fmt: skip


@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED)
def test_a_manifest_that_makes_no_sense_is_refused(good, tmp_path, change) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    tamper(folder, change)
    with pytest.raises(CheckpointError, match=MANIFEST):
        load(folder)


@pytest.mark.parametrize("found", [1, 2, 4, "3"])
def test_another_format_is_refused(good, tmp_path, found) -> None:
    """The other format's keys are not those of this one."""
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)

    def change(body: dict) -> None:
        body.clear()
        body.update(format=found, blocks=[])

    tamper(folder, change)
    with pytest.raises(
        CheckpointError, match=f"expected format 3 with .*, got format {found!r}: another version"
    ):
        load(folder)


TAMPERED_INDEXES = {
    "outside the file": lambda b: b["starts"].update({"model.0.bias@0": 1 << 40}),
    "before the file": lambda b: b["starts"].update({"model.0.bias@0": -8}),
    "a fraction": lambda b: b["starts"].update({"model.0.bias@0": 0.5}),
    "a block that is missing": lambda b: b["starts"].pop("model.0.bias@0"),
    "another file": lambda b: b.update(file="rank-00001.safetensors"),
    "another checkpoint": lambda b: b.update(token="0123456789abcdef"),
    "an empty file": lambda b: b.update(num_bytes=0, checksums=[]),
    "too few checksums": lambda b: b["checksums"].pop(),
    "a size that no list of checksums can have": lambda b: b.update(num_bytes=10**17),
    "text for a size": lambda b: b.update(num_bytes="many"),
    "no starts": lambda b: b.pop("starts"),
}


@pytest.mark.parametrize("change", TAMPERED_INDEXES.values(), ids=TAMPERED_INDEXES)
def test_an_index_that_makes_no_sense_is_refused(good, tmp_path, change) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    tamper(folder, change, INDEX)
    with pytest.raises(CheckpointError, match=INDEX):
        load(folder)
    assert any(INDEX in problem for problem in find_problems(folder, read_manifest(folder)))


def test_a_file_in_the_place_of_another_is_noticed(tmp_path) -> None:
    """It may be the file of another rank, or of the same rank in another checkpoint."""
    model, _ = make_model()
    for name in ("one", "two"):
        checkpoint.save(tmp_path / name, model=model)
    reshard(tmp_path / "one", tmp_path / "shared", num_files=2)
    reshard(tmp_path / "two", tmp_path / "other", num_files=2)
    for source, target in (("other", 0), ("shared", 1)):
        folder = tmp_path / f"mixed-{target}"
        shutil.copytree(tmp_path / "shared", folder)
        for kind in (".safetensors", ".json"):
            shutil.copy(
                tmp_path / source / f"rank-00000{kind}", folder / f"rank-0000{target}{kind}"
            )
        (problem,) = find_problems(folder, read_manifest(folder))
        assert f"rank-0000{target}.json belongs to another" in problem
        with pytest.raises(CheckpointError, match="belongs to another"):
            checkpoint.load(folder, model=model, random=False)


def test_a_layout_as_large_as_can_be_takes_no_memory() -> None:
    layout = Layout((1, 1, 1, 1, MOST_RANKS), (MOST_RANKS << 30,), (("x",),))
    (block,) = layout.overlapping((5 << 30,), (7,))
    assert (block.offsets, block.sizes) == ((5 << 30,), (1 << 30,))
    assert block.file == "rank-00005.safetensors"


def test_a_run_as_large_as_can_be_takes_no_memory() -> None:
    layout = Layout((1, 1, 1, 1, 1), (1, MOST), ((), ()), runs=((0, MOST, 0, 0),))
    (block,) = layout.overlapping((0, 5), (1, 7))
    assert (block.offsets, block.sizes) == ((0, 0), (1, MOST))


def test_a_manifest_that_names_far_more_files_than_there_are_is_refused_at_once(
    good, tmp_path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)

    def change(body: dict) -> None:
        body.update(num_files=MOST_RANKS)
        del body["tensors"]["rng.cpu"]  # it has a row for each rank
        for tensor in body["tensors"].values():
            tensor.update(grid=[MOST_RANKS, 1, 1, 1, 1])

    tamper(folder, change)
    want = "rank-9999999.json: no such file, the last of 10000000"
    (problem,) = find_problems(folder, read_manifest(folder))
    assert want in problem
    with pytest.raises(CheckpointError, match=want):
        reshard(folder, tmp_path / "out", num_files=1)


CHANGED = {
    "a tensor of the optimizer": (
        lambda b: b["tensors"].pop("optimizer.0.bias.exp_avg"),
        r"state of another optimizer: it does not have optimizer\.0\.bias\.exp_avg; without",
    ),
    "all of a parameter's": (
        lambda b: [b["tensors"].pop(name) for name in list(b["tensors"])
                   if name.startswith("optimizer.0.bias.")],
        r"it does not have optimizer\.0\.bias\.",
    ),
    "an option": (
        lambda b: b["optimizer_options"][0].update(betas=7), r"option betas is 7, here \(0\.9,"
    ),
    "a shape": (
        lambda b: layout(b, "optimizer.0.bias.exp_avg").update(shape=[2, 256], dims=[[], []]),
        r"optimizer\.0\.bias\.exp_avg has shape \[2, 256\], here \[512\]",
    ),
    "a huge state of random numbers": (
        lambda b: layout(b, "rng.cpu").update(shape=[1, 10**13]),
        r"rng\.cpu has shape \[1, 10000000000000\], here \[1, 5056\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGED.values(), ids=CHANGED)
def test_the_state_of_another_optimizer_is_refused(tmp_path, change, message) -> None:
    """Starting with zero moments instead would silently change the training."""

    def make() -> tuple[nn.Module, AdamW]:
        model, _ = make_model()
        return model, AdamW(model, lr=0.1)

    model, optimizer = make()
    checkpoint.save(tmp_path / "one", model=model, optimizer=optimizer)
    tamper(tmp_path / "one", change)
    model, optimizer = make()
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path / "one", model=model, optimizer=optimizer)


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path) -> None:
    model, _ = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sgd.step()
    checkpoint.save(tmp_path / "one", model=model, optimizer=sgd)
    ours = AdamW([next(iter(model.parameters()))], lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"it does not have optimizer\.0\.weight\.(step|exp_a)"
    ):
        checkpoint.load(tmp_path / "one", model=model, optimizer=ours)


def test_no_more_memory_is_taken_than_the_files_have(good, tmp_path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    tamper(folder, CHANGED["a huge state of random numbers"][0])
    with pytest.raises(CheckpointError, match=r"no whole block of rng\.cpu"):
        reshard(folder, tmp_path / "out", num_files=1)


@pytest.mark.parametrize("written", ["x", {}, 1e30, -1])
def test_a_date_that_is_none_is_not_shown(good, tmp_path, capsys, written) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(good, folder)
    tamper(folder, lambda body: body["facts"].update(written=written))
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    assert "written  -, by axonn_ext" in capsys.readouterr().out
