"""Separate NCCL communicators for the axes of a grid on CUDA, in addition to c10d's groups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from axonn_ext.kernels import extension
from axonn_ext.ranks.meeting import name_ranks, said_by_all
from axonn_ext.spec import settings

if TYPE_CHECKING:
    from axonn_ext._cuda import CommunicatorGrid

MIN_NCCL = (2, 18)  # the first that can split a communicator


class Communicators:
    """The communicators of one grid: made on first use, and then kept.

    axes: the ranks along each axis of several ranks, in the order of the axis. All ranks have the
        same axes in the same order, and this rank is among the ranks of each.
    library: the compiled module; None in a build without CUDA parts. Tests pass a substitute.
    """

    def __init__(self, axes: Mapping[str, Sequence[int]], *, library: Any = extension.cuda) -> None:
        self._axes = {axis: list(ranks) for axis, ranks in axes.items()}
        self._library = library
        self._made: dict[int, CommunicatorGrid | str] = {}  # by max_ctas; or why there are none

    def get(
        self, device: torch.device, *, required: bool = False, max_ctas: int = 0
    ) -> CommunicatorGrid | None:
        """Returns an NCCL communicator, with its own stream, for each axis of several ranks.

        Returns None, on all ranks, if some rank cannot have them and they are not `required`, or if
        no axis has several ranks.

        All ranks must make the same calls in the same order; the first time, they meet in c10d's
        store and in NCCL. The communicators are split from one over all ranks.

        `.axis("z")` of the result has `all_gather(output, input)`, `all_to_all` and `all_reduce` (a
        sum). A collective begins after the work already enqueued on the current stream, and returns
        work whose `wait()` makes the current stream wait, never the host. A watcher thread handles
        failures: after one, or after a collective that takes longer than AXONN_TIMEOUT_SECONDS,
        every rank aborts all communicators of the grid, and their next calls raise RuntimeError
        with the axis, the collective and the ranks that are behind; so does `check()`.

        device    this rank's GPU; the same in all calls
        required  whether to raise instead of returning None
        max_ctas  the most CTAs, and thus SMs, that a collective uses; 0: NCCL chooses

        Raises:
            ValueError: the device is not a GPU with its index, or max_ctas is negative.
            RuntimeError: they are required but some rank cannot have them; ranks ask for different
                ones; a rank does not make the call within AXONN_TIMEOUT_SECONDS.
        """
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"device must be a GPU with its index, such as cuda:0, got {device}")
        if max_ctas < 0:
            raise ValueError(f"max_ctas must be >= 0, got {max_ctas}")
        if not self._axes:
            return None
        if max_ctas not in self._made:
            self._made[max_ctas] = self._make(device, required, max_ctas)
        made = self._made[max_ctas]
        if not isinstance(made, str):
            return made
        if required:
            raise RuntimeError(f"{made}; axonn-ext doctor says more")
        return None

    def close(self) -> None:
        """Ends the communicators after all their collectives. All ranks must call this.

        Without it they are aborted with the process. Raises RuntimeError if one has failed, or if
        a rank does not make the call within AXONN_TIMEOUT_SECONDS.
        """
        for made in self._made.values():
            if not isinstance(made, str):
                made.close()
        self._made.clear()

    def _make(self, device: torch.device, required: bool, max_ctas: int) -> CommunicatorGrid | str:
        """Makes the communicators; returns why not, on all ranks, if some rank cannot have them."""
        world, loaded = dist.group.WORLD, settings.load()
        assert world is not None, "a Grid needs an initialised process group"
        asks = f"max_ctas={max_ctas}" + (", required" if required else "")
        said = said_by_all(
            PrefixStore("axonn/communicators", world.get_group_store()), world.rank(),
            range(world.size()), json.dumps([asks, why_none(self._library)]),
            what="NCCL communicators",
        )  # fmt: skip
        asked: dict[str, list[int]] = {}
        missing: dict[str, list[int]] = {}
        for text, ranks in said:
            if text is None:
                missing["for other reasons"] = ranks
                continue
            theirs, problem = json.loads(text)
            asked[theirs] = sorted(asked.get(theirs, []) + ranks)
            if problem:
                missing[problem] = sorted(missing.get(problem, []) + ranks)
        if len(asked) > 1:
            raise RuntimeError(
                "NCCL communicators: all ranks must ask for the same ones, got "
                + "; ".join(f"{theirs} on {name_ranks(ranks)}" for theirs, ranks in asked.items())
            )
        if missing:
            return "own NCCL communicators were requested, but are not available: " + "; ".join(
                f"{name_ranks(ranks)}: {problem}" for problem, ranks in missing.items()
            )
        made: CommunicatorGrid = self._library.CommunicatorGrid(
            world.group_name,
            list(self._axes.items()),
            device=device.index,
            max_ctas=max_ctas,
            compare_calls=loaded.debug_collectives,
            timeout_seconds=loaded.timeout_seconds,
        )
        return made


def why_none(library: Any) -> str:
    """Returns why this process cannot have separate communicators; "" if it can.

    library: the compiled module, or None.
    """
    if library is None:
        return "this build of axonn_ext has no CUDA parts"
    version = str(library.build_info()["nccl"])
    if tuple(int(part) for part in version.split(".") if part)[:2] < MIN_NCCL:
        needed = ".".join(map(str, MIN_NCCL))
        return f"NCCL {version or 'of unknown version'} is loaded, and {needed} is the oldest"
    return ""
