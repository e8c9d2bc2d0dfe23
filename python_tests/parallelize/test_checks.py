"""parallelize's checks of a model before splitting it, and of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from axonn_ext import GridShape, full_state_dict, global_mean, parallelize, plan_of
from axonn_ext.models.parallelize.agreement import SameInputs
from axonn_ext.models.parallelize.dropout import _is_harmless
from grids import grid_of, relative_error

SIZE = 16


def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return model().double()


def outcome(model: Callable[[], nn.Module], shape: GridShape, **options: Any) -> str:
    """The error of parallelize, or the plan."""
    try:
        return str(plan_of(parallelize(made(model), grid_of(shape), verbose=False, **options)))
    except Exception as error:  # the tests check which
        return f"{type(error).__name__}: {error}"


class Zero(nn.Module):
    """Works across features before a layer of zeros, which hides it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(SIZE), nn.Linear(SIZE, 32)
        self.proj = nn.Linear(32, SIZE)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)
        self.across = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.norm(x))
        return x + self.proj(y.softmax(-1) if self.across else y.relu())


class ZeroFirst(Zero):
    """Works across features after a layer of zeros, so the mean is zero on every rank."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.norm(x))
        return x + self.proj(y - y.mean(-1, keepdim=True))


class OnlyProjZero(Zero):
    def __init__(self) -> None:
        super().__init__()
        self.across = False


def behind_zeros() -> list[Any]:
    x = GridShape(x=2)
    model = made(OnlyProjZero)
    parallelize(model, grid_of(x), verbose=False)
    state, want = full_state_dict(model), dict(made(OnlyProjZero).named_parameters())
    refused = made(Zero)
    try:
        parallelize(refused, grid_of(x), verbose=False)
    except RuntimeError:
        assert not refused.proj.weight.any()
    same = all(torch.equal(state[n], p) for n, p in want.items())
    return [outcome(Zero, x), outcome(ZeroFirst, x), same]


def test_zeros_hide_no_code_across_features(pool):
    for zero, first, same in pool(2).run(behind_zeros):
        for message in (zero, first):
            assert "RuntimeError" in message and "the input of proj (Linear 32 -> 16)" in message
        assert same, "parameters that were zero are zero again"


class EpsilonRMSNorm(nn.Module):
    """Uses another name for eps, or has another argument."""

    def __init__(self, epsilon: float, hidden: bool = False, extra: bool = False) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.ones(SIZE)), extra
        if hidden:
            self.tiny = epsilon
        else:
            self.epsilon = epsilon

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        if self.extra and not more:
            raise TypeError("missing 1 required positional argument: 'gate'")
        number = self.tiny if hasattr(self, "tiny") else self.epsilon
        y = x * (x.square().mean(-1, keepdim=True) + number).rsqrt() * self.weight
        return y * more[0].sigmoid() if more else y


class GatedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(SIZE, SIZE), EpsilonRMSNorm(1e-5, extra=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.norm(y, y)


def norms() -> list[Any]:
    y = GridShape(y=2)
    options = {"leave_plain": True}
    found: list[Any] = []
    for hidden in (False, True):
        model = lambda hidden=hidden: nn.Sequential(  # noqa: E731
            nn.Linear(SIZE, SIZE), EpsilonRMSNorm(1e-3, hidden), nn.Linear(SIZE, SIZE)
        )
        ours, theirs = made(model), made(model)
        plan = plan_of(parallelize(ours, grid_of(y), verbose=False, **options))
        small = torch.full((2, SIZE), 1e-3, dtype=torch.float64)
        found.append((plan.placements["1"].kind, relative_error(ours(small), theirs(small))))
    return [*found, outcome(GatedNorm, y), outcome(GatedNorm, y, **options)]


def test_eps_of_a_norm_is_its_own(pool):
    for named, hidden, refused, plain in pool(2).run(norms):
        assert named[0] == "norm" and named[1] < 1e-12
        assert hidden[0] == "plain" and hidden[1] < 1e-12
        assert "ValueError" in refused and "does not compute the RMSNorm of one" in refused
        assert "plain" in plain and "Error" not in plain


class Config:
    def __init__(self, rate: float) -> None:
        self.rate = rate


class Functional(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config, self.linear = Config(rate), nn.Linear(SIZE, SIZE)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        q = self.linear(x)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.0)
        return F.dropout(q, self.config.rate, self.training)


def drops() -> list[Any]:
    x = GridShape(x=2)
    model = made(lambda: Functional(0.0))
    state = torch.get_rng_state()
    parallelize(model, grid_of(x), verbose=False)
    clean = torch.equal(state, torch.get_rng_state()) and model.calls == 0 and model.training
    two = lambda: nn.Sequential(Functional(0.1), nn.Linear(SIZE, SIZE), Functional(0.2))  # noqa: E731
    ones = lambda: nn.Sequential(nn.Dropout(1), nn.Linear(SIZE, SIZE), nn.Dropout(0.5))  # noqa: E731
    return [outcome(two, x), outcome(ones, x), clean]


def test_whatever_drops_is_named(pool):
    for functional, ones, clean in pool(2).run(drops):
        assert "ValueError: parallelize: dropout must be 0" in functional
        assert "  0 calls " in functional and "  2 calls " in functional
        assert "  0 (Dropout) has p=1" in ones and "  2 (Dropout) has p=0.5" in ones
        assert clean, "the pass in training mode leaves no trace"


def test_attention_is_harmless_only_without_dropout() -> None:
    """On GPUs, one op does both; on CPUs, PyTorch uses other ops for attention with dropout."""
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    operands = (torch.ones(1, 1, 2, 2),) * 3
    for p in (0.0, 0.1):
        assert _is_harmless(op, operands, {"dropout_p": p}, operands) == (p == 0)
        assert _is_harmless(op, (*operands, p), {}, operands) == (p == 0)


class Nested(nn.Module):
    """Returns its states on request, and a loss before its other outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Embedding(8, SIZE), nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 32), nn.Linear(32, SIZE)

    def forward(self, input_ids: Tensor, states: bool = False, labels: Any = None) -> Any:
        x = self.first(input_ids)
        y = x + self.down(self.up(self.norm(x)).relu())
        result = (y, {"states": (x, [y])}) if states else (y,)
        return result if labels is None else (y.square().mean(), *result)


