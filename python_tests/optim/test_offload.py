"""AdamW with its state in host memory or on disk has the same bits as AdamW on the device."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import late_gpu
from axonn_ext import checkpoint
from axonn_ext.bench.loss import peak_bytes
from axonn_ext.optim import AdamW, adamw, bucketed
from axonn_ext.optim.crossing import StreamCrossing
from axonn_ext.optim.zero import buckets_of
from axonn_ext.spec.buckets import ALIGNMENT
from limits import HANG_SECONDS

pytestmark = pytest.mark.long

# Sizes near those of vectors in the CPU's kernel, and some that a bucket splits.
SHAPES = [(1,), (7, 9), (64,), (33, 65), (128, 64), (3, 5, 7), (1000,), (201, 31), (), (0, 3)]


def parameters(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """Sets random gradients; in every fifth step, some parameters have none."""
    generator = torch.Generator().manual_seed(step)
    for index, parameter in enumerate(params):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if step % 5 == 4 and index % 3 == 0 else gradient


def train_both(
    ours: AdamW, params: list[nn.Parameter], other: AdamW, others: list[nn.Parameter], steps: int
) -> None:
    for step in range(steps):
        for each in (params, others):
            set_gradients(each, step)
        for optimizer in (ours, other):
            optimizer.step(1e-3 * (1 + step % 7), gradient_factor=1.0 if step % 2 else 0.37)


def assert_equal(
    one: AdamW, ones: list[nn.Parameter], other: AdamW, others: list[nn.Parameter]
) -> None:
    for p, q in zip(ones, others, strict=True):
        assert torch.equal(p, q)
        for key in ("exp_avg", "exp_avg_sq", "master"):
            first, second = (
                torch.cat([getattr(piece, key).detach().flatten() for piece in o.pieces_of(t)])
                if o.pieces_of(t)
                else torch.empty(0)
                for o, t in ((one, p), (other, q))
            )
            assert torch.equal(first, second), key
        steps = {piece.step.item() for o, t in ((one, p), (other, q)) for piece in o.pieces_of(t)}
        assert len(steps) <= 1


@pytest.mark.parametrize("bucket_elements", [64, 1500, 1 << 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_as_on_the_device(
    tmp_path: Path, offload: str, dtype: torch.dtype, bucket_elements: int
) -> None:
    one, two = parameters(dtype), parameters(dtype)
    ours = AdamW(
        one, lr=1e-3, offload=offload, bucket_elements=bucket_elements, folder=tmp_path
    )  # fmt: skip
    on_device = AdamW(two, lr=1e-3)
    train_both(ours, one, on_device, two, steps=12)
    assert_equal(ours, one, on_device, two)
    assert list(tmp_path.iterdir()) == []  # the files have no names


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_as_on_the_device_for_1000_steps(tmp_path: Path, offload: str, dtype: torch.dtype) -> None:
    one, two = parameters(dtype), parameters(dtype)
    ours = AdamW(one, lr=1e-3, offload=offload, bucket_elements=4096, folder=tmp_path)
    on_device = AdamW(two, lr=1e-3)
    train_both(ours, one, on_device, two, steps=1000)
    assert_equal(ours, one, on_device, two)


def late_crossing(device: torch.device, dtype: torch.dtype, numel: int) -> StreamCrossing:
    return StreamCrossing(device, dtype, numel, late_gpu.Gpu())


@pytest.mark.parametrize("bucket_elements", [1, 512])  # 1: one vector per bucket
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_that_are_late(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bucket_elements: int
) -> None:
    """Every use of transferred data waits for the transfer."""
    one, two = parameters(dtype), parameters(dtype)
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "_crossing", late_crossing)
        ours = AdamW(one, lr=1e-3, offload="cpu", bucket_elements=bucket_elements)
    on_device = AdamW(two, lr=1e-3)
    train_both(ours, one, on_device, two, steps=6)
    assert_equal(ours, one, on_device, two)


@pytest.mark.parametrize("shape", [(70,), (9, 7)])
def test_gradients_with_any_strides(shape: tuple[int, ...]) -> None:
    """For example, a sum's gradients, whose elements are all the same one, and transposed ones."""
    one, two = parameters(torch.bfloat16, [shape]), parameters(torch.bfloat16, [shape])
    ours, on_device = AdamW(one, lr=1e-3, offload="cpu"), AdamW(two, lr=1e-3)
    for values in (torch.full((1,), 0.3), torch.randn(shape[::-1]).movedim(-1, 0)):
        gradient = values.bfloat16().expand(shape)
        one[0].grad, two[0].grad = gradient, gradient.contiguous()
        ours.step()
        on_device.step()
    assert_equal(ours, one, on_device, two)


def test_gradients_stay_until_they_have_crossed() -> None:
    gpu = late_gpu.Gpu()
    crossing = StreamCrossing(torch.device("cpu"), torch.float32, 64, gpu)
    gradient = torch.randn(5)
    there, memory = gradient.clone(), weakref.ref(gradient)
    wait = crossing.to_host(0, [gradient])
    del gradient
    (copy,) = wait()
    assert copy is not None and torch.equal(copy, there)
    time.sleep(0.05)  # by now, the stream has dropped it
    assert memory() is not None
    del wait
    gc.collect()
    assert memory() is None


def test_nothing_is_updated_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    running, calls = threading.Event(), []

    def failing(*_: object) -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise MemoryError("of the host")
        running.set()
        time.sleep(0.3)
        running.clear()

    params = parameters(torch.bfloat16)
    monkeypatch.setattr(adamw, "_crossing", late_crossing)  # it updates in a thread
    optimizer = AdamW(params, lr=1e-3, offload="cpu", bucket_elements=2048)
    set_gradients(params, 0)
    monkeypatch.setattr(bucketed, "update_on_host", failing)
    with pytest.raises(MemoryError, match="of the host"):
        optimizer.step()
    assert len(calls) == 2 and not running.is_set()
    optimizer.close()
    optimizer.close()  # may be called again


