"""parallelize on small models of torch.nn: results, the plan, and errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_ext import (
    GridShape,
    checkpoint,
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    global_mean,
    initialize,
    overlap,
    parallelize,
    plan_of,
    sync_gradients,
)
from axonn_ext.ranks.grid import Grid
from grids import factorisations, grid_of, relative_error

HIDDEN, WORDS, HEADS = 16, 24, 4
MAX_NORM = 0.01


class Attention(nn.Module):
    """An attention class that parallelize does not know; works with any number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.attention = Attention()
        self.gate, self.up = nn.Linear(HIDDEN, 32), nn.Linear(HIDDEN, 32, bias=False)
        self.down = nn.Linear(32, HIDDEN)
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        y = self.norm_2(x)
        x = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + self.mix(x)  # only "expand": its output has to return to the stream


class Model(nn.Module):
    """Has padding, positions, and a tied head whose bias the model also holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN, padding_idx=1)
        self.positions = nn.Embedding(7, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)
        self.head.weight = self.words.weight
        self.bias = nn.Parameter(torch.randn(WORDS))
        self.head.bias = self.bias

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


LOCAL = {f"blocks.{i}.attention": "local_heads" for i in range(2)}


def made(model: Callable[[], nn.Module] = Model) -> nn.Module:
    torch.manual_seed(3)
    module = model().double()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def errors_of(shape: GridShape, leave_plain: bool) -> dict[str, float]:
    """Relative errors of logits, loss, norm and gradients."""
    grid = grid_of(shape)
    reference, model = made(), made()
    plan = None if leave_plain else LOCAL
    parallelize(model, grid, plan, leave_plain=leave_plain, verbose=False)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(WORDS, (4, 6), generator=generator)
    ids[:, 2] = 1
    labels = torch.randint(WORDS, (4, 6), generator=generator)
    want_logits = reference(ids)
    want_loss = nn.functional.cross_entropy(want_logits.flatten(0, 1), labels.flatten())
    want_loss.backward()
    want_norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    own, own_labels = (grid.shard(t, {0: ("data", "z")}) for t in (ids, labels))
    logits = model(own)
    total = nn.functional.cross_entropy(logits.flatten(0, 1), own_labels.flatten(), reduction="sum")
    loss = global_mean(total, own_labels.numel(), grid, axes=("z", "data"))
    loss.backward()
    sync_gradients(model)
    norm = clip_grad_norm_(model, MAX_NORM)
    found = {"loss": loss, "norm": norm, "logits": logits} | full_gradients(model)
    want = {n: p.grad for n, p in reference.named_parameters()}
    want |= {"loss": want_loss, "norm": want_norm}
    want["logits"] = grid.shard(want_logits, {0: ("data", "z")})
    assert found.keys() == want.keys()
    # A bias of all keys does not change the scores, so its gradient is 0 except for rounding.
    scale = {n: want[n.replace("key.bias", "query.bias")] for n in want}
    return {n: ((found[n] - want[n]).norm() / scale[n].norm()).item() for n in want}


def check_grids(world_size: int, leave_plain: bool) -> list[str]:
    return [
        f"{shape} {name}: {error:.1e}"
        for shape in factorisations(world_size)
        for name, error in errors_of(shape, leave_plain).items()
        if not error < 1e-11  # in fp64, anything above is an error of the algorithm
    ]


@pytest.mark.parametrize("leave_plain", [False, True], ids=["heads", "plain-attention"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_the_plain_model(pool, world_size, leave_plain):
    for failures in pool(world_size).run(check_grids, world_size, leave_plain):
        assert not failures, "\n".join(failures)


def plan_and_shapes() -> tuple[str, dict[str, str], dict[str, tuple[int, ...]]]:
    model = made()
    plan = plan_of(parallelize(model, grid_of(GridShape(x=2, y=2)), LOCAL, verbose=False))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return str(plan), {name: p.kind for name, p in plan.placements.items()}, shapes


def test_who_feeds_whom_decides(pool):
    for text, kinds, shapes in pool(4).run(plan_and_shapes):
        block = {name.removeprefix("blocks.0."): k for name, k in kinds.items() if ".0." in name}
        assert block == {
            "norm_1": "norm", "norm_2": "norm", "attention.query": "expand",
            "attention.key": "expand", "attention.value": "expand", "attention.out": "contract",
            "gate": "expand", "up": "expand", "down": "contract", "mix": "expand",
        }  # fmt: skip
        assert (kinds["words"], kinds["positions"], kinds["head"]) == (
            "embedding",
            "table",
            "expand",
        )
        assert "blocks.*.down" in text and "(2 of them)" in text and "y -> whole" in text
        assert shapes["blocks.0.down.weight"] == (HIDDEN // 2, 16)
        assert shapes["words.weight"] == (WORDS // 2, HIDDEN // 2)
        assert shapes["positions.weight"] == (7, HIDDEN // 2)
        assert shapes["bias"] == (WORDS // 2,)


def rows_and_plans() -> list[float]:
    """Errors with float rows instead of ids, with roles swapped by the plan, and a reused plan."""
    errors = []
    for shape in factorisations(4):
        grid = grid_of(shape)

        def chain() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 8))

        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        again = None
        for asked in ({}, {"0": "contract", "2": "contract"}, {"2": "plain"}, None):
            model = made(chain)
            plan = plan_of(parallelize(model, grid, asked or again, verbose=False))
            again = plan
            own = grid.shard(x, {0: ("data", "z")})
            errors.append(
                relative_error(model(own), grid.shard(made(chain)(x), {0: ("data", "z")}))
            )
            model(own).square().sum().backward()
            sync_gradients(model)
            want = made(chain)
            want(x).square().sum().backward()
            found = full_gradients(model)
            errors += [relative_error(found[n], p.grad) for n, p in want.named_parameters()]
            assert plan.placements["0"].kind == (asked or {}).get("0", "expand")
    return errors


def test_rows_and_given_plans(pool):
    for errors in pool(4).run(rows_and_plans):
        assert max(errors) < 1e-11


class Gated(nn.Module):
    """Has its own parameter in addition to modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Residual(nn.Module):
    """Has a stream that no module reads at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return x + self.down(self.up(x).relu())


class OneRMSNorm(nn.Module):
    """Gemma's RMSNorm, which multiplies by 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (8,), 1 + self.weight, self.eps)


