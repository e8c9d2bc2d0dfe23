"""Reads a checkpoint written on any grid into a model and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from axonn_ext.checkpoint.errors import CheckpointError, RanksMissing
from axonn_ext.checkpoint.folder import last_good
from axonn_ext.checkpoint.manifest import DTYPES, Manifest, StoredTensor, dtype_name
from axonn_ext.checkpoint.ranks import Ranks
from axonn_ext.checkpoint.reading import read_manifest
from axonn_ext.checkpoint.replicas import Replicas
from axonn_ext.checkpoint.shards import Shard
from axonn_ext.checkpoint.state import (
    Optimizer,
    StoredAs,
    misfits,
    model_shards,
    optimizer_options,
    optimizer_targets,
    random_shards,
    set_optimizer_state,
    set_random_state,
    stage_of,
)
from axonn_ext.checkpoint.storage import read_shards
from axonn_ext.checkpoint.tables import agreed_tables
from axonn_ext.optim import AdamW
from axonn_ext.spec.files.errors import first_of

_MOST_NAMES = 4  # in a message


def load(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    options: bool = True,
    random: bool = True,
) -> dict[str, Any]:
    """Reads a checkpoint on all ranks together; returns its `extra`.

    It may have been written on any grid, in any layout and dtype: of the ranks that need a block,
    one reads the parts it needs from the files, which are mapped into memory, and broadcasts it.
    Values are cast to the dtypes of the model.

    optimizer: must have the same parameters, in the same number of groups, as the saved one.
    Without it, optimizer state in the checkpoint is skipped.
    options: also sets the optimizer's options, such as lr. random: also sets the random number
    generators, if the job has the same number of ranks as the one that wrote the checkpoint.

    Call it between steps; with axonn_ext.overlap, after `end_step`. Collectives: broadcasts in the
    groups of the model's grid, or in the world group if it has none; with ZeRO, those of
    `AdamW.write_back`. Ranks agree through the store. Raises CheckpointError, on every rank, if the
    checkpoint is damaged or belongs to another model; the message names tensors and shapes. If it
    is raised while tensors are read, part of the model already has the checkpoint's values.
    """
    return _load(Path(folder), Ranks.of_world(), model, optimizer, options=options, random=random)


def _load(
    folder: Path, ranks: Ranks, model: nn.Module, optimizer: Optimizer | None, *, options: bool,
    random: bool,
) -> dict[str, Any]:  # fmt: skip
    with _offering(folder, ranks):
        manifest = ranks.agreed(lambda: read_manifest(folder))
    targets = ranks.agreed(lambda: model_shards(model, optimizer))
    lacked = _lacked_by_all(folder, manifest, targets, ranks)

    def complete() -> None:
        _compare(folder, targets, manifest, lacked)
        targets.update(_further_targets(folder, manifest, model, optimizer, random))
        stored = _stored(manifest)
        for name, shard in targets.items():
            if stored[name][0] != shard.shape:
                raise CheckpointError(
                    f"{folder}: {name} has shape {list(stored[name][0])}, here {list(shard.shape)}"
                )

    ranks.agreed(complete)
    replicas = Replicas(model, targets)
    tables = {
        name: StoredTensor(dtype_name(targets[name].dtype), layout)
        for name, layout in replicas.layouts.items()
        if not name.startswith("rng.")
    }
    agreed_tables(tables, stage_of(model), ranks)
    with _offering(folder, ranks):
        ranks.agreed(lambda: read_shards(folder, manifest, replicas.own, beat=ranks.beat))
    replicas.spread()
    if isinstance(optimizer, AdamW):
        optimizer.write_back()
    if optimizer is not None:
        set_optimizer_state(
            model, optimizer, targets, manifest.optimizer_options if options else None
        )
    set_random_state(targets)
    return dict(manifest.extra)


@contextmanager
def _offering(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Adds the newest undamaged checkpoint to the error about a damaged one."""
    try:
        yield
    except RanksMissing:
        raise
    except CheckpointError as error:
        good = ""
        with suppress(CheckpointError):
            good = ranks.told(lambda: str(last_good(folder, beat=ranks.beat) or ""))
        offer = f"; the newest other one that is whole is {good}" if good else ""
        raise CheckpointError(f"{error}{offer}") from None


