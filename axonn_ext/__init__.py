"""Training of large networks with AxoNN's 4D parallel algorithm.

    grid = axonn_ext.Grid(x=2, y=2, z=2)         over torch.distributed's world
    axonn_ext.nn, axonn_ext.models               modules for a grid
    axonn_ext.ops                                fused matmul-with-collective ops for any model
    axonn_ext.warm_up, tuning                    measures which algorithm of an op is fastest
    axonn_ext.sync_gradients, clip_grad_norm_    between backward and the optimizer
    axonn_ext.overlap                            gathers and sums that run beside computation
    axonn_ext.full_state_dict, ...               whole tensors, on any grid
    axonn_ext.trace_communication                what crosses ranks, in bytes

Importing this starts nothing: no process group, no device.
"""

from axonn_ext import (
    _product_kernels,  # noqa: F401  registers kernels
    models,
    nn,
    ops,
    overlap,
    tuning,
)
from axonn_ext._library import symmetric_memory_bytes_in_use
from axonn_ext._version import __version__
from axonn_ext.communication import (
    CommunicationRecord,
    CommunicationTrace,
    trace_communication,
)
from axonn_ext.gradients import clip_grad_norm_, sync_gradients
from axonn_ext.grid import Grid, GridShape
from axonn_ext.nn import initialize
from axonn_ext.state import full_gradients, full_state_dict, load_full_state_dict
from axonn_ext.tuning import warm_up

__all__ = [
    "CommunicationRecord",
    "CommunicationTrace",
    "Grid",
    "GridShape",
    "__version__",
    "clip_grad_norm_",
    "full_gradients",
    "full_state_dict",
    "initialize",
    "load_full_state_dict",
    "models",
    "nn",
    "ops",
    "overlap",
    "symmetric_memory_bytes_in_use",
    "sync_gradients",
    "trace_communication",
    "tuning",
    "warm_up",
]
