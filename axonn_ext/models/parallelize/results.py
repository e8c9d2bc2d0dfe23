"""The tensors in a model's output, which may be a tree of tuples, lists and mappings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping

from torch import Tensor

# The path to a tensor in the output: positions and names, outermost first. Scalars, such as a loss,
# do not count as positions, so that a tensor has the same place with and without labels.
Key = tuple[int | str, ...]


def tensors_of(output: object) -> dict[Key, Tensor]:
    """Returns the tensors of an output by place. Does not look into other objects."""
    found: dict[Key, Tensor] = {}

    def note(key: Key, tensor: Tensor) -> Tensor:
        found[key] = tensor
        return tensor

    mapped(output, note)
    return found


def mapped(value: object, function: Callable[[Key, Tensor], Tensor], key: Key = ()) -> object:
    """Returns the output with each tensor replaced by `function` of it.

    Mappings are changed in place, so that they keep their class; unchanged parts stay the same
    objects.
    """
    if isinstance(value, Tensor):
        return function(key, value)
    if isinstance(value, Mapping):
        for name, item in list(value.items()):
            new = mapped(item, function, (*key, str(name)))
            if new is not item:
                assert isinstance(value, MutableMapping)
                value[name] = new
        return value
    if not isinstance(value, tuple | list):
        return value
    items, place = [], 0
    for item in value:
        items.append(mapped(item, function, (*key, place)))
        place += not (isinstance(item, Tensor) and item.dim() == 0)
    if all(new is item for new, item in zip(items, value, strict=True)):
        return value
    make = getattr(type(value), "_make", type(value))  # of a named tuple
    return make(items)


def shown(key: Key) -> str:
    """Returns the place as text, for messages."""
    return ".".join(str(part) for part in key) or "0"
