"""The only place that reads environment variables.

AXONN_TIMEOUT_SECONDS         how long a rank waits for a peer inside a fused op, or for a
                              collective of axonn_ext.overlap or of our NCCL communicators
                              (default 600)
AXONN_SYMMETRIC_MEMORY_BYTES  address space reserved per rank and group for fused ops; memory is
                              taken only as it is used (default 32 GiB)
AXONN_CACHE_DIR               where measurements are kept between runs; empty: nowhere (default
                              $XDG_CACHE_HOME/axonn_ext, else ~/.cache/axonn_ext)
AXONN_PRODUCT_KERNELS         kernels besides torch's own that a warm-up and `axonn-ext tune` may
                              measure, and Linears use, for whole products on GPUs: any of cublaslt,
                              triton and fused_sm90, separated by commas; empty: none (default
                              cublaslt,triton: fused_sm90 has not run on a GPU yet, and a kernel
                              that reads a wrong address, or hangs, ends the process)
AXONN_DEBUG_COLLECTIVES       1: ranks compare each collective of the orchestrator, and of our NCCL
                              communicators, before it is issued, through the c10d store; an error
                              names the rank that differs (slow; default 0)
AXONN_FUSED_NCCL_SMS          SMs of a GPU that algorithm="fused" leaves to NCCL, which then brings
                              the rows of gathers across hosts: at least 8, and as many more as
                              other collectives under way meanwhile take (on sm_90 set
                              NCCL_CGA_CLUSTER_SIZE=0 for these, or any number may be too small), or
                              ranks wait for each other until the time is up; the same on all ranks
                              (default 0: refused across hosts)
AXONN_EMULATED_LINKS          on CPUs of one host: how many GB/s a rank sends along each axis, as
                              x=2.0,y=1.0,z=0.5,data=0.25; collectives sleep until such a link
                              would be done, and nothing is fused along these axes (default empty:
                              links as they are)

What torchrun sets (RANK, WORLD_SIZE, ...) is read here, too, by `launch_environment`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

LINK_AXES = ("x", "y", "z", "data")  # along which collectives run
MIN_SYMMETRIC_MEMORY_BYTES = 1 << 20
MIN_FUSED_NCCL_SMS = 8  # NcclChunks::kMostCtas
PRODUCT_KERNELS = ("cublaslt", "triton", "fused_sm90")


@dataclass(frozen=True)
class Settings:
    """Process-wide settings; see the module's text for their meaning and variables."""

    timeout_seconds: float = 600.0
    symmetric_memory_bytes: int = 32 << 30
    cache_dir: str = ""
    debug_collectives: bool = False
    fused_nccl_sms: int = 0
    product_kernels: tuple[str, ...] = ("cublaslt", "triton")
    emulated_links: Mapping[str, float] = field(default_factory=dict)  # GB/s by axis

    @property
    def measured_machine(self) -> str:
        """The file of the machine that `axonn-ext bench links` measured; "": nothing is kept."""
        return os.path.join(self.cache_dir, "machines", "this.toml") if self.cache_dir else ""


@dataclass(frozen=True)
class LaunchEnvironment:
    """Where torchrun put this process."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int


def load(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings of this process. Raises ValueError, naming the variable, for a bad value."""
    defaults = Settings()
    timeout = _number(environment, "AXONN_TIMEOUT_SECONDS", defaults.timeout_seconds)
    reserve = _number(environment, "AXONN_SYMMETRIC_MEMORY_BYTES", defaults.symmetric_memory_bytes)
    if timeout <= 0:
        raise ValueError(f"AXONN_TIMEOUT_SECONDS must be positive, got {timeout}")
    if reserve < MIN_SYMMETRIC_MEMORY_BYTES:
        raise ValueError(
            f"AXONN_SYMMETRIC_MEMORY_BYTES must be at least {MIN_SYMMETRIC_MEMORY_BYTES}, "
            f"got {reserve:.0f}"
        )
    sms = _number(environment, "AXONN_FUSED_NCCL_SMS", defaults.fused_nccl_sms)
    if sms != int(sms) or 0 != sms < MIN_FUSED_NCCL_SMS:
        raise ValueError(
            f"AXONN_FUSED_NCCL_SMS must be 0 or a whole number from {MIN_FUSED_NCCL_SMS} on, "
            f"got {sms:g}"
        )
    return Settings(
        timeout_seconds=timeout,
        symmetric_memory_bytes=int(reserve),
        cache_dir=_cache_dir(environment),
        debug_collectives=_switch(environment, "AXONN_DEBUG_COLLECTIVES"),
        fused_nccl_sms=int(sms),
        product_kernels=_product_kernels(environment, defaults.product_kernels),
        emulated_links=_links(environment.get("AXONN_EMULATED_LINKS", "")),
    )


def launch_environment(
    environment: Mapping[str, str] = os.environ,
) -> LaunchEnvironment | None:
    """What torchrun told this process, or None if torchrun did not start it."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    world_size = int(environment["WORLD_SIZE"])
    return LaunchEnvironment(
        rank=int(environment["RANK"]),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", str(world_size))),
        master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(environment.get("MASTER_PORT", "29500")),
    )


def let_ranks_share_gpus(rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets NCCL and torch's symmetric memory, both not yet started, take several ranks on one GPU.

    NCCL refuses two ranks of one host on one device; with names of their own it takes ranks for
    hosts, joined by sockets. From NCCL 2.30 on it can be asked outright. What the user has set
    holds.
    """
    environment.setdefault("NCCL_HOSTID", f"axonn-ext-rank-{rank}")
    environment.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    environment.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def _cache_dir(environment: Mapping[str, str]) -> str:
    """An absolute path, for processes change their working directory; or "", for none."""
    chosen = environment.get("AXONN_CACHE_DIR")
    if chosen is not None:
        return os.path.abspath(chosen) if chosen else ""
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the standard says to ignore a relative one
        home = environment.get("HOME", "")
        base = os.path.join(home, ".cache") if os.path.isabs(home) else ""
    return os.path.join(base, "axonn_ext") if base else ""


def _product_kernels(environment: Mapping[str, str], default: tuple[str, ...]) -> tuple[str, ...]:
    text = environment.get("AXONN_PRODUCT_KERNELS")
    if text is None:
        return default
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    for kind in kinds:
        if kind not in PRODUCT_KERNELS:
            raise ValueError(
                f"AXONN_PRODUCT_KERNELS must list {', '.join(PRODUCT_KERNELS)} or nothing, "
                f"got {kind!r}"
            )
    return kinds


def _links(text: str) -> dict[str, float]:
    """GB/s by axis."""
    links: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        axis, _, number = (part.strip() for part in item.partition("="))
        try:
            speed = float(number)
        except ValueError:
            speed = math.nan
        if axis not in LINK_AXES or axis in links or not 0 < speed < math.inf:
            raise ValueError(
                "AXONN_EMULATED_LINKS must read like x=2.0,y=1.0 (GB/s, positive; axes "
                f"{', '.join(LINK_AXES)}, each once), got {item!r}"
            )
        links[axis] = speed
    return links


def _switch(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "") or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {text!r}")
    return value