def results() -> list[Any]:
    ids = torch.arange(8).view(2, 4)
    grid, theirs = grid_of(GridShape(y=2)), made(Nested)
    ours, short = made(Nested), made(Nested)
    given = {"input_ids": ids, "states": True}
    parallelize(ours, grid, example_inputs=given, verbose=False)
    parallelize(short, grid, verbose=False)
    try:
        short(ids, states=True)
        message = ""
    except ValueError as error:
        message = str(error)
    found: list[Any] = [message]
    for model in (ours, short):
        options = {"states": model is ours, "labels": 1}
        (_, y, *more), (_, got, *rest) = theirs(ids, **options), model(ids, **options)
        errors = [relative_error(got, y)]
        if more:
            a, b = rest[0]["states"], more[0]["states"]
            errors += [relative_error(a[0], b[0]), relative_error(a[1][0], b[1][0])]
        found.append(max(errors))
    return found


def test_results_inside_of_others_are_whole(pool):
    for message, nested, shifted in pool(2).run(results):
        assert "output 1.states.0 has shape [2, 4, 8], and may be split over y" in message
        assert nested < 1e-12 and shifted < 1e-12


class Gate(nn.Module):
    """A few features multiply the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(SIZE), nn.Linear(SIZE, 2)
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        g = self.gate(x)
        return self.out(x * g[..., :1] + x * g[..., 1:])


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("pixel_values")


def beforehand() -> list[str]:
    y = GridShape(y=2)
    lazy = lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))  # noqa: E731
    gate = made(Gate)
    try:
        parallelize(gate, grid_of(y), leave_plain=True, verbose=False)
        message = ""
    except ValueError as error:
        message = str(error)
    x = torch.randn(2, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    unchanged = torch.equal(gate(x), made(Gate)(x))
    rank = grid_of(y).rank
    rows = torch.full((2, SIZE), 1.0 + rank, dtype=torch.float64)
    linear = lambda: nn.Linear(SIZE, SIZE)  # noqa: E731
    return [
        message if unchanged else "the model has changed",
        outcome(Gate, y),
        outcome(Raises, y),
        outcome(lazy, y),
        outcome(linear, y, example_inputs=(rows,)),
    ]


def test_a_mistake_is_found_before_anything_changes(pool):
    for left, gate, raises, lazy, rows in pool(2).run(beforehand):
        for message in (left, gate):
            assert "the input of out (Linear 16 -> 16), of 16 features" in message
            assert "the 2 features of gate" in message and '"plain"' in message
        assert "ValueError: parallelize: the model does not run on the example" in raises
        assert "KeyError: 'pixel_values'" in raises
        assert "ValueError: parallelize: 0.weight has no shape yet" in lazy
        assert (
            "parallelize: example input 0 is float64 [2, 16] " in rows
            and " on rank 1, but " in rows
        )


class OneRank(nn.Module):
    """Fails on the grid, only on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if type(self.linear) is not nn.Linear and grid_of(GridShape(y=2)).rank == 1:
            raise KeyError("only here")
        return y


def failing() -> str:
    return outcome(OneRank, GridShape(y=2))


def test_a_failed_check_is_an_error_on_every_rank(pool):
    zero, one = pool(2).run(failing)
    assert "RanksFailed: parallelize: rank 1 raised an error" in zero
    assert "RuntimeError: parallelize: the model on the grid fails in the model (test_checks" in one
    assert "KeyError: 'only here'\n" in one and "use auto_parallelize" in one


