"""A machine: how fast a rank computes, and how fast it sends along each axis of a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.job import WIDTHS, Options
from axonn_ext.planner.machines.attention import Attention, read_attention
from axonn_ext.planner.machines.links import Link, Links, read_links
from axonn_ext.planner.machines.overrides import changed
from axonn_ext.planner.machines.products import Products, read_products
from axonn_ext.planner.step.tasks import Collective, Matmul, Scores
from axonn_ext.spec.communicators import num_communicators
from axonn_ext.spec.files.errors import InputError, unknown
from axonn_ext.spec.files.files import is_file, read_toml
from axonn_ext.spec.files.tables import Table
from axonn_ext.spec.grid import GridShape

DEVICES = ("cuda", "cpu")
OWN_KEYS = {"name", "description", "source", "gpu"}  # not inherited from a base
_HOST_KEYS = ("host_link_bytes_per_s", "host_memory_bytes_per_s")
_TREE_RATE = 0.92  # of a ring's bandwidth (NCCL, src/graph/tuning.cc)
MEASURED = "this"  # the machine that `axonn-ext bench links` measured


@dataclass(frozen=True)
class Machine:
    """One machine; docs/planner.md describes its file.

    All numbers are those of one rank (a GPU, a GCD or a process):

    memory_bytes           all memory
    memory_reserved_bytes  the part that tensors cannot use (context, fragmentation)
    communicator_bytes     the buffers of one communicator
    memory_bytes_per_s     the bandwidth that elementwise work reaches
    peak_flops             dtype -> peak flop/s, to which "% of peak" refers
    attention              the rates of fused attention
    hidden_share           the largest share of a collective over x or y that a fused op hides
                           behind its product (0: one runs after the other)
    launch_s               the time to launch one operation
    ranks_per_core         the number of ranks that shared a CPU core while products were timed; 1
                           if each had at least one to itself
    slowdown               the computation time of a training step over the time of its kernels at
                           their best (power, gaps, unfused work); 1 if the file's numbers come from
                           whole steps
    host_link_bytes_per_s, host_memory_bytes_per_s
                           the rate in each direction between a GPU and its host, and a rank's share
                           of the host's memory bandwidth; None: unknown, so AdamW's state cannot be
                           offloaded
    straggler_share        how much slower than the mean the slowest of many ranks may be
    communication_units    how many of products.num_units collectives may take while they run
                           alongside computation
    watts                  a GPU's power limit, for the energy of a training run; None: unknown
    device                 "cuda", or "cpu", whose collectives sum low precision in fp32 copies
    """

    name: str
    description: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float]
    products: Products
    attention: Attention
    links: Links
    memory_reserved_bytes: int = 0
    communicator_bytes: int = 0
    hidden_share: float = 0.0
    launch_s: float = 0.0
    ranks_per_core: float = 1.0
    slowdown: float = 1.0
    host_link_bytes_per_s: float | None = None
    host_memory_bytes_per_s: float | None = None
    straggler_share: float = 0.0
    communication_units: int = 0
    watts: float | None = None
    device: str = "cuda"

    @property
    def max_ranks(self) -> int | None:
        """The number of ranks of the machine; None if there is no limit."""
        return self.links.max_ranks

    @property
    def usable_bytes(self) -> int:
        """The bytes of memory that tensors can use."""
        return self.memory_bytes - self.memory_reserved_bytes

    @property
    def auto_fuses(self) -> bool:
        """Whether algorithm "auto" may be modelled to choose "fused" on a GPU of the machine."""
        return self.device == "cuda" and self.hidden_share > 0

    def communicators_bytes(self, grid: GridShape, *options: Options) -> int:
        """Returns the bytes of a rank's communicator buffers, the most over these options."""
        return self.communicator_bytes * max(
            num_communicators(grid, overlap=each.overlap, wraps=each.pipeline.chunks > 1)
            for each in options
        )

    def memory_limit_on(self, grid: GridShape, *options: Options, fraction: float) -> int:
        """Returns how many bytes a rank may use: `fraction` of its memory without communicators.

        options: the limit holds for each of them.
        """
        return int((self.usable_bytes - self.communicators_bytes(grid, *options)) * fraction)

    def link(self, grid: GridShape, axis: str) -> Link:
        """Returns the link of the groups along an axis; ranks are laid out with x fastest.

        Raises PlannerError if the machine has too few ranks.
        """
        return self.links.of(grid.inner(axis), getattr(grid, axis), axis, grid.size)

    def wire(self, grid: GridShape, axis: str) -> str:
        """Returns the name of the links along an axis; axes with the same name share them."""
        return self.links.wire(grid.inner(axis), getattr(grid, axis), axis, grid.size)

    def collective_seconds(self, collective: Collective, link: Link, group_size: int) -> float:
        """Returns the time of a ring: bytes over bandwidth, plus a latency for each of its steps.

        If the link hides its latency, the longer of the two counts. A message between two ranks has
        one step. An all-reduce over nodes uses trees where they are faster.
        """
        kind = collective.kind
        if link.by_kind is not None:
            link = link.by_kind.get(kind, link)
        steps = 1 if kind == "send" else (group_size - 1) * (2 if kind == "all_reduce" else 1)
        sending, waiting = collective.num_bytes / link.bytes_per_s, steps * link.latency_s
        ring = max(sending, waiting) if link.hides_latency else sending + waiting
        if kind != "all_reduce" or link.trees_s is None:
            return ring
        # A ring sends (g - 1) / g of the bytes that a tree sends.
        by_trees = sending * group_size / (group_size - 1) / _TREE_RATE
        return min(ring, by_trees + link.trees_s)

    def matmul_seconds(self, matmul: Matmul, dtype: str) -> float:
        """Returns the time of one product. Raises KeyError for a dtype without peak_flops."""
        return self.slowdown * self.products.seconds(matmul, dtype)

    def attention_seconds(self, scores: Scores, dtype: str) -> float:
        if not scores.flops:
            return 0.0
        rate = self.attention.flops(dtype, scores.sequence_length, scores.head_dim)
        return self.slowdown * (scores.flops / rate + self.launch_s)

    def elementwise_seconds(self, num_bytes: int) -> float:
        if not num_bytes:
            return 0.0
        return self.slowdown * (num_bytes / self.memory_bytes_per_s + self.launch_s)

    def crossing_seconds(self, num_bytes: int) -> float:
        """Returns the time to copy bytes to the host or back; 0 on a CPU."""
        if self.device == "cpu":
            return 0.0
        self.check_offload()
        assert self.host_link_bytes_per_s is not None
        return num_bytes / self.host_link_bytes_per_s

    def host_seconds(self, num_bytes: int) -> float:
        """Returns the time the host takes to read and write bytes for one rank."""
        if self.device == "cpu":
            return self.elementwise_seconds(num_bytes)
        self.check_offload()
        assert self.host_memory_bytes_per_s is not None
        return num_bytes / self.host_memory_bytes_per_s

    @property
    def knows_host(self) -> bool:
        """Whether the file says how fast AdamW is on the host of a GPU."""
        return all(getattr(self, key) is not None for key in _HOST_KEYS)

    def check_offload(self) -> None:
        """Raises PlannerError if it is not known how fast AdamW is on the host of a GPU."""
        missing = [name for name in _HOST_KEYS if getattr(self, name) is None]
        if missing and self.device != "cpu":
            raise PlannerError(
                f"offload: machine {self.name} has no {' and no '.join(missing)} in its file, "
                "which AdamW on the host needs"
            )


