"""The grid of a script that a framework has launched."""

from __future__ import annotations

import torch.distributed as dist

from axonn_ext.ranks.grid import Grid


def make_grid(what: str, x: int, y: int, z: int, data: int | None) -> Grid:
    """Returns the grid of all processes. data: None for world_size / (x y z).

    Raises ValueError, which names `what` and the numbers, if the sizes do not fit the world size.
    """
    world_size = dist.get_world_size()
    if data is None:
        block = x * y * z
        if block < 1 or world_size % block:
            raise ValueError(
                f"{what}: x={x}, y={y}, z={z} take {block} processes, which must divide the "
                f"{world_size} of the job"
            )
        data = world_size // block
    try:
        return Grid(x=x, y=y, z=z, data=data)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
