"""The only module that reads environment variables.

AXONN_TIMEOUT_SECONDS         how long a rank waits for a peer when the ranks of a job meet, inside
                              an op on the CPU, in the first call of a group, while NCCL connects,
                              while ranks agree on the choice of "auto", or in a collective of
                              axonn_ext.overlap or of our NCCL communicators; from 0.001 to 2000000
                              (default 600)
AXONN_SYMMETRIC_MEMORY_BYTES  the address space reserved per rank and group for fused ops, and for
                              messages from one pipeline stage to another on the same host; memory
                              is allocated only when it is used; from 2^20 to 2^46
                              (default 34359738368, 32 GiB)
AXONN_CACHE_DIR               the folder that keeps measurements and the stamps of
                              `axonn-ext verify` between runs; empty: they are not kept
                              (default $XDG_CACHE_HOME/axonn_ext, else ~/.cache/axonn_ext)
AXONN_PRODUCT_KERNELS         kernels besides torch's own that a warm-up and `axonn-ext tune` may
                              measure, and Linears may use, for whole products on GPUs: any of
                              cublaslt, triton and fused_sm90, separated by commas; empty: none
                              (default cublaslt,triton, and fused_sm90 once `axonn-ext verify` has
                              found it correct on this machine's GPUs). Kernels that verify has
                              found wrong are not used
AXONN_DEBUG_COLLECTIVES       1: ranks compare, through the c10d store, each collective of the
                              orchestrator and of our NCCL communicators, and each op of ranks that
                              share no memory, before they issue it; an error names the rank that
                              differs (slow; default 0)
AXONN_DEBUG_TOKEN_IDS         1: on GPUs, as always on the CPU, token ids and labels outside the
                              vocabulary raise errors that name value, position and rank; the host
                              waits for each check (slow; default 0)
AXONN_FUSED_NCCL_SMS          the SMs of a GPU that algorithm="fused" leaves to NCCL, which then
                              gathers rows across hosts. It must be at least 8, plus the SMs of all
                              other collectives that may be under way at the same time; if it is too
                              small, ranks wait for each other until the timeout. On sm_90, set
                              NCCL_CGA_CLUSTER_SIZE=0 for these collectives, or any number may be
                              too small. It must be the same on all ranks (default 0: "fused" is
                              refused across hosts). AXONN_FUSED_FREE_SMS are left in addition
AXONN_FUSED_FREE_SMS          the SMs of a GPU that every GEMM of algorithm="fused" leaves free for
                              kernels that run at the same time, at most half of them. A GEMM that
                              finds some of its SMs occupied can take up to twice its time (default:
                              the SMs of the axonn_ext.overlap collectives under way, max_ctas or 24
                              each; none without any)
AXONN_EMULATED_LINKS          for CPU ranks of one host, the GB/s that a rank sends along each axis,
                              like x=2.0,y=1.0,z=0.5,data=0.25; collectives sleep until such a link
                              would be done, and nothing is fused along these axes (default empty:
                              links are not emulated)

Any other variable whose name begins with AXONN_ is refused, since it is most likely misspelt and
would silently be ignored. (Variables that setup.py reads are accepted.)

CUDA_DEVICE_MAX_CONNECTIONS=1 and CUDA_LAUNCH_BLOCKING=1 are read, too: with either, a CUDA graph
that captures a fused gather sends this rank's rows to its peers before the GEMM begins.

`launch_environment` reads the variables that torchrun sets (RANK, WORLD_SIZE, ...), and for a task
started by srun, those of Slurm. `cxx` reads CXX, as torch.compile does.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from axonn_ext.spec import slurm
from axonn_ext.spec.files.errors import MAX_SHOWN, hint

PREFIX = "AXONN_"
LAUNCHED_BY_US = "axonn-ext-"  # prefix of the run ids of jobs that `axonn-ext` starts; then its pid
LINK_AXES = ("x", "y", "z", "data")  # the axes along which collectives run
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 0.001, 2e6  # c10d counts milliseconds in 31 bits
MIN_SYMMETRIC_MEMORY_BYTES = 1 << 20
MAX_SYMMETRIC_MEMORY_BYTES = 1 << 46  # half of the address space that a process has
MIN_FUSED_NCCL_SMS = 8  # NcclChunks::kMostCtas
MAX_SMS = 1024  # more than any GPU has
MIN_LINK_GBPS, MAX_LINK_GBPS = 1e-6, 1e6
MAX_WORLD_SIZE = 1 << 24
PRODUCT_KERNELS = ("cublaslt", "triton", "fused_sm90")


class SettingsError(ValueError):
    """Environment variables are invalid; `problems` says what is wrong with each."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("\n".join(problems.values()))
        self.problems = dict(problems)


