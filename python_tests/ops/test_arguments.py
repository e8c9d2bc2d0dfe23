"""What ops, modules and models say of tensors of the wrong kind, place, shape or range."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from axonn_ext import GridShape, models, nn, ops
from axonn_ext.ops.specs import matmuls
from grids import grid_of
from limits import HANG_SECONDS
from model_cases import GPT2, LLAMA, random_batch

OPS = {spec.name: spec.arguments[:2] for spec in matmuls.SPECS}
Messages = dict[str, str]


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


# --- Kinds of tensors -----------------------------------------------------------------------------

WRONG = {
    "None": (lambda: None, "TypeError: {op}: {name} must be a Tensor, got NoneType"),
    "list": (lambda: [[1.0]], "TypeError: {op}: {name} must be a Tensor, got list"),
    "meta": (lambda: torch.ones(4, 4, device="meta"), "ValueError: {op}: {places}"),
    "sparse": (
        lambda: torch.eye(4).to_sparse(),
        "TypeError: {op}: {name} must be a dense tensor, got one that is of layout Sparse",
    ),
    "csr": (
        lambda: torch.eye(4).to_sparse_csr(),
        "TypeError: {op}: {name} must be a dense tensor, got one that is of layout SparseCsr",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(4), torch.ones(4)]),
        "TypeError: {op}: {name} must be a dense tensor, got one that is nested",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(4, 4), 1.0, 0, torch.qint8),
        "TypeError: {op}: {name} must be a dense tensor, got one that is quantized",
    ),
}


def messages_of_ops(kind: str) -> Messages:
    make, _ = WRONG[kind]
    messages = {}
    for op, names in OPS.items():
        for name in names:
            tensors = [make() if n == name else torch.ones(4, 4) for n in names]
            for grad in (False, True):
                messages[f"{op} {name} {grad}"] = message_of(
                    partial(getattr(ops, op), *(_tracked(t, grad) for t in tensors),
                            dist.group.WORLD)
                )  # fmt: skip
    return messages


def _tracked(value: object, grad: bool) -> object:
    floating = isinstance(value, Tensor) and value.dtype == torch.float32
    return value.requires_grad_(grad) if floating else value


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", list(WRONG))
def test_an_operand_of_the_wrong_kind_is_named(pool, kind: str, world_size: int) -> None:
    expected = {}
    for op, names in OPS.items():
        for name in names:
            on = ["meta" if n == name else "cpu" for n in names]
            places = f"{names[0]} is on {on[0]} but {names[1]} is on {on[1]}"
            for grad in (False, True):
                text = WRONG[kind][1].format(op=op, name=name, places=places)
                expected[f"{op} {name} {grad}"] = text
    assert pool(world_size).run(messages_of_ops, kind) == [expected] * world_size


def messages_of_modules() -> Messages:
    grid = grid_of(GridShape(x=2))
    linear = nn.Linear(8, 8, grid=grid, role="expand")
    norms = {"LayerNorm": nn.LayerNorm(8, grid=grid), "RMSNorm": nn.RMSNorm(8, grid=grid)}
    positions, table = nn.PositionEmbedding(8, 8, grid=grid), nn.Embedding(16, 8, grid=grid)
    loss, x, meta = nn.CrossEntropy(grid=grid), torch.ones(4, 8), torch.ones(4, 8, device="meta")
    labels = torch.zeros(4, dtype=torch.long)
    calls: dict[str, Callable[[], object]] = {
        "Linear: input must be a Tensor, got NoneType": lambda: linear(None),
        "Linear: input is on meta, expected it on cpu": lambda: linear(meta),
        "PositionEmbedding: x must be a Tensor, got NoneType": lambda: positions(None, 4),
        "Embedding: ids must be a Tensor, got list": lambda: table([1, 2]),
        "Embedding: ids must be int64 or int32, got Float": lambda: table(x),
        "CrossEntropy: logits must be a Tensor, got NoneType": lambda: loss(None, labels),
        "CrossEntropy: labels must be a Tensor, got NoneType": lambda: loss(x, None),
        "CrossEntropy: labels must be int64 or int32, got Float": lambda: loss(x, x[:, 0]),
        "CrossEntropy: logits and labels must have shapes [rows, columns] and [rows], got [4, 8] "
        "and [3]": lambda: loss(x, labels[:3]),
        "CrossEntropy: logits and labels must have shapes [rows, columns] and [rows], got [4, 8] "
        "and [2, 2]": lambda: loss(x, labels.view(2, 2)),
    }
    for name, norm in norms.items():
        calls |= {
            f"{name}: input must be a Tensor, got NoneType": partial(norm, None),
            f"{name}: input is on meta, expected it on cpu": partial(norm, meta),
            f"{name}: input must have shape [..., 8] on each rank (features=8, {grid.shape}), got "
            "[4, 6]": partial(norm, x[:, :6]),
        }
    return {expected: message_of(call).partition(": ")[2] for expected, call in calls.items()}


def test_modules_name_what_does_not_fit(pool) -> None:
    for messages in pool(2).run(messages_of_modules):
        assert messages == {expected: expected for expected in messages}


# --- Token ids and labels -------------------------------------------------------------------------


def messages_of_models() -> Messages:
    """Of models whose vocabulary is 64."""
    grid = grid_of(GridShape(x=2))
    ids, labels = random_batch()
    found = {}
    for config in (GPT2, LLAMA):
        model = models.build(config, grid, seed=1)

        def call(ids: object = ids, labels: object = labels, model: object = model) -> str:
            return message_of(lambda: model.loss(ids, labels))

        def changed(t: Tensor, *values: int) -> Tensor:
            t = t.clone()
            for i, value in enumerate(values):
                t[2 + i, 3] = value
            return t

        found |= {
            f"{config.family} {name}": message
            for name, message in {
                "shape": call(labels=labels[:, 1:]),
                "flat": call(labels=labels.flatten()),
                "none": call(labels=None),
                "ids none": call(ids=None),
                "ids": call(ids=changed(ids, 64)),
                "ids negative": call(ids=changed(ids, -1, 99)),
                "ids ignored": call(ids=changed(ids, -100)),
                "labels": call(labels=changed(labels, 64)),
                "labels negative": call(labels=changed(labels, -1)),
                "labels ignored": call(labels=changed(labels, -100)),
                "int32": call(ids=ids.int(), labels=labels.int()),
            }.items()
        }
    return found


def test_token_ids_and_labels_out_of_range_are_named(pool) -> None:
    for rank, messages in enumerate(pool(2).run(messages_of_models)):
        where = f"at position [2, 3] on rank {rank}"
        ids, labels = "ValueError: Embedding: ids", "ValueError: loss: labels"
        expected = {
            "shape": f"{labels} must have the shape of token_ids, [8, 8], got [8, 7]",
            "flat": f"{labels} must have the shape of token_ids, [8, 8], got [64]",
            "none": "TypeError: loss: labels must be a Tensor, got NoneType",
            "ids none": "TypeError: loss: token_ids must be a Tensor, got NoneType",
            "ids": f"{ids} must lie in [0, 64), got 64 {where}",
            "ids negative": f"{ids} must lie in [0, 64), got -1 {where} (and 1 more)",
            "ids ignored": f"{ids} must lie in [0, 64), got -100 {where}",
            "labels": f"{labels} must lie in [0, 64) or be -100, got 64 {where}",
            "labels negative": f"{labels} must lie in [0, 64) or be -100, got -1 {where}",
            "labels ignored": "no error",
            "int32": "no error",
        }
        for family in ("gpt2", "llama"):
            assert expected == {name: messages[f"{family} {name}"] for name in expected}


def local_rows(ids: Tensor, *, check: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.axonn.local_rows(ids, 4, 4, 16, -100, check, "test: ids", 3)


def test_local_rows() -> None:
    ids = torch.tensor([[3, 4, 7], [8, -100, 15]])
    rows, is_here = local_rows(ids, check=False)
    assert rows.tolist() == [[0, 0, 3], [3, 0, 3]]
    assert is_here.tolist() == [[False, True, True], [False, False, False]]
    with pytest.raises(ValueError, match=r"got 16 at position \[\] on rank 3$"):
        local_rows(torch.tensor(16), check=False)
    for empty in (ids[:0], ids[:, :0]):
        assert local_rows(empty, check=True)[0].shape == empty.shape
    with FakeTensorMode() as mode:  # whose values nobody knows
        assert local_rows(mode.from_tensor(ids), check=True)[1].dtype == torch.bool


@pytest.mark.gpu
def test_on_gpus_out_of_range_is_named_if_asked_for() -> None:
    ids = torch.tensor([0, 16]).cuda()
    with pytest.raises(ValueError, match=r"must lie in \[0, 16\) or be -100, got 16 at position"):
        local_rows(ids, check=True)
    with torch.cuda.device(0):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            rows, is_here = local_rows(ids, check=False)  # the host does not wait
        finally:
            torch.cuda.set_sync_debug_mode(before)
    assert rows.tolist() == [0, 3] and is_here.tolist() == [False, False]


def checks_asked_for() -> list[bool]:
    grid = grid_of(GridShape(x=2))
    asked = []
    for value in ("0", "1"):
        with mock.patch.dict(os.environ, {"AXONN_DEBUG_TOKEN_IDS": value}):
            table, loss = nn.Embedding(16, 8, grid=grid), nn.CrossEntropy(grid=grid)
        calls = mock.Mock(wraps=torch.ops.axonn.local_rows)
        with mock.patch.object(torch.ops.axonn, "local_rows", calls):
            table(torch.zeros(2, dtype=torch.long))
            loss(torch.ones(2, 8), torch.zeros(2, dtype=torch.long))
        asked += [call.args[5] for call in calls.call_args_list]
    return asked


def test_a_setting_asks_for_the_look_at_gpus(pool) -> None:
    assert pool(2).run(checks_asked_for) == [[False, False, True, True]] * 2


# --- Memory that ranks do not share ---------------------------------------------------------------

APART = """
import dataclasses, warnings
import torch, torch.distributed as dist
from axonn_ext import ops
from axonn_ext.kernels import extension
from axonn_ext.spec import settings
warnings.simplefilter("always")
dist.init_process_group("gloo")
group = dist.new_group([0, 1], group_desc="the pair")
# No address space is as large.
loaded = dataclasses.replace(settings.load(), symmetric_memory_bytes=1 << 50)
extension.configure(loaded)
for call in range(3):
    for op in (ops.matmul_all_reduce, ops.all_gather_matmul):
        y = op(torch.ones(2, 2), torch.ones(2, 2), group)
assert y.sum().item() == 16.0
"""


def test_auto_says_once_that_memory_cannot_be_shared(tmp_path) -> None:
    script = tmp_path / "apart.py"
    script.write_text(APART)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--standalone", "--local-addr=127.0.0.1"]  # fmt: skip
    done = subprocess.run([*command, str(script)], capture_output=True, text=True,
                          timeout=HANG_SECONDS)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "share no memory" in line]
    assert len(said) == 1, done.stderr
    for part in ("the ranks of group 'the pair' share no memory, since rank 0: ", "'sequential'"):
        assert part in said[0]
