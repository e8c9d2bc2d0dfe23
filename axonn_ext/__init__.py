"""Training of large networks with AxoNN's 4D parallel algorithm.

    grid = axonn_ext.Grid(x=2, y=2, z=2)         over torch.distributed's world
    axonn_ext.nn, axonn_ext.models               modules for a grid
    axonn_ext.ops                                fused matmul-with-collective ops for any model
    axonn_ext.warm_up, tuning                    measures which algorithm of an op is fastest
    axonn_ext.sync_gradients, clip_grad_norm_    between backward and the optimizer
    axonn_ext.gradient_norm                      the same norm, where a loss was scaled for fp16
    axonn_ext.overlap                            gathers and sums during computation
    axonn_ext.pipeline                           stages that take messages as they arrive
    axonn_ext.full_state_dict, ...               whole tensors, on any grid
    axonn_ext.from_pretrained, save_pretrained   Hugging Face's models, on any grid
    axonn_ext.add_adapters, merge_adapters       low-rank adapters (LoRA), in PEFT's format
    axonn_ext.generate, Sampling                 what follows a prompt, on any grid
    axonn_ext.parallelize, auto_parallelize      models that others wrote, on any grid
    axonn_ext.plan_of                            how parallelize has split one
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

from axonn_ext._version import __version__ as __version__
from axonn_ext.spec import lazy_names

if TYPE_CHECKING:
    from axonn_ext import checkpoint as checkpoint
    from axonn_ext import models as models
    from axonn_ext import nn as nn
    from axonn_ext import ops as ops
    from axonn_ext import overlap as overlap
    from axonn_ext import pipeline as pipeline
    from axonn_ext import planner as planner
    from axonn_ext.checkpoint.whole_tensors import full_gradients as full_gradients
    from axonn_ext.checkpoint.whole_tensors import full_state_dict as full_state_dict
    from axonn_ext.checkpoint.whole_tensors import load_full_state_dict as load_full_state_dict
    from axonn_ext.kernels import tuning as tuning
    from axonn_ext.kernels.extension import release_workspaces as release_workspaces
    from axonn_ext.kernels.extension import (
        symmetric_memory_bytes_in_use as symmetric_memory_bytes_in_use,
    )
    from axonn_ext.kernels.tuning import warm_up as warm_up
    from axonn_ext.models.generation import Sampling as Sampling
    from axonn_ext.models.generation import generate as generate
    from axonn_ext.models.parallelize import auto_parallelize as auto_parallelize
    from axonn_ext.models.parallelize import check_same_on_all_ranks as check_same_on_all_ranks
    from axonn_ext.models.parallelize import global_mean as global_mean
    from axonn_ext.models.parallelize import parallelize as parallelize
    from axonn_ext.models.parallelize import plan_of as plan_of
    from axonn_ext.models.pretrained import add_adapters as add_adapters
    from axonn_ext.models.pretrained import from_pretrained as from_pretrained
    from axonn_ext.models.pretrained import load_adapter as load_adapter
    from axonn_ext.models.pretrained import merge_adapters as merge_adapters
    from axonn_ext.models.pretrained import save_adapter as save_adapter
    from axonn_ext.models.pretrained import save_pretrained as save_pretrained
    from axonn_ext.nn import initialize as initialize
    from axonn_ext.optim.gradients import clip_grad_norm_ as clip_grad_norm_
    from axonn_ext.optim.gradients import gradient_norm as gradient_norm
    from axonn_ext.optim.gradients import sync_gradients as sync_gradients
    from axonn_ext.ranks import tracing as tracing
    from axonn_ext.ranks.grid import Grid as Grid
    from axonn_ext.ranks.tracing import CommunicationRecord as CommunicationRecord
    from axonn_ext.ranks.tracing import CommunicationTrace as CommunicationTrace
    from axonn_ext.ranks.tracing import trace_communication as trace_communication
    from axonn_ext.spec.grid import GridShape as GridShape
else:
    _OWN = ("checkpoint", "models", "nn", "ops", "overlap", "pipeline", "planner")
    _MODULES = {
        **{name: f".{name}" for name in _OWN},
        "tracing": ".ranks.tracing",
        "tuning": ".kernels.tuning",
        "_library": ".kernels.extension",  # by its earlier name, for scripts for GPUs
    }
    _load, __dir__, _NAMES = lazy_names(__name__, {
        ".checkpoint.whole_tensors": "full_gradients full_state_dict load_full_state_dict",
        ".kernels.extension": "release_workspaces symmetric_memory_bytes_in_use",
        ".kernels.tuning": "warm_up",
        ".models.generation": "Sampling generate",
        ".models.parallelize": (
            "auto_parallelize check_same_on_all_ranks global_mean parallelize plan_of"
        ),
        ".models.pretrained": (
            "add_adapters from_pretrained load_adapter merge_adapters save_adapter "
            "save_pretrained"
        ),
        ".nn": "initialize",
        ".optim.gradients": "clip_grad_norm_ gradient_norm sync_gradients",
        ".ranks.grid": "Grid",
        ".ranks.tracing": "CommunicationRecord CommunicationTrace trace_communication",
        ".spec.grid": "GridShape",
    })  # fmt: skip
    __all__ = sorted({"__version__", *_NAMES, *_MODULES} - {"_library"})

    def __getattr__(name: str) -> Any:
        """Loads a public name, and before all but `planner` the ops."""
        if name != "planner" and (name in _NAMES or name in _MODULES):
            import_module("axonn_ext.ops")
        return import_module(_MODULES[name], __name__) if name in _MODULES else _load(name)
