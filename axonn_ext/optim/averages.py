"""An exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from axonn_ext.optim.pieces import MasterPiece


class Averages:
    """The average of each piece's master, in `MasterPiece.ema`; it begins with the master.

    decay: `move` makes it decay * ema + (1 - decay) * master.
    """

    def __init__(self, pieces: Sequence[MasterPiece], decay: float) -> None:
        self._decay = decay
        by_place: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for piece in pieces:
            master = piece.master.detach()
            piece.ema = master.clone()
            by_place.setdefault((master.device, master.dtype), []).append((piece.ema, master))
        self._pairs = list(by_place.values())

    @torch.no_grad()
    def move(self) -> None:
        """Updates the averages after a step."""
        for pairs in self._pairs:
            averages, masters = [ema for ema, _ in pairs], [master for _, master in pairs]
            torch._foreach_lerp_(averages, masters, 1 - self._decay)

    @contextmanager
    def in_place(self, write_back: Callable[[], None]) -> Iterator[None]:
        """Swaps masters and averages in its body. write_back: sets the parameters to masters."""
        self._swap()
        write_back()
        yield
        self._swap()
        write_back()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, master in (pair for pairs in self._pairs for pair in pairs):
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)
