"""Says why "auto" leaves out our own kernels on this machine's GPUs, and which command helps.

On GPUs, "auto" measures the kernels of verified.LOCKED only after `axonn-ext verify` has found them
correct there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from axonn_ext.kernels import extension, host, verified
from axonn_ext.kernels.verified import FUSED, LOCKED, Stamp
from axonn_ext.spec import settings

VERIFY = "`axonn-ext verify` (3 minutes, once per machine)"
_UNLOCKS = f"{VERIFY} unlocks them"
MAX_RANKS = 8  # the most ranks that "fused" supports


@dataclass(frozen=True)
class Lock:
    """Why "auto" does not measure our kernels on GPUs of one model.

    remedy      what would unlock them; empty if nothing does
    unverified  whether `axonn-ext verify` would tell more, since no run has completed yet
    """

    reason: str
    remedy: str = ""
    unverified: bool = False

    def line(self) -> str:
        """Returns reason and remedy in one line."""
        return f"fused kernels: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


def find_locks(
    *, dtype: torch.dtype = torch.bfloat16, sizes: Sequence[int] | None = None
) -> dict[str, Lock]:
    """Returns the locks of the GPUs that torch sees, by model as the driver names it.

    There are none if everything is unlocked, without a GPU, and on ROCm, for which we have no
    kernels.

    dtype  that of the operands
    sizes  the sizes of the groups of ranks that call the ops; None: one group of all GPUs
    """
    if not (host.runs_cuda() and torch.cuda.is_available()):
        return {}
    count = torch.cuda.device_count()
    devices = {torch.cuda.get_device_name(n): torch.device("cuda", n) for n in range(count)}
    keys = extension.stamp_keys()
    if not keys:
        reason = f"not verified, since {host.DRIVER} does not name this GPU, as a stamp needs"
        return {gpu: Lock(reason) for gpu in devices}
    most = _most_together(count)
    asked = (most,) if sizes is None else sizes
    ranks = max((size for size in asked if size <= most), default=1)
    cache_dir = settings.load().cache_dir
    locks = {}
    for key in keys:
        # The driver's name of a GPU may differ from torch's. If there is one model, it is that one.
        device = devices.get(key.gpu, torch.device("cuda", 0) if len(keys) == 1 else None)
        if device is None:
            continue
        why = str(torch.ops.axonn._why_no_fused_here(device, dtype, 1, False))
        stamp = verified.find(cache_dir, key) if cache_dir else None
        lock = (
            Lock(f"none on {key.gpu}: {why}")
            if why
            else lock_of(key.gpu, stamp, kernels_of(device), ranks=ranks)
        )
        if lock is not None:
            locks[key.gpu] = lock
    return locks


def _most_together(num_gpus: int) -> int:
    """Returns the most ranks that "fused" can be verified with: 1 without peer access."""
    pairs = ((a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b)
    if not all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs):
        return 1
    return 1 << min(num_gpus, MAX_RANKS).bit_length() - 1


def kernels_of(device: torch.device) -> tuple[str, ...]:
    """Returns the kernels of LOCKED that the GPU has and that "auto" could measure."""
    assert extension.cuda is not None, "the ops have said that they can be fused"
    asked = settings.load().product_kernels
    has_sm90 = extension.cuda.gemm_source(device.index) == "cutlass"
    # If AXONN_PRODUCT_KERNELS is set, it decides about fused_sm90, whatever is verified.
    return LOCKED if has_sm90 and asked is None else (FUSED,)


def lock_of(gpu: str, stamp: Stamp | None, kernels: Sequence[str], *, ranks: int) -> Lock | None:
    """Returns the lock of a GPU model with that stamp; None if it has none.

    kernels  those that must be correct
    ranks    the number of GPUs on which they must be correct together
    """
    verdicts = stamp.verdicts if stamp else {}
    untold = stamp is None or not stamp.complete
    unknown = [name for name in kernels if name not in verdicts]
    wrong = [name for name in kernels if name in verdicts and not verdicts[name].passed]
    if unknown:
        names = f"{' and '.join(unknown)} " if len(unknown) < len(kernels) else ""
        reason = f"{names}not verified on {gpu}"
        if not settings.load().cache_dir:
            reason += ", and AXONN_CACHE_DIR is empty"
            return Lock(reason, f"with a folder there, {_UNLOCKS}")
        return Lock(reason, _UNLOCKS, untold)
    if wrong:
        reason = f"`axonn-ext verify` found {' and '.join(wrong)} wrong on {gpu}"
        return Lock(reason, "run it again after an update of axonn_ext, torch or the driver")
    if verdicts[FUSED].ranks < ranks:
        few = verdicts[FUSED].ranks
        reason = f"verified on {few} GPU{'s' if few > 1 else ''} of {ranks}"
        return Lock(reason, f"{_UNLOCKS} where it sees {ranks}", untold)
    return None
