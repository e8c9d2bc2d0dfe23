"""Output trees: containers keep their class, and each tensor keeps its place."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from axonn_ext.models.parallelize.results import mapped, tensors_of


class Output(NamedTuple):
    logits: Tensor
    states: object


def test_classes_are_kept_and_what_does_not_change_is_the_same_object() -> None:
    logits, first, second = (torch.full((2,), float(n)) for n in range(3))
    tree = Output(logits, [OrderedDict(first=first), (second, "text", None)])
    assert mapped(tree, lambda _, tensor: tensor) is tree
    doubled = mapped(tree, lambda _, tensor: 2 * tensor)
    assert isinstance(doubled, Output)
    named, pair = doubled.states
    assert type(doubled.states) is list and type(named) is OrderedDict and type(pair) is tuple
    assert pair[1:] == ("text", None)
    for got, tensor in ((doubled.logits, logits), (named["first"], first), (pair[0], second)):
        assert torch.equal(got, 2 * tensor)


def test_a_tensor_has_the_same_place_with_and_without_a_loss() -> None:
    logits, state = torch.zeros(2), torch.ones(3)
    without, with_loss = (
        tensors_of((logits, [state])),
        tensors_of((torch.ones(()), logits, [state])),
    )
    assert without == {(0,): logits, (1, 0): state}
    assert all(with_loss[key] is tensor for key, tensor in without.items())
