"""The exponential moving average of the weights that AdamW keeps."""

from __future__ import annotations

import pytest
import torch

import zero_cases
from axonn_ext import GridShape, checkpoint
from axonn_ext.optim import AdamW
from test_groups import OPTIONS, set_gradients, small_model
from zero_cases import Job, Setup


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_that_of_the_masters(dtype: torch.dtype, offload: str) -> None:
    model, without = small_model(dtype), small_model(dtype)
    optimizer = AdamW(model, ema_decay=0.75, offload=offload, bucket_elements=16, **OPTIONS)
    plain = AdamW(without, offload=offload, bucket_elements=16, **OPTIONS)
    want = [piece.master.detach().clone() for piece in optimizer.pieces]
    for step in range(4):
        for each, its in ((model, optimizer), (without, plain)):
            set_gradients(each, step)
            its.step()
        for average, piece in zip(want, optimizer.pieces, strict=True):
            average.mul_(0.75).add_(piece.master.detach(), alpha=0.25)
    weights = [p.detach().clone() for p in model.parameters()]
    for average, piece in zip(want, optimizer.pieces, strict=True):
        torch.testing.assert_close(piece.ema, average)
    with optimizer.averaged():
        for piece in optimizer.pieces:
            flat = piece.parameter.detach().reshape(-1)[piece.start : piece.stop]
            assert torch.equal(flat, piece.master.detach().reshape(-1).to(dtype))
        changed = [p.detach().clone() for p in model.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(changed, weights, strict=True))
    for parameter, other in zip(model.parameters(), without.parameters(), strict=True):
        assert torch.equal(parameter, other), "training is as without an average"


def test_muon_averages_all_masters(pool) -> None:
    for shape, zero in ((GridShape(), 0), (GridShape(data=2), 1)):
        setup = Setup(shape, zero, ema=0.75, muon=True, dtype=torch.bfloat16)
        assert all(pool(shape.size).run(average_error, setup))


def average_error(setup: Setup) -> bool:
    """Whether the averages of three steps follow the masters, those of matrices included."""
    job = Job(setup)
    pieces = job.optimizer.pieces
    want = [piece.master.detach().clone() for piece in pieces]
    for step in range(3):
        job.run(step, 1)
        for average, piece in zip(want, pieces, strict=True):
            average.lerp_(piece.master.detach(), 0.25)
    kinds = {tuple(piece.state) for piece in pieces}
    job.close()
    return len(kinds) == 2 and all(torch.equal(p.ema, w) for p, w in zip(pieces, want, strict=True))


def test_a_state_dict_has_the_average() -> None:
    model, other = small_model(), small_model()
    optimizer, loaded = (AdamW(m, ema_decay=0.5, **OPTIONS) for m in (model, other))
    set_gradients(model, 0)
    optimizer.step()
    loaded.load_state_dict(optimizer.state_dict())
    for a, b in zip(optimizer.pieces, loaded.pieces, strict=True):
        assert torch.equal(a.ema, b.ema)


@pytest.mark.parametrize(("decay", "offload"), [(1.0, "none"), (-0.1, "none"), (0.9, "disk")])
def test_bad_decays_are_named(decay: float, offload: str) -> None:
    message = f"0 with offload disk, got {decay} with offload {offload}"
    with pytest.raises(ValueError, match=message):
        AdamW(small_model(), lr=1.0, ema_decay=decay, offload=offload)


def save(setup: Setup, folder) -> list[float]:
    job = Job(setup)
    job.run(0, 2)
    checkpoint.save(folder, model=job.model, optimizer=job.optimizer)
    return whole_average(job)


def load(setup: Setup, folder) -> list[float]:
    job = Job(setup, seed=9)
    job.run(5, 1)
    checkpoint.load(folder, model=job.model, optimizer=job.optimizer)
    return whole_average(job)


def whole_average(job: Job) -> list[float]:
    """The averages of all weights, after their use and back."""
    with job.optimizer.averaged():
        state = zero_cases.full_state_dict(job.model)
    job.run(2, 1)
    job.close()
    return [number for name in sorted(state) for number in state[name].reshape(-1)[:5].tolist()]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Setup(GridShape(data=2), 2, ema=0.5, overlap=True), Setup(GridShape(x=2), ema=0.5)),
        (Setup(GridShape(z=2), ema=0.5), Setup(GridShape(data=2), 1, "cpu", ema=0.5)),
        (Setup(GridShape(pipe=2), ema=0.5, micro_batches=2), Setup(GridShape(y=2), ema=0.5)),
        (
            Setup(GridShape(data=2), 1, ema=0.5, muon=True),
            Setup(GridShape(x=2), ema=0.5, muon=True),
        ),
    ],
    ids=str,
)
def test_averages_move_between_grids(pool, tmp_path, before: Setup, after: Setup) -> None:
    saved = pool(2).run(save, before, tmp_path / "saved")[0]
    assert pool(2).run(load, after, tmp_path / "saved")[0] == saved


def test_an_average_begins_with_the_weights_of_a_checkpoint_without_one(pool, tmp_path) -> None:
    shape = GridShape(data=2)
    pool(2).run(zero_cases.save, Setup(shape, 1), tmp_path / "saved")
    found = pool(2).run(begun, Setup(shape, 1, ema=0.5), tmp_path / "saved")
    assert found == [True, True]


def begun(setup: Setup, folder) -> bool:
    job = Job(setup, seed=9)
    checkpoint.load(folder, model=job.model, optimizer=job.optimizer)
    same = [torch.equal(piece.ema, piece.master) for piece in job.optimizer.pieces]
    job.close()
    return all(same)