def test_files_never_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed while creating them leaves none behind."""
    names: list[Path] = []
    allocate = os.posix_fallocate

    def listing(descriptor: int, first: int, length: int) -> None:
        allocate(descriptor, first, length)
        names.extend(tmp_path.iterdir())

    monkeypatch.setattr(os, "posix_fallocate", listing)
    AdamW(parameters(torch.float32), lr=1e-3, offload="disk", folder=tmp_path)
    assert names == []


def test_parameters_without_elements_are_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.none = nn.Parameter(torch.empty(0, 3))
    optimizer = AdamW(model, lr=1e-3, offload="cpu")
    checkpoint.save(tmp_path / "saved", model=model, optimizer=optimizer)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.load(tmp_path / "saved", model=model, optimizer=optimizer)
    assert torch.equal(model.weight, before)


def test_resumes_exactly() -> None:
    one, two = parameters(torch.bfloat16), parameters(torch.bfloat16)
    first = AdamW(one, lr=1e-3, offload="cpu", bucket_elements=512)
    for step in range(3):
        set_gradients(one, step)
        first.step()
    second = AdamW(two, lr=1e-3, offload="disk", bucket_elements=512)
    second.load_state_dict(first.state_dict())
    second.write_back()
    train_both(first, one, second, two, steps=3)
    assert_equal(first, one, second, two)


@pytest.mark.parametrize("elements", [1, 64, 1000, 5000])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_buckets_hold_every_element_once(elements: int, num_parts: int) -> None:
    params = parameters(torch.float32)
    buckets = list(buckets_of(params, elements=elements, num_parts=num_parts))
    seen = {id(p): torch.zeros(p.numel()) for p in params}
    for bucket in buckets:
        assert bucket.numel <= max(elements, ALIGNMENT * num_parts)
        assert bucket.numel == bucket.part_numel * num_parts
        for index in range(num_parts):
            end = 0
            for run in bucket.part(index):
                assert run.at >= end and run.start % ALIGNMENT == 0
                end = run.at + run.numel
                assert end <= bucket.part_numel
                seen[id(run.parameter)][run.start : run.stop] += 1
    assert all((count == 1).all() for count in seen.values())


def test_refusals(tmp_path: Path) -> None:
    plain, strided = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6).t())
    for options, said in (
        ({"offload": "gpu"}, "offload must be one of none, cpu, disk, got 'gpu'"),
        ({"offload": "disk", "folder": tmp_path / "none"}, "folder must be one that exists"),
        ({"bucket_elements": 0}, "bucket_elements must be a whole number >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            AdamW([plain], lr=1.0, **options)
    with pytest.raises(ValueError, match="must be contiguous"):
        AdamW([strided], lr=1.0, offload="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_device_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    """With states elsewhere, only weights, gradients and a bucket's buffers remain."""
    bucket = 1 << 20
    off, numel = device_bytes("disk", dtype, bucket, tmp_path)
    on, _ = device_bytes("none", dtype, bucket, tmp_path)
    assert numel > 10_000_000
    assert off <= 4 * numel + 16 * bucket
    assert on >= 20 * numel  # weight, gradient, master, moments and the gradient in fp32


def device_bytes(offload: str, dtype: torch.dtype, bucket: int, folder: Path) -> tuple[int, int]:
    """Returns the peak bytes of training without offloaded states, and the number of parameters.

    Weights and states count by their sizes, everything else by torch's allocations.
    """
    model = nn.Sequential(*(nn.Linear(1024, 1024, dtype=dtype) for _ in range(12)))
    optimizer = AdamW(model, lr=1e-3, offload=offload, bucket_elements=bucket, folder=folder)

    def train() -> None:
        for _ in range(2):
            model(torch.ones(1, 1024, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    there = [p.detach() for p in model.parameters()]
    if offload == "none":
        there += [t for p in optimizer.pieces for t in (p.master, p.exp_avg, p.exp_avg_sq)]
    used = sum(t.nbytes for t in there) + peak_bytes(train, "cpu")
    return used, sum(p.numel() for p in model.parameters())


LIMITED = """
import resource, sys
import torch
from axonn_ext.optim import AdamW

offload, limit, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.ones(64, 64) @ torch.ones(64, 64)  # what torch makes once
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(20)))
with open("/proc/self/statm") as file:
    pages = int(file.read().split()[5])
resource.setrlimit(resource.RLIMIT_DATA, (limit + pages * resource.getpagesize(),) * 2)
optimizer = AdamW(model, lr=1e-3, offload=offload, bucket_elements=1 << 20, folder=folder)
data = torch.randn(8, 1024, dtype=torch.bfloat16)
for step in range(3):
    loss = model(data).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limit on private memory")
def test_trains_where_the_states_do_not_fit(tmp_path: Path) -> None:
    """21 M parameters need 20 bytes each; 2 are allocated before the limit, which allows 6 more."""
    limit = 6 * 21_000_000
    runs = {
        offload: subprocess.run(
            [sys.executable, "-c", LIMITED, offload, str(limit), str(tmp_path)],
            capture_output=True, text=True, timeout=HANG_SECONDS, check=False, env=os.environ,
        )
        for offload in ("none", "disk")
    }  # fmt: skip
    assert runs["none"].returncode != 0
    assert "memory" in runs["none"].stderr
    assert runs["disk"].returncode == 0, runs["disk"].stderr
    losses = [float(line) for line in runs["disk"].stdout.split()]
    assert losses[-1] < losses[0]
    assert list(tmp_path.iterdir()) == []