class Across(nn.Module):
    """Has code between its modules that works across features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).softmax(-1))


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def placed(model: Callable[[], nn.Module], *args: Any, shape: GridShape, **options: Any) -> str:
    return message_of(
        lambda: parallelize(made(model), grid_of(shape), *args, verbose=False, **options)
    )


def refusals() -> list[str]:
    x, y = GridShape(x=2), GridShape(y=2)
    grid = grid_of(x)
    twice = made(lambda: nn.Linear(8, 8))
    parallelize(twice, grid, verbose=False)
    conv = lambda: nn.Sequential(nn.Linear(8, 8), nn.Conv1d(4, 4, 1), nn.Linear(8, 7))  # noqa: E731
    drop = lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25))  # noqa: E731
    linear = lambda: nn.Linear(8, 8)  # noqa: E731
    return [
        placed(Model, shape=x),
        placed(conv, shape=x),
        placed(lambda: nn.Sequential(nn.Linear(8, 8), Gated()), shape=y),
        placed(lambda: nn.Sequential(nn.Linear(8, 8), OneRMSNorm()), shape=y),
        placed(Across, shape=x),
        placed(drop, shape=x),
        placed(linear, {"first": "expand"}, shape=x),
        placed(linear, {"": "column"}, shape=x),
        placed(Model, {"norm": "expand"}, shape=x),
        placed(Model, {"blocks": "norm"}, shape=x),
        placed(Model, {"head": "contract"}, shape=x),
        message_of(lambda: parallelize(twice, grid)),
        message_of(lambda: parallelize(linear(), 2)),  # type: ignore[arg-type]
        placed(linear, shape=x, example_inputs=(torch.ones(2, 3),)),
        placed(nn.Identity, shape=x),
        message_of(lambda: parallelize(nn.Linear(8, 8 + grid.rank), grid)),
        message_of(lambda: parallelize(nn.Linear(8, 8, device="meta"), grid)),
    ]


EXPECTED = [
    ("ValueError: parallelize: 2 modules cannot be placed on x=2", "blocks.1.attention (Attention)",
     "Attention has heads (num_heads=4)", "LlamaAttention", "leave_plain=True"),
    ("2 modules cannot be placed", "1 (Conv1d 4 x 4 x 1): parallelize has no module in place of",
     "2 (Linear 8 -> 7): ", "out_features=7 must be divisible by 2 (axes x=2)"),
    ("1 (Gated): ", "its own parameter (scale)"),
    ("OneRMSNorm does not compute the RMSNorm",),
    ("RuntimeError: parallelize: the input of second", "differs by", "may work across features"),
    ("ValueError: parallelize: dropout must be 0", "  1 (Dropout) has p=0.25"),
    ("plan names an unknown module, 'first'",),
    ("plan[''] must be one of expand, contract", "got 'column'"),
    ("plan['norm'] must be one of norm, plain, got 'expand': it is LayerNorm 16",),
    ("plan['blocks'] must be one of plain, local_heads, got 'norm'",),
    ("plan['head'] must be one of expand, plain, got 'contract'",),
    ("the module is on a grid already",),
    ("TypeError: parallelize: grid must be a Grid, got int",),
    ("does not run on the example inputs",),
    ("module must have parameters",),
    ("RuntimeError: parallelize: ", "on rank 1, but", "the same model: call torch.manual_seed"),
    ("is on the meta device",),
]  # fmt: skip


def test_what_is_refused(pool):
    for messages in pool(2).run(refusals):
        for message, parts in zip(messages, EXPECTED, strict=True):
            assert all(part in message for part in parts), (message, parts)


def differing() -> list[str]:
    grid = grid_of(GridShape(x=2))
    odd = grid.rank == 1
    linear = lambda: nn.Linear(8, 8)  # noqa: E731
    two = lambda: nn.Sequential(linear(), linear())  # noqa: E731
    calls: list[dict[str, Any]] = [
        {"plan": {"0": "plain"} if odd else {}},
        {"plan": {"5": "plain"} if odd else {}},
        {"leave_plain": odd},
        {"example_inputs": (torch.ones(1, 3 if odd else 8, dtype=torch.float64),)},
        {},
    ]
    return [
        message_of(lambda call=call: parallelize(made(two), grid, verbose=False, **call))
        for call in calls
    ]


def test_what_differs_between_ranks_is_an_error_on_every_rank(pool):
    zero, one = pool(2).run(differing)
    found = {
        0: "the plan that is asked for is [('0', 'plain')] on rank 1, but [] on rank 0",
        2: "leave_plain is True on rank 1, but False on rank 0",
        3: "example input 0 is float64 [1, 3]",
    }
    for number, text in found.items():
        assert text in zero[number] and text in one[number]
    assert "rank 1 raised an error" in zero[1] and "an unknown module" in one[1]
    assert zero[4] == one[4] == ""


def left_plain() -> dict[str, float]:
    """Errors of results and gradients if modules that cannot be placed stay plain."""
    errors: dict[str, float] = {}
    models: Mapping[str, Callable[[], nn.Module]] = {
        "conv": lambda: nn.Sequential(
            nn.Linear(8, 8), nn.Conv1d(4, 4, 1), nn.Linear(8, 7), nn.Linear(7, 8), nn.LayerNorm(8)
        ),
        "gated": lambda: nn.Sequential(nn.Linear(8, 8), Gated(), nn.Linear(8, 8)),
        "norm": lambda: nn.Sequential(nn.Linear(8, 8), OneRMSNorm(), nn.Linear(8, 8)),
        "residual": Residual,
    }
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shape in factorisations(4):
        grid = grid_of(shape)
        own = {0: ("data", "z")} if grid.num_parts(("data", "z")) <= 2 else {}
        share = grid.num_parts(("data", "z")) if not own else 1
        for name, model in models.items():
            ours, theirs = made(model), made(model)
            plan = plan_of(parallelize(ours, grid, leave_plain=True, verbose=False))
            assert bool(plan.plain()) == (name != "residual"), name
            want, y = theirs(x), ours(grid.shard(x, own))
            want.square().sum().backward()
            (y.square().sum() / share).backward()
            sync_gradients(ours)
            errors[f"{shape} {name}"] = relative_error(y, grid.shard(want, own))
            found = full_gradients(ours)
            for n, p in theirs.named_parameters():
                # The gradient of a Conv1d's bias before a norm may be 0 except for rounding.
                difference = (found[n] - p.grad).norm().item()
                errors[f"{shape} {name} {n}"] = difference / (1e-3 + p.grad.norm().item())
    return errors


def test_what_stays_plain_computes_the_same(pool):
    for errors in pool(4).run(left_plain):
        assert max(errors.values()) < 1e-11, errors


def other_tools(folder: str) -> dict[str, Any]:
    grid = grid_of(GridShape(x=2, z=2))
    model = made()
    head, weight = model.head, model.words.weight
    parallelize(model, grid, LOCAL, verbose=False)
    ids = torch.arange(8).view(2, 4) + grid.coords["z"]
    with overlap.Orchestrator(model) as orchestrator:
        model(ids).square().sum().backward()
        orchestrator.sync_gradients()
    overlapped = full_gradients(model)
    model.zero_grad()
    model(ids).square().sum().backward()
    sync_gradients(model)
    want = full_gradients(model)
    checkpoint.save(folder, model=model)
    other = made()
    for parameter in other.parameters():
        parameter.data.zero_()
    # With zeros, a wrong model could not be detected, but here the sums are the same.
    parallelize(other, grid_of(GridShape(y=2, data=2)), LOCAL, verbose=False)
    checkpoint.load(folder, model=other)
    state, loaded = full_state_dict(model), full_state_dict(other)
    plain = dict(made().named_parameters())
    return {
        "overlap": max(relative_error(overlapped[n], want[n]) for n in want if "key.bias" not in n),
        "loaded": all(torch.equal(state[n], loaded[n]) for n in state),
        "state": all(torch.equal(state[n], plain[n]) for n in plain),
        "same objects": model.head is head and model.head.weight is weight is model.words.weight,
        "copy": torch.equal(copy.deepcopy(model)(ids), model(ids)),
        "initialize": message_of(lambda: initialize(model, seed=1)),
        "mode": model.training and model.norm.training,
    }


def test_the_rest_of_the_package_takes_such_models(pool, tmp_path):
    for result in pool(4).run(other_tools, str(tmp_path / "saved")):
        assert result.pop("overlap") < 1e-12
        assert "distribution of " in result.pop("initialize")
        assert all(result.values()), result


@pytest.fixture
def one_rank() -> Iterator[Grid]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Grid()
    dist.destroy_process_group()


def compiled(shape: GridShape) -> list[float]:
    """The errors of logits and gradients of a model that torch.compile has traced as one graph."""
    torch.compiler.reset()
    grid, results = grid_of(shape), []
    for compiles in (False, True):
        model = parallelize(made(), grid, LOCAL, verbose=False)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        logits = run(torch.arange(12).view(2, 6))
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    eager, got = results
    return [relative_error(one, other) for one, other in zip(got, eager, strict=True)]


@pytest.mark.long
def test_a_split_model_compiles_as_one_graph(pool) -> None:
    for errors in pool(2).run(compiled, GridShape(x=2)):
        assert max(errors) < 1e-11


def test_rank_0_prints_the_plan(one_rank, capsys):
    model = parallelize(made(lambda: nn.Linear(8, 8)), one_rank)
    assert "parallelize on x=1:" in capsys.readouterr().out
    assert str(plan_of(model)).startswith("parallelize on x=1:")


def test_the_model_is_returned_and_has_a_plan(one_rank):
    model = made(Residual)
    keys = model.state_dict().keys()
    assert parallelize(model, one_rank, verbose=False).eval() is model and not model.training
    plan = plan_of(model)
    assert plan.placements["down"].kind == "contract"
    assert model.state_dict().keys() == keys and "plan" not in str(model)
    assert plan_of(copy.deepcopy(model)) == plan == pickle.loads(pickle.dumps(plan))
    assert plan_of(torch.compile(model)) is plan
    for other in (model.down, nn.Linear(8, 8)):
        with pytest.raises(ValueError, match="plan_of: module must be one that parallelize"):
            plan_of(other)