@dataclass(frozen=True)
class Settings:
    """Process-wide settings; the module's docstring explains their variables."""

    timeout_seconds: float = 600.0
    symmetric_memory_bytes: int = 32 << 30
    cache_dir: str = ""
    debug_collectives: bool = False
    debug_token_ids: bool = False
    fused_nccl_sms: int = 0
    fused_free_sms: int | None = None  # None: those of the collectives under way
    graphs_in_turn: bool = False  # whether CUDA graphs run their branches one after the other
    product_kernels: tuple[str, ...] | None = None  # None if the variable is not set
    emulated_links: Mapping[str, float] = field(default_factory=dict)  # GB/s by axis

    def shared(self) -> dict[str, str]:
        """Returns the values, by variable, that must be equal on all ranks of a job.

        These are all but AXONN_CACHE_DIR: each host has its own measurements.
        """
        return {name: _text_of(getattr(self, key)) for name, (key, _) in _READERS.items()}

    @property
    def measured_machine(self) -> str:
        """The machine file that `axonn-ext bench links` wrote; "" if none is kept."""
        return os.path.join(self.cache_dir, "machines", "this.toml") if self.cache_dir else ""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place in a job that torchrun, Slurm, or `axonn-ext` itself (by_us), gave this process.

    by_agent  torchrun or `axonn-ext` started this process, not, for example, Slurm
    launcher  the id of the process that started it, if that is `axonn-ext` itself
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    by_us: bool = False
    by_agent: bool = False
    launcher: int | None = None
    one_host: bool = False  # the job has one launcher

    @property
    def store_file(self) -> str:
        """The file in which the processes that `axonn-ext` started meet; "" under others."""
        return self.master_addr if self.by_us else ""


def load(environment: Mapping[str, str] = os.environ) -> Settings:
    """Reads the settings of this process.

    Raises: SettingsError, a ValueError that names the variables, for invalid values and for unknown
    names that begin with AXONN_.
    """
    values: dict[str, Any] = {
        "cache_dir": _cache_dir(environment),
        "graphs_in_turn": any(environment.get(name) == "1" for name in _GRAPHS_IN_TURN),
    }
    problems = {
        name: _unknown(name)
        for name in environment
        if name.startswith(PREFIX) and name not in (*_READERS, _CACHE_DIR, *_NOT_READ_HERE)
    }
    for name, (key, read) in _READERS.items():
        text = environment.get(name)
        if text is None or (not text and key != "product_kernels"):
            continue  # empty means the default, except for product kernels, where it means none
        try:
            values[key] = read(text)
        except ValueError as error:
            problems[name] = f"{name} must {error}"
    if problems:
        raise SettingsError(problems)
    return Settings(**values)


