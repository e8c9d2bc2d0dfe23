"""Evaluates the shapes in the documentation of the ops."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

from axonn_ext.ops.spec import OpSpec


@dataclass(frozen=True)
class Shapes:
    """A line of `OpSpec.shapes`, evaluated: its arguments, and the shape of every tensor."""

    arguments: dict[str, object]
    tensors: dict[str, tuple[int, ...]]


def documented_shapes(spec: OpSpec, sizes: Mapping[str, int]) -> list[Shapes]:
    """Every line, with letters replaced by sizes; divisors must divide the sizes evenly."""
    return [_read(line, sizes) for line in spec.shapes]


def _read(line: str, sizes: Mapping[str, int]) -> Shapes:
    arguments = {name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=(\w+)", line)}
    tensors = {
        name: tuple(_size(text, sizes) for text in shape.split(", "))
        for name, shape in re.findall(r"(\w+) \[([^\]]+)\]", line)
    }
    return Shapes(arguments, tensors)


def _size(text: str, sizes: Mapping[str, int]) -> int:
    if text.isdecimal():
        return int(text)
    whole, _, parts = text.partition(" / ")
    size, remainder = divmod(sizes[whole], sizes[parts] if parts else 1)
    assert remainder == 0, f"{text} with {sizes}"
    return size