def _further_targets(
    folder: Path, manifest: Manifest, model: nn.Module, optimizer: Optimizer | None, random: bool
) -> dict[str, Shard]:  # fmt: skip
    """Returns the blocks that this rank reads in addition to the model's.

    Raises CheckpointError if the checkpoint is of another optimizer.
    """
    stored = _stored(manifest)
    targets: dict[str, Shard] = {}
    if optimizer is not None:
        groups, saved = len(optimizer_options(optimizer)), manifest.optimizer_options
        if groups != len(saved):
            raise CheckpointError(
                f"{folder} has an optimizer with {len(saved)} groups of parameters, and this one "
                f"has {groups}; without an optimizer, only the model is loaded"
                if saved
                else f"{folder} has no optimizer; without one, only the model is loaded"
            )
        problems = list(misfits(model, optimizer, stored.keys(), saved))
        if problems:
            raise CheckpointError(
                f"{folder} has the state of another optimizer: {first_of(problems, _MOST_NAMES)}; "
                "without an optimizer, only the model is loaded"
            )
        targets |= optimizer_targets(model, optimizer, stored)
    own = random_shards() if random else {}
    if "rng.cpu" in own and stored.get("rng.cpu", ((), None))[0][:1] == own["rng.cpu"].shape[:1]:
        targets |= {name: shard for name, shard in own.items() if name in stored}
    return targets


def _stored(manifest: Manifest) -> dict[str, StoredAs]:
    return {name: (t.shape, DTYPES[t.dtype]) for name, t in manifest.tensors.items()}


def _model_names(manifest: Manifest) -> list[str]:
    return sorted(name for name in manifest.tensors if name.startswith(("model.", "buffer.")))


def _lacked_by_all(
    folder: Path, manifest: Manifest, targets: Mapping[str, Shard], ranks: Ranks
) -> set[str]:
    """Returns the names in the checkpoint that no rank's model has; a stage has only its own.

    Each rank contributes the checkpoint's token and a bit per name. Raises CheckpointError, on
    every rank, if ranks have read different checkpoints.
    """
    names = _model_names(manifest)
    own = sum(1 << number for number, name in enumerate(names) if name in targets)

    def merged(one: Sequence[str], other: Sequence[str]) -> list[str]:
        every = int(one[0], 16) | int(other[0], 16)
        return [f"{every:x}", *sorted({*one[1:], *other[1:]})[:2]]

    said, *tokens = ranks.reduced([f"{own:x}", manifest.token], merged)
    if len(tokens) > 1:
        raise CheckpointError(
            f"{folder}: expected all ranks to read the same checkpoint, got tokens "
            f"{' and '.join(tokens)}: it was replaced meanwhile, or hosts do not share the folder"
        )
    every = int(said, 16)
    return {name for number, name in enumerate(names) if not every >> number & 1}


def _compare(
    folder: Path, targets: Mapping[str, Shard], manifest: Manifest, lacked: set[str]
) -> None:
    """Raises CheckpointError if the tensors of model and checkpoint differ in names or shapes.

    lacked: the names in the checkpoint that no rank's model has.
    """
    stored = _stored(manifest)
    saved = set(_model_names(manifest))
    problems = [
        f"{what} {first_of(names, _MOST_NAMES)}"
        for what, names in (
            ("it does not have", sorted(targets.keys() - saved)),
            ("the model does not have", sorted(lacked)),
        )
        if names
    ]
    problems += [
        f"{name} has shape {list(stored[name][0])}, in the model {list(targets[name].shape)}"
        for name in sorted(targets.keys() & saved)
        if stored[name][0] != targets[name].shape
    ][:_MOST_NAMES]
    if problems:
        hint, every = "", saved - lacked | targets.keys()
        only_orders = {n.partition("@")[0] for n in every} == {n.partition("@")[0] for n in saved}
        if only_orders and "@" in "".join(problems):
            hint = (
                "; what follows @ is the order of a tensor, which depends on the grid's x and on "
                "the plan of parallelize: full_state_dict has the same order on every grid"
            )
        raise CheckpointError(
            f"{folder} is a checkpoint of another model: {'; '.join(problems)}{hint}"
        )