def launch_environment(
    environment: Mapping[str, str] = os.environ,
) -> LaunchEnvironment | None:
    """Reads the variables of torchrun or Slurm; returns None if neither started this process.

    Raises: SettingsError, which names the variables, for numbers that no launcher would set.
    """
    try:
        environment = slurm.as_torchrun(environment) | dict(environment)
    except ValueError as error:
        raise SettingsError({"SLURM": str(error)}) from None
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    problems: dict[str, str] = {}

    def whole(name: str, default: int, least: int, most: int) -> int:
        text = environment.get(name, str(default))
        if re.fullmatch(r"[0-9]{1,9}", text) and least <= int(text) <= most:
            return int(text)
        problems[name] = (
            f"{name} must be a whole number from {least} to {most}, as launchers set it, got "
            f"{text[:MAX_SHOWN]!r}"
        )
        return default

    world_size = whole("WORLD_SIZE", 1, 1, MAX_WORLD_SIZE)
    most = MAX_WORLD_SIZE if problems else world_size
    local_world_size = whole("LOCAL_WORLD_SIZE", world_size, 1, most)
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    ours = re.match(rf"{LAUNCHED_BY_US}(\d+)", run_id)
    rank = whole("RANK", 0, 0, most - 1)
    here = LaunchEnvironment(
        rank=rank,
        local_rank=whole("LOCAL_RANK", rank % local_world_size, 0, most - 1),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=environment.get("MASTER_ADDR", ""),
        master_port=whole("MASTER_PORT", 29500, 0, 65535),
        by_us=run_id.startswith(LAUNCHED_BY_US),
        by_agent=bool(run_id),
        launcher=int(ours[1]) if ours else None,
        one_host=environment.get("GROUP_WORLD_SIZE") == "1",
    )
    if problems:
        raise SettingsError(problems)
    return here


