"""Reads the config.json of a Hugging Face model of one of the families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axonn_ext.spec.family import BLOCK_LINEARS, Family
from axonn_ext.spec.files.tables import Table
from axonn_ext.spec.hugging_face import LAYER_TYPES, UNROTATED, BlockRule, HuggingFace
from axonn_ext.spec.rope import ROPE_KEYS, read_rope_scaling

# The fields of ModelConfig, except head_size, for which None means that another size decides.
_MAY_BE_NONE = ("num_kv_heads", "intermediate_size", "attention_softcap", "logits_softcap")


def values_of(family: Family, whole: Table) -> dict[str, Any]:
    """Returns the fields of a ModelConfig that the file states. Raises InputError."""
    theirs, table = family.hugging_face, whole.without_nulls()
    for key, reason in theirs.must_be_false.items():
        if table.flag(key, False):
            raise table.error(key, f"false: {reason}")
    for key, reason in theirs.must_be_true.items():
        if not table.flag(key, True):
            raise table.error(key, f"true: {reason}")
    for key, other in theirs.must_equal.items():
        if table.count(key, table.count(other)) != table.count(other):
            raise table.error(key, f"{other}={table.count(other)}")
    table.one_of(theirs.activation_key, theirs.activations, theirs.activations[0])
    values = {ours: _value(whole, theirs, ours) for ours in theirs.keys}
    values |= _windows(whole, theirs, values["num_layers"])
    values["biases"] = _biases(family, table)
    if family.rotary:
        length = table.count(theirs.keys["sequence_length"], values["sequence_length"])
        values |= _rope(table, theirs, length)
        values["head_size"] = size = _head_size(table, theirs, values)
        size = size or values["hidden_size"] // values["num_heads"]
        values["rotary_size"] = _rotary_size(table, theirs, size)
        rule = theirs.rotary.unrotated
        values["no_rope_layers"] = _no_rope_layers(table, rule, values["num_layers"])
    return values


def _biases(family: Family, table: Table) -> tuple[str, ...] | None:
    """Returns the Linears of a block that have biases, or None if they are those of the family."""
    biases = set(family.biases)
    for key, which in family.hugging_face.bias_keys.items():
        given = table.flag(key, which[0] in family.biases)
        biases = biases | set(which) if given else biases - set(which)
    return None if biases == set(family.biases) else tuple(b for b in BLOCK_LINEARS if b in biases)


def _rotary_size(table: Table, theirs: HuggingFace, head_size: int) -> int | None:
    """Returns the number of rotated features per head, or None if all are."""
    key = theirs.rotary.share or "partial_rotary_factor"
    share = table.positive(key, theirs.defaults.get(key, 1.0))
    for rope in ROPE_KEYS:
        if table.has(rope):
            share = table.table(rope).without_nulls().positive("partial_rotary_factor", share)
    if theirs.rotary.share is None and share != 1:
        raise table.error(key, "1: positions rotate whole heads")
    if share > 1:
        raise table.error(key, "at most 1")
    size = int(head_size * share)
    return None if size == head_size else size


def _no_rope_layers(
    table: Table, rule: BlockRule | None, num_layers: int
) -> tuple[int, ...] | None:
    """Returns the blocks without rotation, or None if they are those of the family."""
    if rule is None:
        return None
    stated = rule._replace(n=table.count(rule.key, rule.n))
    flags = table.list(UNROTATED) or [not stated.has(i) for i in range(num_layers)]
    if len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise table.error(UNROTATED, f"a list of {num_layers} numbers, each 0 or 1")
    found = tuple(i for i in range(num_layers) if not flags[i])
    return None if found == tuple(filter(rule.has, range(num_layers))) else found


def _head_size(table: Table, theirs: HuggingFace, values: Mapping[str, Any]) -> int | None:
    """Returns the number of features per head, or None if it is hidden_size / num_heads."""
    usual, left = divmod(values["hidden_size"], values["num_heads"])
    size = table.count("head_dim", theirs.head_size or usual) if theirs.has_head_dim else usual
    return None if size == usual and not left else size


def _value(whole: Table, theirs: HuggingFace, ours: str) -> Any:
    """Returns the file's value for one of our fields, or transformers' default.

    If our field may be None, null means the same as None here; otherwise, null means the default.
    """
    key, table = theirs.keys[ours], whole.without_nulls()
    value: Any
    if not table.has(key) and key in theirs.defaults:
        value = None if whole.has(key) and ours in _MAY_BE_NONE else theirs.defaults[key]
    elif ours == "tie_embeddings":
        value = table.flag(key)
    elif ours in ("norm_eps", "init_std") or ours.endswith(("_scale", "_softcap")):
        value = table.positive(key)
    else:
        value = table.count(key)
    return value ** (1 / theirs.powers[ours]) if ours in theirs.powers else value


def _rope(table: Table, theirs: HuggingFace, longest: int) -> dict[str, Any]:
    """Returns rope_theta, rope_scaling and local_rope_theta.

    transformers 5 puts them into the table rope_parameters, which has a table for each kind of
    block in models with two kinds.
    """
    key, local_key = theirs.rotary.theta, theirs.rotary.local_theta
    theta = table.positive(key, theirs.defaults.get(key, 10000.0))
    local = table.positive(local_key, theirs.defaults[local_key]) if local_key else None
    for name in ROPE_KEYS:
        if not table.has(name):
            continue
        rope = table.table(name).without_nulls()
        full, sliding = LAYER_TYPES
        inner = rope.table(full).without_nulls() if rope.has(full) else rope
        theta = inner.positive("rope_theta", theta)
        if rope.has(sliding):
            of_windows = rope.table(sliding).without_nulls()
            of_windows.one_of("rope_type", ("default",), "default")
            found = of_windows.positive("rope_theta", local or theta)
            if local_key is None and found != theta:
                raise of_windows.error("rope_theta", f"{theta:g}, as in the other blocks")
            local = found if local_key else None
        return {
            "rope_theta": theta,
            "rope_scaling": read_rope_scaling(inner, table, longest, theirs.rotary.types),
            "local_rope_theta": local,
        }
    return {"rope_theta": theta, "local_rope_theta": local}


def _windows(whole: Table, theirs: HuggingFace, num_layers: int) -> dict[str, Any]:
    """Returns window and window_layers.

    A null window means that there is none; a missing key means transformers' default.
    """
    key, table = theirs.window_key, whole.without_nulls()
    if key is None or (whole.has(key) and not table.has(key)):
        return {}
    if theirs.window_flag is not None and not table.flag(theirs.window_flag, False):
        return {}
    window = table.count(key) if table.has(key) else theirs.defaults[key]
    kinds = table.list("layer_types")
    if theirs.full_layers is None:
        return {"window": window}
    full = theirs.full_layers
    if not kinds:
        stated = full._replace(n=table.count(full.key, full.n, least=0))
        kinds = [LAYER_TYPES[not stated.has(i)] for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(LAYER_TYPES):
        raise table.error("layer_types", f"{num_layers} of {' and '.join(LAYER_TYPES)}")
    windowed = tuple(i for i in range(num_layers) if kinds[i] == LAYER_TYPES[True])
    usual = tuple(i for i in range(num_layers) if not full.has(i))
    if not windowed:
        return {}
    return {"window": window, "window_layers": None if windowed == usual else windowed}
