"""Training of large networks with AxoNN's 4D parallel algorithm.

    grid = axonn_ext.Grid(x=2, y=2, z=2)         over torch.distributed's world
    axonn_ext.nn, axonn_ext.models               modules for a grid
    axonn_ext.ops                                fused matmul-with-collective ops for any model
    axonn_ext.sync_gradients, clip_grad_norm_    between backward and the optimizer
    axonn_ext.full_state_dict, ...               whole tensors, on any grid

Importing this starts nothing: no process group, no device.
"""

from axonn_ext import models, nn, ops
from axonn_ext._library import symmetric_memory_bytes_in_use
from axonn_ext.gradients import clip_grad_norm_, sync_gradients
from axonn_ext.grid import Grid, GridShape
from axonn_ext.nn import initialize
from axonn_ext.state import full_gradients, full_state_dict, load_full_state_dict

__version__ = "0.1.0"

__all__ = [
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
    "symmetric_memory_bytes_in_use",
    "sync_gradients",
]
