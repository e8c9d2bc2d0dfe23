"""The operations per second of a run, also as a fraction of its machine's peak."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_ext.spec.files.errors import InputError
from axonn_ext.spec.flops import hardware_flops_per_token
from axonn_ext.spec.model import ModelConfig
from axonn_ext.spec.recompute import Recomputation
from axonn_ext.spec.stages import Stages
from axonn_ext.train.config import Config

_TERA = 1e12


@dataclass(frozen=True)
class Speed:
    """The operations per second of a run, in 10**12, and as a fraction of the machine's peak.

    tflops               model flops: without recomputation, and with half of the causal attention
    hardware_tflops      the same plus the forward passes that recomputation repeats
    peak_fraction        tflops over the peak of all processes; None if the machine is unknown
    whole_peak_fraction  the same with all of attention counted, as in Megatron-LM
    """

    tflops: float
    hardware_tflops: float
    peak_fraction: float | None
    whole_peak_fraction: float | None


@dataclass(frozen=True)
class Rates:
    """The operations per token, and the total peak of all processes in flop/s, if known."""

    per_token: int
    whole_per_token: int
    hardware_per_token: int
    peak_flops: float | None

    @classmethod
    def of(
        cls, model: ModelConfig, recomputation: Recomputation, stages: Stages,
        peak_flops: float | None,
    ) -> Rates:  # fmt: skip
        return cls(
            model.flops_per_token(), model.flops_per_token(whole_attention=True),
            hardware_flops_per_token(model, recomputation, stages), peak_flops,
        )  # fmt: skip

    def speed(self, tokens_per_s: float) -> Speed:
        peak = self.peak_flops
        return Speed(
            tokens_per_s * self.per_token / _TERA,
            tokens_per_s * self.hardware_per_token / _TERA,
            None if peak is None else tokens_per_s * self.per_token / peak,
            None if peak is None else tokens_per_s * self.whole_per_token / peak,
        )


def peak_flops_of(config: Config, world_size: int) -> float | None:
    """Returns the total peak of `world_size` processes on train.machine; None if that is empty.

    Raises ValueError, which names the key, if the machine is unknown or has no peak for the run's
    dtype.
    """
    name, dtype = config.train.machine, config.train.dtype
    if not name:
        return None
    from axonn_ext.calibrate.find_machine import find_machine  # loads a part of the planner

    try:
        machine = find_machine(name)
    except InputError as error:
        raise ValueError(f"train.machine: {error}") from None
    if dtype not in machine.peak_flops:
        known = ", ".join(machine.peak_flops)
        raise ValueError(
            f"train.machine: expected one with a peak for train.dtype {dtype}, got {name}, which "
            f"has {known}"
        )
    return machine.peak_flops[dtype] * world_size