def cxx(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the name of the C++ compiler that torch.compile calls for code on CPUs."""
    return environment.get("CXX", "g++")


def set_aside(names: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Removes variables from this process's environment, so that `load` uses their defaults."""
    for name in names:
        environment.pop(name, None)


def worker_environment(
    environment: Mapping[str, str] = os.environ, **changes: str
) -> dict[str, str]:
    """Returns the environment for processes in which this one tries something out.

    It is that of this process with these changes, and without its place in a job.
    """
    launched = (
        "SLURM_PROCID",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    kept = {name: value for name, value in environment.items() if name not in launched}
    return kept | changes


def let_ranks_share_gpus(rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets NCCL and torch's symmetric memory, both not yet started, accept several ranks on a GPU.

    NCCL refuses two ranks of one host on one device. If each rank has its own host name, NCCL takes
    the ranks for hosts connected by sockets. From NCCL 2.30 on, there is an option for this.
    Variables that the user has set are not changed.
    """
    environment.setdefault("NCCL_HOSTID", f"axonn-ext-rank-{rank}")
    environment.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    environment.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def take_place(
    place: Mapping[str, str], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Gives this process a place in a job, in the variables of torchrun."""
    environment.update(place)


def take_rank(rank: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Gives this process another rank than torchrun or Slurm did."""
    take_place({**slurm.as_torchrun(environment), **environment, "RANK": str(rank)}, environment)


def prepare_connections(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets gloo, which has not started, connect two ranks when they first need each other.

    Where the job has one host, gloo and NCCL listen on loopback: they do not authenticate peers.
    Variables that the user has set are not changed.
    """
    environment.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    launch = launch_environment(environment)
    if launch is None or launch.one_host:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")


def gloo_interfaces(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the interfaces on which gloo listens; none: at the address of the host's name."""
    return [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def _cache_dir(environment: Mapping[str, str]) -> str:
    """Returns an absolute path, since processes may change their working directory; "" for none."""
    chosen = environment.get(_CACHE_DIR)
    if chosen is not None:
        return os.path.abspath(chosen) if chosen else ""
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the standard says to ignore a relative one
        home = environment.get("HOME", "")
        base = os.path.join(home, ".cache") if os.path.isabs(home) else ""
    return os.path.join(base, "axonn_ext") if base else ""


# --- Each function reads one variable, or raises ValueError, which says what it must be -----------


def _expected(what: str, got: str) -> ValueError:
    return ValueError(f"{what}, got {got[:MAX_SHOWN]!r}")


def _number(
    expected: str, kind: Callable[[float], Any], accepts: Callable[[float], bool]
) -> Callable[[str], Any]:
    """Returns a reader of numbers. expected: a description of those that it accepts."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if accepts(value := float(text)):
                return kind(value)
        raise _expected(f"be {expected}", text)

    return read


def _product_kernels(text: str) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    for kind in kinds:
        if kind not in PRODUCT_KERNELS:
            raise _expected(f"list {', '.join(PRODUCT_KERNELS)} or nothing", kind)
    return kinds


def _links(text: str) -> dict[str, float]:
    """Returns {axis: GB/s}."""
    links: dict[str, float] = {}
    expected = (
        f"read like x=2.0,y=1.0 (GB/s, from {MIN_LINK_GBPS:g} to {MAX_LINK_GBPS:g}; axes "
        f"{', '.join(LINK_AXES)}, each once)"
    )
    for item in filter(None, text.split(",")):
        axis, _, number = (part.strip() for part in item.partition("="))
        try:
            speed = float(number)
        except ValueError:
            speed = math.nan
        in_range = MIN_LINK_GBPS <= speed <= MAX_LINK_GBPS  # False for NaN
        if axis not in LINK_AXES or axis in links or not in_range:
            raise _expected(expected, item)
        links[axis] = speed
    return links


def _text_of(value: Any) -> str:
    """Returns a value in the form of its variable."""
    if value is None:
        return "not set"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={number:.15g}" for key, number in value.items()) or "not set"
    if isinstance(value, tuple):
        return ",".join(value) or "empty"
    return f"{value:.15g}" if isinstance(value, float) else str(int(value))


def _unknown(name: str) -> str:
    known = [*_READERS, _CACHE_DIR]
    return (
        f"{name[:MAX_SHOWN]} is not a setting{hint(name, known)}; known: {', '.join(sorted(known))}"
    )


_CACHE_DIR = "AXONN_CACHE_DIR"
_SWITCH = _number("0 or 1", bool, lambda n: n in (0, 1))
_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "AXONN_TIMEOUT_SECONDS": ("timeout_seconds", _number(
        f"a number of seconds from {MIN_TIMEOUT_SECONDS:g} to {MAX_TIMEOUT_SECONDS:.0f}", float,
        lambda n: MIN_TIMEOUT_SECONDS <= n <= MAX_TIMEOUT_SECONDS,
    )),
    "AXONN_SYMMETRIC_MEMORY_BYTES": ("symmetric_memory_bytes", _number(
        f"a number of bytes from {MIN_SYMMETRIC_MEMORY_BYTES} to {MAX_SYMMETRIC_MEMORY_BYTES}", int,
        lambda n: MIN_SYMMETRIC_MEMORY_BYTES <= n <= MAX_SYMMETRIC_MEMORY_BYTES,
    )),
    "AXONN_DEBUG_COLLECTIVES": ("debug_collectives", _SWITCH),
    "AXONN_DEBUG_TOKEN_IDS": ("debug_token_ids", _SWITCH),
    "AXONN_FUSED_NCCL_SMS": ("fused_nccl_sms", _number(
        f"0 or a whole number from {MIN_FUSED_NCCL_SMS} to {MAX_SMS}", int,
        lambda n: n in (0, *range(MIN_FUSED_NCCL_SMS, MAX_SMS + 1)),
    )),
    "AXONN_FUSED_FREE_SMS": ("fused_free_sms", _number(
        f"a whole number from 0 to {MAX_SMS}", int, lambda n: n in range(MAX_SMS + 1)
    )),
    "AXONN_PRODUCT_KERNELS": ("product_kernels", _product_kernels),
    "AXONN_EMULATED_LINKS": ("emulated_links", _links),
}  # fmt: skip
_GRAPHS_IN_TURN = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING")
_NOT_READ_HERE = ("AXONN_CUDA", "AXONN_CUDA_REASON", "AXONN_DEBUG_INFO")  # setup.py reads them
