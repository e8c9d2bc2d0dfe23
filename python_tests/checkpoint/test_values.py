"""Users' values in a checkpoint keep their types, or are refused with their place."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from axonn_ext import checkpoint
from axonn_ext.checkpoint import CheckpointError
from axonn_ext.checkpoint.reading import read_manifest
from tampering import tamper

MODEL = nn.Linear(2, 2)
KEPT = {
    "int keys": {1: 2, -3: {4: 5}},
    "every kind of key": {1: "a", 2.5: "b", "3": "c", None: "d", (1, "x"): "e", b"f": "g"},
    "equal keys of two types": [{1: "int"}, {True: "bool"}, {1.0: "float"}, {"1": "str"}],
    "keys like ours": {"$tuple": [1], "": 1, "$": {"$float": "inf"}},
    "floats": [math.inf, -math.inf, math.nan, -0.0, 0.0, 5e-324, 0.1, 1e308, 1.0],
    "numbers": [True, 1, 0, False, -(10**30), 2**9_000],
    "tuples": ((), [(1,), [2, (3,)]], ({"a": (4, 5)},)),
    "texts": ["", "\ud800 \x00 \u2028 \U0001f600", b"", b"\x00\xff"],
    "mappings": [OrderedDict([("b", 1), ("a", 2)]), Counter({8: 2, "x": -1}), {}, Counter()],
    "order": {"b": 1, "a": 2, "c": 3},
    "tensors": [torch.tensor(1e-3), torch.zeros(0, 3), torch.arange(6).view(2, 3).t(),
                torch.tensor([True, False]), torch.randn(3).bfloat16(), torch.tensor(1 + 2j)],
    "of numpy": [np.float64(0.1), np.int32(7), np.bool_(True), np.arange(6.0).reshape(2, 3)],
    "states of random numbers": np.random.RandomState(3).get_state(),
    "nothing": None,
}  # fmt: skip


def save_and_load(folder: Path, extra: Any) -> dict[Any, Any]:
    checkpoint.save(folder, model=MODEL, extra=extra)
    return checkpoint.load(folder, model=MODEL)


def assert_same(found: object, want: object) -> None:
    assert type(found) is type(want), (found, want)
    if isinstance(want, dict):
        assert len(found) == len(want)
        for pair, other in zip(found.items(), want.items(), strict=True):  # also in order
            assert_same(list(pair), list(other))
    elif isinstance(want, list | tuple):
        assert len(found) == len(want)
        for each, other in zip(found, want, strict=True):
            assert_same(each, other)
    elif isinstance(want, torch.Tensor | np.ndarray):
        assert found.dtype == want.dtype and found.shape == want.shape
        assert (found == want).all()
    elif isinstance(want, float):
        assert np.float64(found).tobytes() == np.float64(want).tobytes()  # also for -0.0 and nan
    else:
        assert found == want


@pytest.mark.parametrize("value", KEPT.values(), ids=KEPT)
def test_what_is_loaded_is_what_was_saved(tmp_path, value) -> None:
    assert_same(save_and_load(tmp_path / "one", {"value": value}), {"value": value})
    checkpoint.save(tmp_path / "two", model=MODEL, extra={5: value})
    found = read_manifest(tmp_path / "two").extra
    assert_same(found, {5: value})


def a_circle() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


Pair = namedtuple("Pair", "a b")
REFUSED = {
    "a function": (math.sin, r"extra\['a'\]\[1\]\['b'\]: a builtin_function_or_method cannot be k"),
    "a set": ({1}, r"extra\['a'\]\[1\]\['b'\]: a set cannot be kept; expected None, bool"),
    "a class of its own": (Pair(1, 2), r"\['b'\]: a Pair cannot be kept"),
    "a key": ({Path("x"): 1}, r"the key extra\['a'\]\[1\]\['b'\]\[PosixPath\('x'\)\]: a PosixPath"),
    "a circle": (a_circle(), "expected at most 100 levels"),
    "objects of numpy": (np.array([None]), "a ndarray cannot be kept"),
    "a parameter": (nn.Parameter(torch.ones(1)), "a Parameter cannot be kept"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "expected a dense tensor"),
    "a large tensor": (torch.zeros(1 << 18, 2), "1048576 bytes, got 2097152; make it a buffer"),
    "a long int": (1 << 20_000, "an int of at most 10,000 bits"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_named_with_its_place(tmp_path, value, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "one", model=MODEL, extra={"a": [0, {"b": value}]})
    assert not list(tmp_path.iterdir())


def plateau(optimizer: torch.optim.Optimizer) -> lr_scheduler.ReduceLROnPlateau:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, threshold=1e-9)


class Falling:
    """A callable whose attributes torch keeps."""

    def __init__(self) -> None:
        self.calls = {0: (0, 0.0)}

    def __call__(self, epoch: int) -> float:
        self.calls[epoch] = (epoch, 0.9**epoch)
        return 0.9**epoch


SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Falling()),
    "LambdaLR of a function": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Falling()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 6, 6, 9]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.1, 7),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=12),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.5, 2, mode="exp_range", gamma=0.9),
    "CyclicLR by a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.5, 2, scale_fn=Falling()),
    "ReduceLROnPlateau": plateau,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.MultiStepLR(o, [1, 3])], [4]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.MultiStepLR(o, [1, 6]), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}  # fmt: skip


def test_every_schedule_of_torch_is_here() -> None:
    every = {name for name, kind in vars(lr_scheduler).items()
             if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler)}  # fmt: skip
    of_all = {"LRScheduler", "_LRScheduler"}
    assert every - of_all == {name.partition(" ")[0] for name in SCHEDULES}


def run(optimizer: torch.optim.Optimizer, schedule: Any, count: int) -> list[float]:
    rates = []
    for _ in range(count):
        optimizer.step()
        schedule.step(*((1.0,) if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else ()))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_a_schedule_goes_on_as_if_nothing_had_happened(tmp_path, make, as_tensor) -> None:
    def begin() -> tuple[torch.optim.Optimizer, Any]:
        rate = torch.tensor(0.1) if as_tensor else 0.1
        optimizer = torch.optim.SGD(MODEL.parameters(), lr=rate, momentum=0.9)
        return optimizer, make(optimizer)

    optimizer, schedule = begin()
    run(optimizer, schedule, 5)
    saved = schedule.state_dict()
    checkpoint.save(tmp_path / "one", model=MODEL, optimizer=optimizer, extra={"schedule": saved})
    want = run(optimizer, schedule, 6)
    optimizer, schedule = begin()
    extra = checkpoint.load(tmp_path / "one", model=MODEL, optimizer=optimizer)
    schedule.load_state_dict(extra["schedule"])
    assert len(set(want)) > 1 or "Lambda" in type(schedule).__name__
    assert run(optimizer, schedule, 6) == want


def test_what_schedules_add_to_an_optimizer_is_restored(tmp_path) -> None:
    def begin() -> torch.optim.Optimizer:
        return torch.optim.SGD(MODEL.parameters(), lr=torch.tensor(0.1), momentum=0.9)

    optimizer = begin()
    run(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), 2)
    checkpoint.save(tmp_path / "one", model=MODEL, optimizer=optimizer)
    optimizer = begin()
    checkpoint.load(tmp_path / "one", model=MODEL, optimizer=optimizer)
    [group] = optimizer.param_groups
    assert_same([group["lr"], group["initial_lr"]], [torch.tensor(0.025), torch.tensor(0.1)])


def test_an_option_that_cannot_be_kept_is_named(tmp_path) -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\[0\]\['hook'\]: a builtin"):
        checkpoint.save(tmp_path / "one", model=MODEL, optimizer=optimizer)


CRAFTED = {
    "an unknown type": {"$module": "os"},
    "two types": {"$tuple": [], "$float": "inf"},
    "a float": {"$float": "1e5"},
    "no list": {"$tuple": "abc"},
    "no pairs": {"$dict": [[1]]},
    "a key that cannot be one": {"$dict": [[[1], 2]]},
    "no base64": {"$bytes": "*"},
    "no dtype": {"$tensor": ["nn", [], ""]},
    "objects": {"$array": ["|O", [1], "AAAAAAAAAAA="]},
    "another size": {"$tensor": ["float32", [1 << 40], "AAAAAA=="]},
}


@pytest.mark.parametrize("value", CRAFTED.values(), ids=CRAFTED)
def test_a_value_that_makes_no_sense_is_refused(tmp_path, value) -> None:
    checkpoint.save(tmp_path / "one", model=MODEL)
    tamper(tmp_path / "one", lambda body: body.update(extra={"a": value}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is no manifest of a checkpoint"):
        checkpoint.load(tmp_path / "one", model=MODEL)
