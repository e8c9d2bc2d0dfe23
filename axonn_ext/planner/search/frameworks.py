"""The choices of other frameworks, so that a plan shows what ours gains over them.

A framework is planned with our own model of kernels, links and memory. Only the grids, layouts,
schedules and options that it does not have are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from axonn_ext.planner.errors import PlannerError
from axonn_ext.planner.estimate import Estimate
from axonn_ext.planner.search.axes import AxisRules
from axonn_ext.planner.search.fastest import plan
from axonn_ext.planner.search.optimizers import optimizers_of, tried_offloads, tried_zeros
from axonn_ext.planner.search.request import Request
from axonn_ext.spec.pipeline_options import PipelineOptions

_MOST_STAGES = 64  # of Megatron-LM's largest published model (arXiv:2104.04473, table 1)


@dataclass(frozen=True)
class Framework:
    """A framework.

    takes      the features that it shares with ours, in words
    source     the publication that says so
    axes       the sizes of axes that it has; pipelines: its schedules, none if it has no stages
    zero       the values of `zero` that are tried; offloads: those of `offload`
    fixed      options of which it has only one value; see Request
    whole_z    z is all ranks
    """

    takes: str
    source: str
    axes: str
    pipelines: tuple[PipelineOptions, ...] = ()
    zero: tuple[int, ...] = (0,)
    offloads: tuple[str, ...] = ("none",)
    fixed: Mapping[str, object] = field(default_factory=dict)
    whole_z: bool = False

    def request(self, ours: Request) -> Request:
        """Returns the search among all that the framework has.

        ours: gives model, machine, GPUs, batch and the options that the user has fixed. Its axes,
        layouts, schedules, ZeRO and offload are not used.
        """
        axes = f"{self.axes},z={ours.num_ranks}" if self.whole_z else self.axes
        offloads = [o for o in self.offloads if o in tried_offloads(ours.machine)]
        return replace(
            ours, axes=AxisRules.parse(axes), layouts=("sharded",), top=1,
            max_pipe=_MOST_STAGES if self.pipelines else 1,
            pipelines=self.pipelines or ours.pipelines, fixed={**ours.fixed, **self.fixed},
            optimizers=optimizers_of(ours.optimizers[0], self.zero, offloads),
        )  # fmt: skip


FRAMEWORKS: Mapping[str, Framework] = MappingProxyType(
    {
        "ddp": Framework(
            takes="only data parallelism, gradients summed in buckets during backward",
            source="Li et al. 2020, arXiv:2006.15704",
            axes="x=1,y=1,z=1",
        ),
        "zero3": Framework(
            takes="parameters, gradients and AdamW's state sharded over all GPUs; parameters are "
            "gathered for each use",
            source="Rajbhandari et al. 2020, arXiv:1910.02054, section 5 (stage 3)",
            axes="x=1,y=1,data=1",
            fixed={"reshard_after_forward": True},
            whole_z=True,
        ),
        "fsdp": Framework(
            takes="the same over all GPUs, or over groups of GPUs that replicate each other; "
            "parameters gathered for each use, or kept from forward to backward",
            source="Zhao et al. 2023, arXiv:2304.11277, sections 3.2 and 3.3; PyTorch's "
            "documentation of fully_shard",
            axes="x=1,y=1",
        ),
        "megatron": Framework(
            takes="tensor and sequence parallelism inside a node, pipeline stages by 1F1B, also "
            "interleaved with 2 chunks, data parallelism, a distributed optimizer (zero 1)",
            source="Narayanan et al. 2021, arXiv:2104.04473, sections 2 and 3.2 (takeaway 1: "
            "inside a node); Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2 (inputs are "
            "gathered again in backward); Megatron-LM's --use-distributed-optimizer",
            axes="x=node,y=1,z=1",
            pipelines=(PipelineOptions("1f1b"), PipelineOptions("interleaved", chunks=2)),
            zero=(0, 1),
            fixed={"save_gathered": False},
        ),
        "axonn2021": Framework(
            takes="message-driven pipeline stages with as many micro-batches in flight as stages, "
            "weight gradients in backward, data parallelism, AdamW's state on the device or the "
            "host",
            source="Singh and Bhatele 2021, arXiv:2110.13005, sections III and V",
            axes="x=1,y=1,z=1",
            pipelines=(PipelineOptions("message_driven", in_flight=1, defer_weights=False),),
            offloads=("none", "cpu"),
        ),
    }
)


def plan_with_all(ours: Request, found: Sequence[Estimate]) -> Estimate:
    """Returns our fastest plan, given all that the frameworks have: stages, ZeRO and offload.

    found: known possible plans, such as those of frameworks. The result is never slower than these.
    Raises PlannerError, which says what would fit, if nothing fits and nothing is known.
    """
    own = ours.optimizers[0]
    zeros, offloads = tried_zeros(own.zero), tried_offloads(ours.machine)
    tried = dict.fromkeys((*ours.optimizers, *optimizers_of(own, zeros, offloads)))
    request = replace(
        ours, axes=AxisRules(), top=1, max_pipe=max(ours.max_pipe, _MOST_STAGES),
        optimizers=tuple(tried),
    )  # fmt: skip
    try:
        best = plan(request).configs
    except PlannerError:
        if not found:
            raise
        best = ()
    return min((*best, *found), key=lambda e: e.step_time_s)


def plan_framework(framework: Framework, ours: Request) -> Estimate:
    """Returns the fastest configuration that the framework can run.

    Raises PlannerError, which says what would fit, if none fits.
    """
    return plan(framework.request(ours)).configs[0]