class FusedAttention(nn.Module):
    """nanoGPT's, whose fused projection is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.count = 4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(SIZE, dim=2)
        shape = (*x.shape[:2], self.count, SIZE // self.count)
        q, k, v = (t.view(shape).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class Fused(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(layers))
        self.layers = nn.ModuleList(FusedAttention() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def fused(shape: GridShape) -> list[Any]:
    found: list[Any] = []
    x = torch.randn(2, 3, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for layers in (1, 2):
        make = lambda layers=layers: Fused(layers)  # noqa: E731
        message = outcome(make, shape)
        model, plain = made(make), made(make)
        plan = eval(message.partition(" plan=")[2].partition(", or use")[0], {"model": model})
        parallelize(model, grid_of(shape), plan, verbose=False)
        found.append((message, sorted(plan), relative_error(model(x), plain(x))))
    return found


def test_a_fused_projection_gets_a_plan_that_works(pool):
    for shape in (GridShape(x=2), GridShape(y=2)):
        for one, two in pool(2).run(fused, shape):
            for message, plan, error in (one, two):
                assert "the model on the grid fails in layers.0 (test_checks.py:" in message
                assert "the code of layers.0 (FusedAttention) may work across" in message
                assert "use auto_parallelize" in message and error < 1e-12
                assert plan == ["layers.0", "layers.1"][: len(plan)]
            assert 'plan={"layers.0": "plain"}' in one[0] and len(two[1]) == 2


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, rows: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        y = self.linear(rows)
        return y if mask is None else y * mask


def rows_of_ranks(shape: GridShape) -> list[str]:
    grid = grid_of(shape)
    own, group = grid.rank, grid.part(("data", "z"))
    same, other = (torch.full((2, SIZE), 1.0 + i, dtype=torch.float64) for i in (group, 9 + own))
    batch = grid.shard(torch.arange(4.0 * SIZE).view(4, SIZE).double(), {0: ("data", "z")})
    found = []
    with FakeTensorMode():
        fake = torch.empty(1 + own, SIZE)
    for calls in (
        [((same,), {}), ((other,), {})],  # only the first is compared
        [((same,), {"mask": other})],
        [((), {"rows": same, "batch": {"labels": other}})],
        [((batch,), {"cache": [[other]]})],
        [((other,), {})],
    ):
        model = made(Keywords)
        parallelize(model, grid, verbose=False)
        hook = next(h for h in model._forward_pre_hooks.values() if isinstance(h, SameInputs))
        hook(model, (fake,), {})
        hook(model, (fake.to("meta"),), {})
        try:
            for args, kwargs in calls:
                model(*args, **kwargs)
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    model = made(Keywords)
    parallelize(model, grid, verbose=False)
    for ignored in (other.to_sparse(), torch.nested.nested_tensor([other[0]]), other.clone()):
        SameInputs(grid)(model, (ignored.requires_grad_(),), {})
    with torch.no_grad():
        model(same)
    try:
        model(other)
    except RuntimeError as error:
        found.append(str(error))
    return found


def test_ranks_of_x_and_y_must_pass_the_same_rows(pool):
    for shape, size in ((GridShape(x=2), 2), (GridShape(x=2, z=2), 4), (GridShape(x=2, y=2), 4)):
        for rank, found in enumerate(pool(size).run(rows_of_ranks, shape)):
            later, mask, batch, split, rows, after_evaluation = found
            assert not later and not split
            axes = " and ".join(f"{a}=2" for a in "xy" if getattr(shape, a) > 1)
            part = f"part {rank // 2 + 1} of 2 of the batch" if shape.z == 2 else "the whole batch"
            for text, name in (
                (mask, "mask"), (batch, "batch.labels"), (rows, "rows"), (after_evaluation, "rows"),
            ):  # fmt: skip
                assert f"parallelize: the argument {name} is float64 [2, 16] " in text
                assert f"give all ranks of x and y ({axes}) the same rows" in text
                assert f"rank {rank} takes {part}" in text


def means() -> list[Any]:
    grid = grid_of(GridShape(x=2))
    axes = ("x", "y", "z", "data")
    found: list[Any] = []
    for dtype in (torch.bfloat16, torch.float16):
        total = torch.full((), 4096.0, dtype=dtype, requires_grad=True)
        mean = global_mean(total, torch.tensor(70001), grid, axes=axes)
        mean.backward()
        found.append((mean.dtype, mean.item() * 70001 / 4096, total.grad.item() * 140002))
    messages = []
    for options in ({"count": torch.ones(2), "axes": axes}, {"count": 1}):
        try:
            global_mean(torch.ones(()), grid=grid, **options)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return [*found, *messages]


def test_the_mean_counts_rows_exactly(pool):
    for bf16, fp16, count, missing in pool(2).run(means):
        for (dtype, mean, gradient), want in ((bf16, torch.bfloat16), (fp16, torch.float16)):
            assert dtype == want
            assert abs(mean - 1) < 5e-3 and abs(gradient - 1) < 2e-2  # subnormal in fp16
        assert "count must be one number, got shape [2]" in count
        assert "axes" in missing
