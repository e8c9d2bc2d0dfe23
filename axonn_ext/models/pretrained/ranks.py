"""Propagates failures between ranks that read or write together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from axonn_ext.ranks import meeting
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.rank_values import first_failure
from axonn_ext.spec.files.digests import digest_of_files
from axonn_ext.spec.files.errors import InputError


def agree(grid: Grid, error: Exception | None) -> None:
    """Raises this rank's error, or another rank's, so that no rank keeps waiting.

    Collectives: those of first_failure.
    """
    own = None if error is None else json.dumps([isinstance(error, ValueError), str(error)])
    found = first_failure(own) if grid.world_size > 1 else None
    if error is not None:
        raise error
    if found is not None:
        rank, (is_input, text) = found[0], json.loads(found[1])
        raise (InputError if is_input else RuntimeError)(f"rank {rank}: {text}")


def compare_files(grid: Grid, files: Sequence[Path], *, what: str, **values: object) -> None:
    """Raises RuntimeError, which names the ranks, unless all ranks have the same files and values.

    Files are compared by name, size and content; only a sample of large files is read.
    """
    if grid.world_size == 1:
        return
    said = {name: str(value) for name, value in values.items()}
    said["the content of the files"] = digest_of_files(files)
    meeting.same_in_world(said, what=what)
