"""The optimizer, where its state is, and which ranks share it: options, and the resulting bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from axonn_ext.spec.files.keys import check, key

ZERO_STAGES = (0, 1, 2)  # data ranks divide nothing; AdamW's state; gradients, too
OFFLOADS = ("none", "cpu", "disk")  # where AdamW's state is, if not on the device
ADAMW, MUON = OPTIMIZERS = ("adamw", "muon")
NEWTON_SCHULZ_STEPS = 5  # iterations with which Muon orthogonalises a matrix
# How Muon adapts the learning rate to the shape of a matrix; as in torch.optim.Muon.
ADJUSTMENTS = ("match_rms_adamw", "original")
SCHEDULES = ("constant", "linear", "cosine", "wsd")  # of the learning rate, after warm-up
DECAY_TYPES = ("linear", "1-sqrt")  # of the end of wsd
# The number of elements that move between device and host at a time, or that ZeRO exchanges.
BUCKET_ELEMENTS = 16 << 20
_FP32 = 4  # bytes


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer, and where its masters and moments are.

    axonn_ext.optim.AdamW explains each option, and axonn_ext.optim.Muon the optimizer "muon".
    Raises ValueError, which names the option, for an illegal value.
    """

    zero: int = key(
        0, "ZeRO stage; 1 shards the optimizer's state over the data axis, 2 also gradients",
        expected="0, 1 or 2", accepts=ZERO_STAGES.__contains__,
    )  # fmt: skip
    offload: str = key(
        "none", "place of AdamW's state: none (the device), cpu (host memory) or disk",
        choices=OFFLOADS,
    )  # fmt: skip
    bucket_elements: int = key(
        BUCKET_ELEMENTS, "elements that ZeRO exchanges, or offload updates, at a time", minimum=1
    )
    name: str = key(
        ADAMW, "optimizer: adamw, or muon for the matrices of blocks and adamw for the rest",
        choices=OPTIMIZERS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        if self.is_muon and self.offload != "none":
            raise ValueError(
                f"offload must be none with optimizer muon, got {self.offload!r}: its matrices "
                "are multiplied on the device"
            )

    @property
    def is_muon(self) -> bool:
        """Whether Muon updates the matrices of blocks."""
        return self.name == MUON

    def num_parts(self, data: int) -> int:
        """Returns the number of data ranks that share masters and moments."""
        return data if self.zero else 1

    def bytes_of_state(self, width: int, data: int) -> int:
        """Returns the bytes per element of a parameter's masters and moments, over all data ranks.

        width: the bytes per element of the parameter. An fp32 parameter is its own master, unless
        ranks have parts of it, or the host has it. With Muon, it is that of a matrix in a block.
        """
        apart = width < _FP32 or self.num_parts(data) > 1 or self.offload != "none"
        moments = 1 if self.is_muon else 2
        return max(width, _FP32) * (moments + apart)


@dataclass(frozen=True)
class ParameterGroup:
    """Options of the parameters whose names match a pattern, in which * stands for any characters.

    Raises ValueError, which names the option, for an illegal value.
    """

    names: str = key(
        "", "patterns of parameter names, separated by commas, such as blocks.*.norm_*",
        expected="patterns of names, separated by commas",
        accepts=lambda names: all(each.strip() for each in names.split(",")),
    )  # fmt: skip
    lr_factor: float = key(1.0, "factor of the learning rate", minimum=0)
    weight_decay: float = key(
        -1.0, "weight decay, also of vectors; -1: as without the group",
        expected="-1 or a finite number >= 0", accepts=lambda decay: decay == -1 or decay >= 0,
    )  # fmt: skip
    frozen: bool = key(False, "do not train these parameters")

    def __post_init__(self) -> None:
        check(self)

    @property
    def patterns(self) -> list[str]:
        """The patterns."""
        return [pattern.strip() for pattern in self.names.split(",")]

    def matches(self, name: str) -> bool:
        """Whether a parameter's name matches a pattern."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def decay(self, weight_decay: float, *, is_matrix: bool) -> float:
        """Returns the weight decay, given that of matrices in no group."""
        if self.weight_decay >= 0:
            return self.weight_decay
        return weight_decay if is_matrix else 0.0


def group_of(name: str, groups: Sequence[ParameterGroup]) -> int:
    """Returns the index of the first group that matches a parameter's name; -1 if none does."""
    return next((i for i, group in enumerate(groups) if group.matches(name)), -1)
