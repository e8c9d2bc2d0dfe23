"""The common part of both frameworks' classes: gradients, states and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext import GridShape, checkpoint, full_gradients, trace_communication
from axonn_ext.ranks.grid import Grid
from axonn_ext.train.integrations.placed import PlacedModels
from grids import factorisations, grid_of, relative_error

ROWS, IN, HIDDEN, CLASSES = 3, 8, 16, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN).eval()  # has buffers, one of them a scalar
        self.tied = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.also = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.also.weight = self.tied.weight
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.also(self.tied(self.norm(self.first(x)).relu())))


def plain(seed: int = 1) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def models_on(grid: Grid) -> PlacedModels:
    return PlacedModels(grid, what="Framework", fix="framework.backward(loss)")


def batch(step: int, world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(world_size * ROWS, IN, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (len(x),), generator=generator)


def loss_of(model: nn.Module, step: int, grid: Grid | None, world_size: int) -> Tensor:
    """The mean loss over this rank's rows; grid=None: over those of all ranks."""
    x, labels = batch(step, world_size)
    rows = slice(None) if grid is None else slice(grid.rank * ROWS, (grid.rank + 1) * ROWS)
    return F.cross_entropy(model(x[rows]), labels[rows])


def errors_of(shape: GridShape, synced_each_time: bool) -> dict[str, float]:
    """Errors of gradients summed over two backwards, of the norm, of two steps, and of states."""
    grid = grid_of(shape)
    size = grid.world_size
    reference, model = plain(), plain(seed=1 + grid.rank)  # rank 0's values are used
    models = models_on(grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # before placing, as scripts do
    models.place(model)
    models.attach(optimizer)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    errors = {}
    for step in (0, 2):
        for micro_step in (step, step + 1):
            loss_of(reference, micro_step, None, size).backward()
            if micro_step == step and not synced_each_time:
                with models.no_sync(model):
                    with models.no_sync(model):
                        pass  # leaving the inner context must not end the outer one
                    with models.backward():
                        loss_of(model, micro_step, grid, size).backward()
                own, all_ranks = model.norm.bias.grad, reference.norm.bias.grad
                assert size == 1 or not torch.allclose(own, all_ranks), "no_sync averages"
            else:
                with models.backward():
                    loss_of(model, micro_step, grid, size).backward()
        want = {n: p.grad for n, p in reference.named_parameters()}
        found = full_gradients(model)
        assert found.keys() == want.keys()
        errors |= {f"gradient of {n}": relative_error(g, want[n]) for n, g in found.items()}
        # Only some of the parameters, as with several optimizers.
        parts = [[*m.first.parameters(), *m.head.parameters()] for m in (reference, model)]
        norm = nn.utils.clip_grad_norm_(parts[0], 0.01)
        errors["norm"] = relative_error(models.clip_grad_norm_(parts[1], 0.01), norm)
        tied = [model.tied.weight, model.also.weight]
        want_norm = reference.tied.weight.grad.norm()
        errors["norm of one tied weight"] = relative_error(
            models.clip_grad_norm_(tied, 1e9), want_norm
        )
        for each in (reference_optimizer, optimizer):
            each.step()
            each.zero_grad()
    state, want = model.state_dict(), reference.state_dict()
    assert list(state) == list(want)
    errors |= {n: relative_error(t.double(), want[n].double()) for n, t in state.items()}
    whole = optimizer.state_dict()["state"]
    for number, values in reference_optimizer.state_dict()["state"].items():
        for key, value in values.items():
            errors[f"{number} {key}"] = relative_error(whole[number][key], value)
    return errors


def check_grids(world_size: int) -> list[str]:
    return [
        f"{shape} {synced} {name}: {error:.1e}"
        for shape in factorisations(world_size)
        for synced in (False, True)
        for name, error in errors_of(shape, synced).items()
        if not error < 1e-10  # fp64; AdamW divides by roots of gradients, which may be small
    ]


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.slow)],
)
def test_gradients_and_states_are_those_of_a_plain_model(pool, world_size):
    for failures in pool(world_size).run(check_grids, world_size):
        assert not failures, "\n".join(failures)