def machine_names() -> list[str]:
    """Returns the names of the machines that come with the package."""
    names = (file.name for file in _folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_machine(
    name: str, *, this_file: Path | None = None, changes: Sequence[str] = ()
) -> Machine:
    """Returns the machine of that name, or of the TOML file at that path.

    this_file: the file of "this", the machine that `axonn-ext bench links` measured. changes: new
    values for keys of the file, see `overrides.changed`; they become part of the machine's name.

    Raises InputError for an unknown name, and for a mistake in a file, naming its key.
    """
    file = machine_file(name, this_file=this_file)
    return _read(file, MEASURED if name == MEASURED else Path(file.name).stem, changes)


def machine_file(name: str, *, this_file: Path | None = None) -> Path | Traversable:
    """Returns the file of a machine; see load_machine. Raises InputError for an unknown name."""
    if name.endswith(".toml") or "/" in name:
        return Path(name)
    if name == MEASURED:
        if this_file is None or not is_file(this_file):
            where = "" if this_file is None else f" (there is no {this_file})"
            raise InputError(
                f"machine {MEASURED!r} is not measured yet{where}: run axonn-ext bench links"
            )
        return this_file
    if name not in machine_names():
        raise unknown("machine", name, [*machine_names(), MEASURED])
    return _folder() / f"{name}.toml"


def _folder() -> Traversable:
    return resources.files("axonn_ext.planner.machines")


def _with_base(file: Path | Traversable) -> dict[str, Any]:
    """Returns the values of a file, completed from its base.

    Tables and arrays are inherited whole or not at all. Raises InputError for a base that is not a
    machine of the package.
    """
    own = read_toml(file)
    if "base" not in own:
        return own
    base = Table(own, "", str(file)).one_of("base", tuple(machine_names()))
    taken = _with_base(_folder() / f"{base}.toml")
    own = {key: value for key, value in own.items() if key != "base"}
    return {**{key: taken[key] for key in taken.keys() - OWN_KEYS}, **own}


def _read(file: Path | Traversable, default_name: str, changes: Sequence[str]) -> Machine:
    table = Table(changed(_with_base(file), changes), "", str(file))
    table.text("source")
    table.text("gpu", "")  # for calibrate.find_machine
    name = " with ".join((table.text("name", default_name), *changes))
    peak_flops = _peak_flops(table)
    dtypes = tuple(peak_flops)
    memory_bytes_per_s = table.positive("memory_bytes_per_s")
    launch_s = table.at_least("launch_s", 0, 0.0)
    machine = Machine(
        name=name,
        description=table.text("description"),
        device=table.one_of("device", DEVICES, "cuda"),
        memory_bytes=table.count("memory_bytes"),
        memory_bytes_per_s=memory_bytes_per_s,
        peak_flops=peak_flops,
        products=read_products(
            table.table("matmul"), peak_flops, memory_bytes_per_s=memory_bytes_per_s,
            launch_s=launch_s,
        ),
        attention=read_attention(table.table("attention"), dtypes),
        links=read_links(table, name),
        memory_reserved_bytes=table.count("memory_reserved_bytes", 0, least=0),
        communicator_bytes=table.count("communicator_bytes", 0, least=0),
        hidden_share=table.at_least("hidden_share", 0, 0.0, most=1),
        launch_s=launch_s,
        ranks_per_core=table.at_least("ranks_per_core", 1, 1.0),
        slowdown=table.at_least("slowdown", 1, 1.0),
        host_link_bytes_per_s=_optional(table, "host_link_bytes_per_s"),
        host_memory_bytes_per_s=_optional(table, "host_memory_bytes_per_s"),
        straggler_share=table.at_least("straggler_share", 0, 0.0, most=1),
        communication_units=table.count("communication_units", 0, least=0),
        watts=_optional(table, "watts"),
    )  # fmt: skip
    if machine.usable_bytes <= 0:
        raise table.error("memory_reserved_bytes", f"below memory_bytes={machine.memory_bytes}")
    if machine.communication_units >= max(machine.products.num_units, 2):
        raise table.error(
            "communication_units", f"below matmul.num_units={machine.products.num_units}"
        )
    table.finish()
    return machine


def _optional(table: Table, key: str) -> float | None:
    return table.positive(key) if table.has(key) else None


def _peak_flops(table: Table) -> dict[str, float]:
    peak_flops = table.table("peak_flops").numbers(tuple(WIDTHS))
    if not peak_flops:
        raise table.error("peak_flops", f"a table with at least one of {', '.join(WIDTHS)}")
    return peak_flops
