"""Converts the Python values that users add to a checkpoint to JSON and back, with their types.

    None, bool, int, str, finite float, list, and dict of such keys    as JSON has them
    {"$float": "inf"}          inf, -inf and nan
    {"$tuple": [...]}          also "$bytes" (base64)
    {"$dict": [[k, v], ...]}   keys that are not str, or begin with $; "$OrderedDict", "$Counter"
    {"$tensor": [dtype, shape, base64]}    also "$array" and "$number", of NumPy

Reading makes only values of these types, and runs no code from the file.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axonn_ext.ranks.rank_values import dtype_named

_MOST_BYTES = 1 << 20  # of a tensor or an array; the manifest is held in memory as text
_MOST_LEVELS = 100  # of nesting; deeper values exhaust the parser's stack
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "$dict": dict, "$OrderedDict": OrderedDict, "$Counter": Counter
}  # fmt: skip
_KINDS_OF_MAPPING = {kind: name for name, kind in _MAPPINGS.items()}
_NUMPY_KINDS = "biufc"  # numbers and bool: no objects, which would be pickled


def encode(value: object, path: str, level: int = 0) -> Any:
    """Returns a JSON form of a value, which `decode` turns back into the value.

    Raises ValueError for unsupported values, with their path. path: that of this value.
    """
    kind = type(value)
    if level > _MOST_LEVELS:
        raise ValueError(f"{path}: expected at most {_MOST_LEVELS} levels of nesting")
    if value is None or kind in (bool, str):
        return value
    if isinstance(value, int) and kind is int:
        if value.bit_length() > 10_000:  # Python refuses to parse ints with too many digits
            raise ValueError(f"{path}: expected an int of at most 10,000 bits")
        return value
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list or kind is tuple:
        assert isinstance(value, list | tuple)
        items = [encode(each, f"{path}[{i}]", level + 1) for i, each in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if isinstance(value, dict) and kind in _KINDS_OF_MAPPING:
        return _encode_mapping(value, path, level)
    if isinstance(value, bytes) and kind is bytes:
        return {"$bytes": _text(value)}
    if isinstance(value, Tensor) and kind is Tensor:
        return {"$tensor": _encode_tensor(value, path)}
    is_numpy = kind is np.ndarray or isinstance(value, np.generic)
    if is_numpy and (array := np.asarray(value)).dtype.kind in _NUMPY_KINDS:
        _check_size(array.nbytes, path)
        name = "$array" if kind is np.ndarray else "$number"
        return {name: [array.dtype.str, list(array.shape), _text(array.tobytes())]}
    raise ValueError(
        f"{path}: a {kind.__name__} cannot be kept; expected None, bool, int, float, str, bytes, "
        "list, tuple, dict, OrderedDict, Counter, a tensor, or a number or an array of NumPy"
    )


def _encode_mapping(value: dict[Any, Any], path: str, level: int) -> Any:
    plain = type(value) is dict
    plain = plain and all(type(key) is str and not key.startswith("$") for key in value)
    if plain:
        return {k: encode(each, f"{path}[{k!r}]", level + 1) for k, each in value.items()}
    pairs = []
    for key, each in value.items():
        place = f"{path}[{key!r}]"
        pairs.append([encode(key, f"the key {place}", level + 1), encode(each, place, level + 1)])
    return {_KINDS_OF_MAPPING[type(value)]: pairs}


def _encode_tensor(value: Tensor, path: str) -> list[Any]:
    if value.layout != torch.strided or value.is_quantized:
        raise ValueError(f"{path}: expected a dense tensor, got layout {value.layout}")
    _check_size(value.nbytes, path)
    flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    name = str(value.dtype).removeprefix("torch.")
    return [name, list(value.shape), _text(flat.view(torch.uint8).numpy().tobytes())]


def _check_size(num_bytes: int, path: str) -> None:
    if num_bytes > _MOST_BYTES:
        raise ValueError(
            f"{path}: expected at most {_MOST_BYTES} bytes, got {num_bytes}; make it a buffer of "
            "the model, which is saved like its parameters"
        )


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def decode(value: Any) -> Any:
    """Returns the value that `encode` converted to this.

    Raises ValueError, TypeError or KeyError for input that `encode` does not produce, and
    RecursionError for input that is nested too deeply.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(each) for key, each in value.items()}
    [(name, content)] = value.items()
    if name in _MAPPINGS:
        return _MAPPINGS[name]({decode(key): decode(each) for key, each in content})
    if name == "$tuple" and isinstance(content, list):
        return tuple(decode(each) for each in content)
    if name == "$float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if name == "$bytes":
        return base64.b64decode(content, validate=True)
    if name in ("$tensor", "$array", "$number"):
        kind, shape, text = content
        read = _decode_tensor if name == "$tensor" else _decode_numpy
        found = read(kind, shape, bytearray(base64.b64decode(text, validate=True)))
        return found[()] if name == "$number" else found
    raise ValueError(f"expected a value of a known type, got {name}")


def _decode_tensor(kind: str, shape: list[int], content: bytearray) -> Tensor:
    dtype = dtype_named(kind)
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
    try:
        return flat.view(dtype).reshape(shape)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _decode_numpy(kind: str, shape: list[int], content: bytearray) -> Any:
    dtype = np.dtype(kind)
    if dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"expected the name of a dtype of numbers, got {kind}")
    return np.frombuffer(content, dtype=dtype).reshape(shape)