def made(shape: GridShape, seed: int = 1) -> tuple[PlacedModels, nn.Module, torch.optim.Optimizer]:
    """A placed model and its optimizer, after a step, so that the optimizer has a state."""
    models, model = models_on(grid_of(shape)), plain(seed)
    models.place(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    models.attach(optimizer)
    with models.backward():
        loss_of(model, seed, models.grid, models.grid.world_size).backward()
    optimizer.step()
    return models, model, optimizer


def same(a: object, b: object) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


def states_move(folder: str) -> list[bool]:
    """Moves states to another grid, to a plain model and back, and through our checkpoints."""
    _, model, optimizer = made(GridShape(x=2, y=2))
    _, other, other_optimizer = made(GridShape(y=2, z=2), seed=2)
    state, optimizer_state = model.state_dict(), optimizer.state_dict()
    other.load_state_dict(state)
    other_optimizer.load_state_dict(optimizer_state)
    equal = [same(other.state_dict(), state)]
    equal.append(same(other_optimizer.state_dict(), optimizer_state))
    alone = plain(seed=5)
    alone.load_state_dict(state)
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    alone_optimizer.load_state_dict(optimizer_state)
    equal.append(same(alone_optimizer.state_dict(), optimizer_state))
    checkpoint.save(folder, model=model, optimizer=optimizer)
    _, third, third_optimizer = made(GridShape(x=2, data=2), seed=3)
    checkpoint.load(folder, model=third, optimizer=third_optimizer)
    equal.append(same(third.state_dict(), state))
    equal.append(same(third_optimizer.state_dict(), optimizer_state))
    return equal


def test_states_are_whole(pool, tmp_path):
    for equal in pool(4).run(states_move, str(tmp_path / "checkpoint")):
        assert all(equal), equal


def message_of(function, *args) -> str:
    try:
        function(*args)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def plain_backward(models: PlacedModels, model: nn.Module) -> None:
    loss_of(model, 0, models.grid, models.grid.world_size).backward()


def enter_no_sync(models: PlacedModels, model: nn.Module) -> None:
    with models.no_sync(model):
        pass


def place_different_models(models: PlacedModels) -> None:
    models.place(nn.Linear(4, 4 + 4 * models.grid.rank))


def place_on_one_rank_only(models: PlacedModels) -> None:
    if models.grid.rank == 0:
        models.place(nn.Linear(4, 4))
    else:
        models.place(nn.Linear(4, 4, device="meta"))


def messages() -> dict[str, str]:
    models, model, optimizer = made(GridShape(x=2))
    stepped = plain()
    late = torch.optim.AdamW(stepped.parameters())
    stepped(torch.randn(2, IN, dtype=torch.float64)).sum().backward()
    late.step()
    models.place(stepped)
    # Deliberately a block instead of the full tensor.
    block = {"first.weight": torch.zeros(HIDDEN // 2, IN)}
    state = optimizer.state_dict()
    state["state"][0] = {"exp_avg": torch.zeros(3, 3)}
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.full_like(p, float("nan"))
    strict = {"error_if_nonfinite": True}
    return {
        "backward": message_of(plain_backward, models, model),
        "no_sync": message_of(enter_no_sync, models, nn.Linear(2, 2)),
        "again": message_of(models.place, model),
        "different": message_of(place_different_models, models),
        "meta": message_of(place_on_one_rank_only, models),
        "late": message_of(models.attach, late),
        "block": message_of(lambda: model.load_state_dict(block, strict=False)),
        "optimizer": message_of(optimizer.load_state_dict, state),
        "norm": message_of(lambda: models.clip_grad_norm_(parameters, 1.0, norm_type=1)),
        "foreign": message_of(models.clip_grad_norm_, [torch.zeros(2, 3)], 1.0),
        "nan": message_of(lambda: models.clip_grad_norm_(parameters, 1.0, **strict)),
    }


EXPECTED = {
    "backward": "RuntimeError: Framework: call framework.backward(loss) in place of loss.backward",
    "no_sync": "TypeError: Framework: the model was not set up, got Linear",
    "again": "is on a grid already",
    "different": "weight is torch.float32 [8, 4] on rank 1, but torch.float32 [4, 4] on rank 0",
    "late": "ValueError: Framework: the optimizer has made steps before its model was set up: its",
    "block": "first.weight must have the whole shape [16, 8], got [8, 8]",
    "optimizer": "ValueError: the optimizer's exp_avg of first.weight must have the shape of the",
    "norm": "ValueError: Framework: norm_type must be 2, got 1",
    "foreign": "1 of 1 parameters, the first of shape [2, 3], belong to no model that was set up",
    "nan": "RuntimeError: Framework: the norm of the gradients is nan",
}


def test_errors_are_named_on_every_rank(pool):
    found = pool(2).run(messages)
    for rank, named in enumerate(found):
        for key, text in EXPECTED.items():
            assert text in named[key], (rank, key, named[key])
    assert "rank 1 raised an error" in found[0]["meta"]
    assert "weight is on the meta device" in found[1]["meta"]


def two_models(shape: GridShape) -> dict[str, float]:
    """Only models that a loss reached are averaged, once; frozen weights may be trained later."""
    grid = grid_of(shape)
    models, pair, references = models_on(grid), [plain(1), plain(2)], [plain(1), plain(2)]
    for model, reference in zip(pair, references, strict=True):
        model.first.weight.requires_grad_(False)
        models.place(model)
        assert not model.first.weight.requires_grad
        model.first.weight.requires_grad_(True)
        loss_of(reference, 0, None, grid.world_size).backward()
    num_collectives = []
    for model in pair:
        with trace_communication() as trace, models.backward():
            loss_of(model, 0, grid, grid.world_size).backward()
        num_collectives.append(len(trace.records))
    assert num_collectives[0] == num_collectives[1] > 0
    return {
        f"{number} {name}": relative_error(gradient, reference.get_parameter(name).grad)
        for number, (model, reference) in enumerate(zip(pair, references, strict=True))
        for name, gradient in full_gradients(model).items()
    }


def test_several_models_and_frozen_parameters(pool):
    for errors in pool(4).run(two_models, GridShape(x=2, data=2)):
        assert max(errors.values()) < 1e-11, errors
