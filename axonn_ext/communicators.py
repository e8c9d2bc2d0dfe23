"""Makes NCCL communicators for the axes of a grid on CUDA, without c10d."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from axonn_ext import _library, settings
from axonn_ext.grid import Grid

if TYPE_CHECKING:
    from axonn_ext._cuda import CommunicatorGrid

AXES = ("x", "y", "z", "data")


def connect(
    grid: Grid,
    device: torch.device | int,
    *,
    min_ctas: int = 0,
    max_ctas: int = 0,
    zero_cta: bool = False,
) -> CommunicatorGrid:
    """Returns an NCCL communicator with its own stream for each axis of more than one rank.

    All ranks must call this. Collectives are ordered with the current stream by events, and a
    thread watches them: one that fails, or takes longer than AXONN_TIMEOUT_SECONDS, makes every
    rank abort all communicators. With AXONN_DEBUG_COLLECTIVES=1 every collective is compared with
    those of the peers before it is issued.

    device              this rank's GPU
    min_ctas, max_ctas  how many CTAs, and thus SMs, a collective uses; 0: NCCL chooses
    zero_cta            use copy engines instead of SMs where NCCL can, on registered windows

    Raises: RuntimeError if the CUDA parts are not built, or if a rank does not call this in time;
    ValueError for a device that is not a GPU, or limits that contradict each other.
    """
    device = torch.device("cuda", device) if isinstance(device, int) else device
    if device.type != "cuda" or device.index is None:
        raise ValueError(f"device must be a GPU with its index, such as cuda:0, got {device}")
    if min_ctas < 0 or max_ctas < 0 or 0 < max_ctas < min_ctas:
        raise ValueError(
            f"min_ctas and max_ctas must be 0 or in ascending order, got {min_ctas} and {max_ctas}"
        )
    if _library.cuda is None:
        raise RuntimeError(
            "this build of axonn_ext has no CUDA parts, which its NCCL communicators are among; "
            "axonn-ext doctor says what is missing"
        )
    world = dist.group.WORLD
    assert world is not None, "a Grid needs an initialised process group"
    loaded = settings.load()
    members = [(axis, dist.get_process_group_ranks(grid.group(axis))) for axis in AXES]
    communicators: CommunicatorGrid = _library.cuda.CommunicatorGrid(
        world.group_name,
        [(axis, ranks) for axis, ranks in members if len(ranks) > 1],
        device=device.index,
        min_ctas=min_ctas,
        max_ctas=max_ctas,
        zero_cta=zero_cta,
        compare_calls=loaded.debug_collectives,
        timeout_seconds=loaded.timeout_seconds,
    )
    return communicators
