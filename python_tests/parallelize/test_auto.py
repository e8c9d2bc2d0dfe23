"""auto_parallelize: the plain model's gradients on every grid, and modules that stay plain."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext import (
    GridShape,
    auto_parallelize,
    checkpoint,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    global_mean,
    initialize,
    load_full_state_dict,
    optim,
    overlap,
    sync_gradients,
    trace_communication,
)
from axonn_ext.ranks.grid import Grid
from grids import factorisations, grid_of, relative_error

long = pytest.mark.long

IN, HIDDEN, CLASSES = 16, 24, 3
MAX_NORM = 0.01


class Net(nn.Module):
    """Has a head of 3 classes, which no grid with several x ranks divides, and its own init."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.rest = nn.Sequential(nn.Linear(HIDDEN, IN, bias=False), nn.GELU(), nn.Linear(IN, 8))
        self.head = nn.Linear(8, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rest(self.norm(self.first(x))))


def made(grid: Grid, model: Callable[[], nn.Module] = Net, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    with auto_parallelize(grid):
        return model().double()


def plain(model: Callable[[], nn.Module] = Net, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return model().double()


def rows_of(rank: int, ragged: bool) -> int:
    return (0, 5, 1, 3)[rank % 4] if ragged else 3


def errors_of(shape: GridShape, ragged: bool) -> dict[str, float]:
    """Relative errors of output, loss, norm, and the gradients of input and parameters."""
    grid = grid_of(shape)
    reference, model = plain(), made(grid)
    counts = [rows_of(rank, ragged) for rank in range(grid.world_size)]
    if ragged:
        counts[-1] += 1  # not all ranks are empty
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), 2, IN, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (sum(counts), 2), generator=generator)
    x_ref = x.clone().requires_grad_()
    y_ref = reference(x_ref)
    loss_ref = F.cross_entropy(y_ref.flatten(0, 1), labels.flatten())
    loss_ref.backward()
    norm_ref = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)

    own = x.split(counts)[grid.rank].clone().requires_grad_()
    own_labels = labels.split(counts)[grid.rank].flatten()
    y = model(own)
    total = F.cross_entropy(y.flatten(0, 1), own_labels, reduction="sum")
    loss = global_mean(total, own_labels.numel(), grid, axes=("x", "y", "z", "data"))
    loss.backward()
    sync_gradients(model)
    norm = clip_grad_norm_(model, MAX_NORM)
    found = {"y": y, "loss": loss, "norm": norm, "x": own.grad} | full_gradients(model)
    want = {n: p.grad for n, p in reference.named_parameters()}
    want |= {"y": y_ref.split(counts)[grid.rank], "loss": loss_ref, "norm": norm_ref}
    want["x"] = x_ref.grad.split(counts)[grid.rank]
    assert found.keys() == want.keys()
    return {n: relative_error(t, want[n]) if t.numel() else 0.0 for n, t in found.items()}


def check_grids(world_size: int, ragged: bool) -> list[str]:
    grids = factorisations(world_size) if world_size < 8 else EIGHT
    return [
        f"{shape} {name}: {error:.1e}"
        for shape in grids
        for name, error in errors_of(shape, ragged).items()
        if not error < 1e-12  # in fp64, anything above is an error of the algorithm
    ]


EIGHT = [GridShape(2, 2, 2), GridShape(4, 2), GridShape(2, 4), GridShape(1, 2, 2, 2)]


@pytest.mark.parametrize(
    ("world_size", "ragged"),
    [
        (2, False), (4, True), pytest.param(4, False, marks=long),
        *(pytest.param(*case, marks=long) for case in ((1, False), (1, True), (2, True))),
        *(pytest.param(8, ragged, marks=pytest.mark.slow) for ragged in (False, True)),
    ],
)  # fmt: skip
def test_equals_the_plain_model(pool, world_size, ragged):
    for failures in pool(world_size).run(check_grids, world_size, ragged):
        assert not failures, "\n".join(failures)


