"""Where AdamW's state is, and which ranks share it: options, and the resulting bytes."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.files.keys import check, key

ZERO_STAGES = (0, 1, 2)  # data ranks divide nothing; AdamW's state; gradients, too
OFFLOADS = ("none", "cpu", "disk")  # where AdamW's state is, if not on the device
# The number of elements that move between device and host at a time, or that ZeRO exchanges.
BUCKET_ELEMENTS = 16 << 20
_FP32 = 4  # bytes


@dataclass(frozen=True)
class OptimizerOptions:
    """Where AdamW's masters and moments are; axonn_ext.optim.AdamW explains each option.

    Raises ValueError, which names the option, for an illegal value.
    """

    zero: int = key(
        0, "ZeRO stage; 1 shards AdamW's state over the data axis, 2 also gradients",
        expected="0, 1 or 2", accepts=ZERO_STAGES.__contains__,
    )  # fmt: skip
    offload: str = key(
        "none", "place of AdamW's state: none (the device), cpu (host memory) or disk",
        choices=OFFLOADS,
    )  # fmt: skip
    bucket_elements: int = key(
        BUCKET_ELEMENTS, "elements that ZeRO exchanges, or offload updates, at a time", minimum=1
    )

    def __post_init__(self) -> None:
        check(self)

    def num_parts(self, data: int) -> int:
        """Returns the number of data ranks that share masters and moments."""
        return data if self.zero else 1

    def bytes_of_state(self, width: int, data: int) -> int:
        """Returns the bytes per element of a parameter's masters and moments, over all data ranks.

        width: the bytes per element of the parameter. An fp32 parameter is its own master, unless
        ranks have parts of it, or the host has it.
        """
        apart = width < _FP32 or self.num_parts(data) > 1 or self.offload != "none"
        return max(width, _FP32) * (3 if apart else 2)
