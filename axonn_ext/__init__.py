"""Training of large networks with AxoNN's 4D parallel algorithm.

    grid = axonn_ext.Grid(x=2, y=2, z=2)         over torch.distributed's world
    axonn_ext.nn, axonn_ext.models               modules for a grid
    axonn_ext.ops                                fused matmul-with-collective ops for any model
    axonn_ext.warm_up, tuning                    measures which algorithm of an op is fastest
    axonn_ext.sync_gradients, clip_grad_norm_    between backward and the optimizer
    axonn_ext.gradient_norm                      the same norm, where a loss was scaled for fp16
    axonn_ext.overlap                            gathers and sums that run beside computation
    axonn_ext.pipeline                           stages that run what messages have arrived for
    axonn_ext.full_state_dict, ...               whole tensors, on any grid
    axonn_ext.from_pretrained, save_pretrained   Hugging Face's models, on any grid
    axonn_ext.add_adapters, merge_adapters       low-rank adapters (LoRA), in PEFT's format
    axonn_ext.generate, Sampling                 what follows a prompt, on any grid
    axonn_ext.parallelize, auto_parallelize      models that others wrote, on any grid
    axonn_ext.check_same_on_all_ranks            names what differs between the ranks of a job
    axonn_ext.global_mean                        a loss, as the mean over the rows of all ranks
    axonn_ext.checkpoint                         saves and loads, on any grid
    axonn_ext.trace_communication                what crosses ranks, in bytes
    axonn_ext.planner                            finds the fastest grid, and predicts its memory

Importing this package creates no process group and touches no device. It does not even import
Torch: a name is loaded when it is first used. All names but `planner` load `axonn_ext.ops` first,
which registers torch.ops.axonn.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from axonn_ext._version import __version__

if TYPE_CHECKING:
    from axonn_ext import checkpoint, models, nn, ops, overlap, pipeline, planner
    from axonn_ext.checkpoint.whole_tensors import (
        full_gradients,
        full_state_dict,
        load_full_state_dict,
    )
    from axonn_ext.kernels import tuning
    from axonn_ext.kernels.extension import release_workspaces, symmetric_memory_bytes_in_use
    from axonn_ext.kernels.tuning import warm_up
    from axonn_ext.models.generation import Sampling, generate
    from axonn_ext.models.parallelize import (
        auto_parallelize,
        check_same_on_all_ranks,
        global_mean,
        parallelize,
    )
    from axonn_ext.models.pretrained import (
        add_adapters,
        from_pretrained,
        load_adapter,
        merge_adapters,
        save_adapter,
        save_pretrained,
    )
    from axonn_ext.nn import initialize
    from axonn_ext.optim.gradients import clip_grad_norm_, gradient_norm, sync_gradients
    from axonn_ext.ranks import tracing
    from axonn_ext.ranks.grid import Grid
    from axonn_ext.ranks.tracing import CommunicationRecord, CommunicationTrace, trace_communication
    from axonn_ext.spec.grid import GridShape

__all__ = [
    "CommunicationRecord",
    "CommunicationTrace",
    "Grid",
    "GridShape",
    "Sampling",
    "__version__",
    "add_adapters",
    "auto_parallelize",
    "check_same_on_all_ranks",
    "checkpoint",
    "clip_grad_norm_",
    "from_pretrained",
    "full_gradients",
    "full_state_dict",
    "generate",
    "global_mean",
    "gradient_norm",
    "initialize",
    "load_adapter",
    "load_full_state_dict",
    "merge_adapters",
    "models",
    "nn",
    "ops",
    "overlap",
    "parallelize",
    "pipeline",
    "planner",
    "release_workspaces",
    "save_adapter",
    "save_pretrained",
    "symmetric_memory_bytes_in_use",
    "sync_gradients",
    "trace_communication",
    "tracing",
    "tuning",
    "warm_up",
]

_MODULES = {
    **{
        name: name
        for name in ("checkpoint", "models", "nn", "ops", "overlap", "pipeline", "planner")
    },
    "tracing": "ranks.tracing",
    "tuning": "kernels.tuning",
    "_library": "kernels.extension",  # by its earlier name, which scripts for GPUs import
}
_HOMES = {
    "CommunicationRecord": "ranks.tracing",
    "CommunicationTrace": "ranks.tracing",
    "Grid": "ranks.grid",
    "GridShape": "ranks.grid",
    "Sampling": "models.generation",
    "add_adapters": "models.pretrained",
    "auto_parallelize": "models.parallelize",
    "check_same_on_all_ranks": "models.parallelize",
    "clip_grad_norm_": "optim.gradients",
    "from_pretrained": "models.pretrained",
    "full_gradients": "checkpoint.whole_tensors",
    "full_state_dict": "checkpoint.whole_tensors",
    "generate": "models.generation",
    "global_mean": "models.parallelize",
    "gradient_norm": "optim.gradients",
    "initialize": "nn",
    "load_adapter": "models.pretrained",
    "load_full_state_dict": "checkpoint.whole_tensors",
    "merge_adapters": "models.pretrained",
    "parallelize": "models.parallelize",
    "release_workspaces": "kernels.extension",
    "save_adapter": "models.pretrained",
    "save_pretrained": "models.pretrained",
    "symmetric_memory_bytes_in_use": "kernels.extension",
    "sync_gradients": "optim.gradients",
    "trace_communication": "ranks.tracing",
    "warm_up": "kernels.tuning",
}


def __getattr__(name: str) -> Any:
    """Loads a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name != "planner":
        import_module("axonn_ext.ops")
    if name in _MODULES:
        return import_module(f"axonn_ext.{_MODULES[name]}")
    return getattr(import_module(f"axonn_ext.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