def adopted(shape: GridShape) -> list[str]:
    """Adopting a finished model gives the same as constructing it in the block."""
    grid = grid_of(shape)
    model, constructed = plain(), made(grid)
    block = auto_parallelize(grid)
    with pytest.raises(RuntimeError, match="adopt must be called inside the block"):
        block.adopt(model)
    with block:
        block.adopt(model)
    with pytest.raises(ValueError, match="first is on a grid already"):
        with auto_parallelize(grid) as other:
            other.adopt(model)
    pairs = zip(model.named_parameters(), constructed.named_parameters(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
    return [each.name for each in block.modules]


@long
def test_adopts_a_finished_model(pool):
    for names in pool(2).run(adopted, GridShape(x=2)):
        assert names == ["first", "norm", "rest.0", "rest.2", "head"]


def split_and_whole(shape: GridShape) -> dict[str, tuple[int, ...]]:
    model = made(grid_of(shape))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@long
def test_a_rank_keeps_its_blocks(pool):
    """Shapes are split, too: weights [N / (Gx Gz), K / Gy], biases [N / Gx], the rest whole."""
    for shapes in pool(4).run(split_and_whole, GridShape(x=2, y=2)):
        assert shapes["first.weight"] == (HIDDEN // 2, IN // 2)
        assert shapes["first.bias"] == (HIDDEN // 2,)
        assert shapes["rest.0.weight"] == (IN // 2, HIDDEN // 2)
        assert shapes["norm.weight"] == (HIDDEN,)
        assert shapes["head.weight"] == (CLASSES, 8)
    for shapes in pool(4).run(split_and_whole, GridShape(y=2, z=2)):
        assert shapes["first.weight"] == (HIDDEN // 2, IN // 2)
        assert shapes["first.bias"] == (HIDDEN,)


def values_after_a_seed(shape: GridShape) -> bool:
    """Whether values equal the plain model's, including those that its constructor drew, and
    load_full_state_dict accepts a plain state.
    """
    grid = grid_of(shape)
    model, want = made(grid), plain(seed=3).state_dict()
    state = full_state_dict(model)
    same = state.keys() == want.keys() and all(torch.equal(state[n], t) for n, t in want.items())
    other = plain(seed=8).state_dict()
    load_full_state_dict(model, other)
    state = full_state_dict(model)
    return same and all(torch.equal(state[n], t) for n, t in other.items())


@long
def test_values_are_those_of_the_plain_model(pool):
    assert all(pool(4).run(values_after_a_seed, GridShape(2, 1, 2)))


class Tied(nn.Module):
    """Modules that must stay plain, and one that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.odd = nn.Linear(9, 8)
        self.good = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight


def summary_of(shape: GridShape) -> str:
    with auto_parallelize(grid_of(shape)) as block:
        torch.manual_seed(0)
        model = Tied()
    assert type(model.good).__name__ == "RowLinear" and type(model.head) is nn.Linear
    assert model.head.weight is model.table.weight
    return block.summary()


@long
def test_the_summary_names_what_stays_plain_and_why(pool):
    for text in pool(2).run(summary_of, GridShape(y=2)):
        lines = {line.split()[1]: line for line in text.splitlines()[1:]}
        assert text.startswith("auto_parallelize on y=2: 1 of ")
        assert lines["good"].startswith("  4D     good (Linear 8 -> 8)")
        assert "in_features=9 must be divisible by 2 (axes y=2)" in lines["odd"]
        assert lines["odd"].startswith("  plain")
        assert "its weight is also table.weight" in lines["head"]
        assert "NonDynamicallyQuantizableLinear" in lines["attention.out_proj"]
        assert lines["table"].startswith("  whole  table (Embedding, 64 parameters)")
        assert "ParametrizedLinear" in lines["normed"] or "its parameters" in lines["normed"]


class Cycle(nn.Module):
    """References itself, so it lives until the garbage collector runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.me = nn.Linear(4, 4), [self]


def copied() -> tuple[str, list[str], str]:
    """Layers that PyTorch copies, a module dropped in a cycle on one rank, and a lazy module."""
    grid = grid_of(GridShape(x=2))
    torch.manual_seed(0)
    gc.disable()
    try:
        with auto_parallelize(grid) as block:
            if grid.rank == 1:
                state = torch.get_rng_state()
                Cycle()
                torch.set_rng_state(state)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
            model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            del layer
    finally:
        gc.enable()
    kinds = [type(m).__name__ for n, m in model.named_modules() if n.endswith("linear1")]
    sync_gradients(model)

    def lazy() -> None:
        with auto_parallelize(grid):
            kept.append(nn.LazyLinear(4))

    kept: list[nn.Module] = []
    return block.summary(), kinds, message_of(lazy)


@long
def test_copies_in_the_block_count(pool):
    for summary, kinds, lazy in pool(2).run(copied):
        assert kinds == ["RowLinear", "RowLinear"]
        assert "layers.1.linear2 (Linear 16 -> 8)" in summary and "4 of 6 Linears" in summary
        assert "ValueError: auto_parallelize: " in lazy and "has no shape yet" in lazy


def hooks_and_threads() -> None:
    """Torch is left unchanged, and modules of other threads or made later are plain."""
    registry = torch.nn.modules.module._global_parameter_registration_hooks
    grid = grid_of(GridShape(x=2))
    elsewhere: list[nn.Linear] = []

    def make() -> None:
        elsewhere.append(nn.Linear(4, 4))

    with auto_parallelize(grid) as block:
        assert len(registry) == 1
        mine = nn.Linear(4, 4)
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="cannot be nested"), auto_parallelize(grid):
            pass
        torch.manual_seed(0)
        nn.init.ones_(mine.weight)
        nn.init.ones_(mine.bias)
    assert not registry and type(nn.Linear(4, 4)) is nn.Linear
    assert type(elsewhere[0]) is nn.Linear and type(mine).__name__ == "RowLinear"
    assert [m.kind for m in block.modules] == ["Linear 4 -> 4"]
    with pytest.raises(RuntimeError, match="cannot be entered twice"), block:
        pass
    with pytest.raises(ZeroDivisionError), auto_parallelize(grid):
        raise ZeroDivisionError
    assert not registry
    with pytest.raises(TypeError, match="grid must be a Grid, got int"):
        auto_parallelize(3)  # type: ignore[arg-type]


@long
def test_the_block_leaves_no_trace(pool):
    pool(2).run(hooks_and_threads)


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def construct(grid: Grid, kind: str) -> None:
    odd = grid.rank == 1
    torch.manual_seed(0)
    with auto_parallelize(grid):
        if odd:
            nn.Linear(2, 2)  # a module that is dropped at once does not count
            torch.manual_seed(kind == "seed")
        kept = [nn.Linear(8, 16 if kind == "size" and odd else 8)]
        if kind == "raise" and odd:
            raise ZeroDivisionError("only here")
    assert kept


def construction_messages() -> list[str]:
    grid = grid_of(GridShape(x=2))
    kinds = ("none", "seed", "size", "raise")
    return [message_of(lambda kind=kind: construct(grid, kind)) for kind in kinds]


@long
def test_what_differs_between_ranks_is_an_error_on_every_rank(pool):
    none, seed, size, raised = zip(*pool(2).run(construction_messages), strict=True)
    assert none == ("", "")
    for text in seed:
        assert "weight is float32 [8, 8] " in text and " on rank 1, but float32 [8, 8] " in text
        assert "call torch.manual_seed with the same number on every rank" in text
    assert all("float32 [16, 8] " in text and " on rank 1, but " in text for text in size), size
    assert "rank 1 raised an error" in raised[0] and "only here" in raised[1]


def forward_messages(shape: GridShape) -> list[str]:
    grid = grid_of(shape)
    model = made(grid).first
    odd = grid.rank == 1
    ones = torch.ones(2, IN, dtype=torch.float64)
    inputs = [
        torch.ones(2, IN + odd, dtype=torch.float64),
        ones.float() if odd else ones,
        "text" if odd else ones,
        ones.clone().requires_grad_(odd),
        torch.ones((), dtype=torch.float64) if odd else ones,
        ones,
    ]
    return [message_of(lambda x=x: model(x)) for x in inputs]


@pytest.mark.parametrize("shape", [GridShape(x=2), GridShape(y=2), GridShape(z=2)], ids=str)
def test_bad_input_on_one_rank_is_an_error_on_every_rank(pool, shape):
    expected = [
        (f"ValueError: first (Linear {IN} -> {HIDDEN}): ", f"got {IN + 1} features on rank 1"),
        ("RuntimeError: first", "number of the dtype"),
        ("TypeError: first", "something else on rank 1"),
        ("RuntimeError: first", "input needs a gradient"),
        ("ValueError: first", "got 0 features on rank 1"),
    ]
    for messages in pool(2).run(forward_messages, shape):
        for message, parts in zip(messages, expected, strict=False):
            assert all(part in message for part in parts), message
        assert messages[-1] == "", "a refused call leaves the groups usable"


def other_tools(folder: str) -> dict[str, object]:
    """Results with an optimizer, checkpoint, copy, overlap and trace, and errors."""
    shape = GridShape(x=2, y=2)
    grid = grid_of(shape)
    model = made(grid)
    x = torch.randn(2, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(grid.rank))
    with overlap.Orchestrator(model) as orchestrator:
        model(x).square().sum().backward()
        orchestrator.sync_gradients()
    overlapped = full_gradients(model)
    model.zero_grad()
    model(x).square().sum().backward()
    sync_gradients(model)
    want = full_gradients(model)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    checkpoint.save(folder, model=model, optimizer=optimizer)
    twin = made(grid_of(GridShape(x=4)), seed=5)
    checkpoint.load(folder, model=twin)
    state, loaded = full_state_dict(model), full_state_dict(twin)
    with trace_communication() as trace:
        copy.deepcopy(model)(x)
    return {
        "overlap": max(relative_error(overlapped[n], want[n]) for n in want),
        "loaded": all(torch.equal(state[n], loaded[n]) for n in state),
        "moved": relative_error(state["first.weight"], plain().first.weight) > 0.01,
        "traced": {r.collective for r in trace.records},
        "initialize": message_of(lambda: initialize(model, seed=1)),
    }


@long
def test_the_rest_of_the_package_takes_such_models(pool, tmp_path):
    for result in pool(4).run(other_tools, str(tmp_path / "saved")):
        assert result["overlap"] < 1e-12
        assert result["loaded"] and result["moved"]
        assert result["traced"] == {"all_to_all", "all_gather", "reduce_scatter"}
        assert "distribution of " in result["initialize"]


def meta_model(shape: GridShape) -> bool:
    """Builds and splits a model on the meta device, and loads it; no rank has a full weight."""
    grid = grid_of(shape)
    with torch.device("meta"), auto_parallelize(grid):
        model = Net().double()
    assert model.first.weight.is_meta and model.first.weight.shape == (HIDDEN // 2, IN // 2)
    model.to_empty(device="cpu")
    load_full_state_dict(model, plain().state_dict())
    x = torch.ones(3, IN, dtype=torch.float64)
    return relative_error(model(x), plain()(x)) < 1e-12


@long
def test_a_model_on_the_meta_device(pool):
    assert all(pool(4).run(meta_model, GridShape(2, 2)))
