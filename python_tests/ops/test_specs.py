"""OpSpec: every op has one, and what it documents is what it computes and what help() shows."""

from __future__ import annotations

import inspect
import random

import pytest
import torch

from axonn_ext import ops
from axonn_ext.ops.spec import SUMS, OpSpec
from axonn_ext.ops.specs import SPECS, collectives, linear, loss, matmuls
from op_shapes import Shapes, documented_shapes

axonn = torch.ops.axonn
SINGLE_GROUP = (*collectives.SPECS, *matmuls.SPECS)
KINDS = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
}


def names(specs: tuple[OpSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


def schemas() -> dict[str, torch.FunctionSchema]:
    """Of every op but those with an underscore, which kernels of the others call."""
    found = [
        torch._C._get_schema(*name.partition(".")[::2])
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("axonn::") and not name.startswith("axonn::_")
    ]
    return {schema.name.removeprefix("axonn::"): schema for schema in found}


# --- Every op has a spec --------------------------------------------------------------------------


def test_every_op_has_a_spec() -> None:
    assert set(SPECS) == set(schemas())
    for name, schema in schemas().items():
        assert list(SPECS[name].arguments) == [a.name for a in schema.arguments]
        # torch leaves out what equals a default, and a call could not be read.
        assert not any(a.has_default_value() for a in schema.arguments), name


def test_every_sum_says_in_what_it_accumulates() -> None:
    sums = [spec for spec in SINGLE_GROUP if "reduce" in spec.traffic]
    assert len(sums) >= 4
    for spec in sums:
        assert SUMS in " ".join(spec.documentation.split()), spec.name


def test_every_op_that_takes_a_group_says_what_it_sends() -> None:
    communicating = {
        name for name, spec in SPECS.items() if {"group_name", "group_names"} & {*spec.arguments}
    }
    assert communicating == {spec.name for spec in (*SINGLE_GROUP, *linear.SPECS, loss.SPECS[0])}
    without = OpSpec("all_gather", results=lambda call: None, documentation="")
    for name, spec in SPECS.items():
        says = spec.collectives is not without.collectives
        said = [says, bool(spec.traffic), bool(spec.backward)]
        assert said == 3 * [name in communicating], name


def test_a_spec_of_an_op_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_op"):
        OpSpec("no_such_op", results=lambda call: None, documentation="")


def test_a_call_has_the_arguments_by_name_however_they_are_passed() -> None:
    spec = SPECS["all_gather_matmul"]
    values = {name: object() for name in spec.arguments}
    for num_positional in range(len(values) + 1):
        args = list(values.values())[:num_positional]
        kwargs = dict(list(values.items())[num_positional:])
        assert vars(spec.call(args, kwargs)) == values


# --- The documentation is correct -----------------------------------------------------------------


def draw_sizes(seed: int) -> dict[str, int]:
    """Of groups, and of whole tensors, which any group divides; some are empty."""
    pick = random.Random(seed)
    groups = {name: pick.randint(1, 4) for name in ("W", "R", "S", "Z")}
    return groups | {name: 12 * pick.choice((0, 1, 3, 5, 8)) for name in ("M", "K", "N")}


def meta_arguments(spec: OpSpec, shapes: Shapes, sizes: dict[str, int]) -> dict[str, object]:
    """Of a call whose tensors have the shapes of a line, but no values and no ranks."""
    groups = [sizes[name] for name in ("R", "S", "Z")]
    others = {
        "group_name": "nobody", "group_size": sizes["W"], "algorithm": "auto", "reduce_op": "sum",
        "group_names": ["r", "s", "z"], "group_sizes": groups, "sharded": True,
        "gather_dim": 0, "scatter_dim": 0, "bias": None, "save_input": False, "save_weight": False,
        "x_is_full": False, "weight_is_full": False, "output_mask": [True, True, True],
        "first_column": 0, "ignore_index": -100, "in_place": False, "deterministic": True,
    }  # fmt: skip
    tensors = {name: torch.empty(size, device="meta") for name, size in shapes.tensors.items()}
    known = others | shapes.arguments | tensors
    return {name: known[name] for name in spec.arguments}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("op", names((*SINGLE_GROUP, *linear.SPECS, *loss.SPECS[:2])))
def test_documented_shapes_are_those_of_the_results(op: str, seed: int) -> None:
    spec, sizes = SPECS[op], draw_sizes(seed)
    result_names = [each.name or "result" for each in schemas()[op].returns]
    for shapes in documented_shapes(spec, sizes):
        results = getattr(axonn, op)(**meta_arguments(spec, shapes, sizes))
        results = results if isinstance(results, tuple) else (results,)
        got = dict(zip(result_names, (tuple(t.shape) for t in results), strict=True))
        want = {name: size for name, size in shapes.tensors.items() if name not in spec.arguments}
        assert want and want == {name: got[name] for name in want}, (shapes, sizes)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("op", names(SINGLE_GROUP))
def test_documented_collectives_are_those_that_are_recorded(op: str, seed: int) -> None:
    spec, sizes = SPECS[op], draw_sizes(seed)
    kind, _, what = spec.traffic.removeprefix("one ").partition(" of ")
    for shapes in documented_shapes(spec, sizes):
        arguments = meta_arguments(spec, shapes, sizes)
        (issued,) = spec.collectives(spec.call((), arguments))
        elements = sizes["M"] * sizes["N"]
        if what != "the product":
            elements = torch.Size(shapes.tensors[what]).numel()
        assert issued.num_elements == elements, shapes
        assert (issued.kind, issued.group_name, issued.group_size, issued.dtype) == (
            *(KINDS[kind], "nobody", sizes["W"], torch.float32),
        )


def test_a_spec_reads_its_documentation() -> None:
    text = """Returns it.

        dim=0   a [M, K]   result [M, K]
        a [M]   result [M]

    Sums. Of many.
    Backward: da = f(dy), and
    so on; e.g. this.
    Collectives: none.
    """
    spec = OpSpec("all_gather", results=lambda call: None, documentation=text)
    assert spec.shapes == ["dim=0   a [M, K]   result [M, K]", "a [M]   result [M]"]
    assert (spec.backward, spec.traffic) == ("da = f(dy), and so on; e.g. this", "none")
    bare = OpSpec("all_gather", results=lambda call: None, documentation=None)
    assert (bare.shapes, bare.backward, bare.traffic) == ([], "", "")


def test_public_functions_have_the_documentation_and_the_parameters_of_their_specs() -> None:
    assert set(ops.__all__) == {"ALGORITHMS", *names(matmuls.SPECS)}
    for spec in matmuls.SPECS:
        function = getattr(ops, spec.name)
        parameters = list(inspect.signature(function).parameters)
        assert sorted(spec.arguments) == sorted(
            {*parameters, "group_name", "group_size"} - {"group"}
        )
        assert function.__doc__ is spec.documentation and spec.shapes
        assert "Raises ValueError" in function.__doc__
