"""How ranks that read or write together learn that one of them has failed."""

from __future__ import annotations

import torch.distributed as dist

from axonn_ext.grid import Grid
from axonn_ext.inputs.errors import InputError


def agree(grid: Grid, error: Exception | None) -> None:
    """Raises the error of this rank, or that of another one, so that no rank waits for it.

    Collectives: an all-gather of the errors.
    """
    own = None if error is None else (isinstance(error, ValueError), str(error))
    found: list[tuple[bool, str] | None] = [own] * grid.world_size
    if grid.world_size > 1:
        dist.all_gather_object(found, own)
    if error is not None:
        raise error
    for rank, failure in enumerate(found):
        if failure is not None:
            is_input, text = failure
            raise (InputError if is_input else RuntimeError)(f"rank {rank}: {text}")
