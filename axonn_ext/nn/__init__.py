"""Modules for a grid of ranks. The shapes in their docstrings are those of one rank.

`declare(module, grid, specs)` of axonn_ext.nn.sharded says how a grid treats the parameters of any
other module.
"""

from axonn_ext.nn.adapter import Adapter, Target
from axonn_ext.nn.attention import Attention
from axonn_ext.nn.deferred import DeferredWeightGradients, WeightGradients
from axonn_ext.nn.embedding import Embedding, PositionEmbedding
from axonn_ext.nn.goldfish import goldfish_labels
from axonn_ext.nn.linear import Linear
from axonn_ext.nn.loss import CrossEntropy
from axonn_ext.nn.mlp import MLP
from axonn_ext.nn.norm import LayerNorm, RMSNorm
from axonn_ext.nn.rotary import Rotary
from axonn_ext.nn.sequences import KeyValueCache, Places
from axonn_ext.nn.sharded import (
    Init,
    ParameterSpec,
    ShardedModule,
    initialize,
    sharded_parameters,
)

__all__ = [
    "MLP",
    "Adapter",
    "Attention",
    "CrossEntropy",
    "DeferredWeightGradients",
    "Embedding",
    "Init",
    "KeyValueCache",
    "LayerNorm",
    "Linear",
    "ParameterSpec",
    "Places",
    "PositionEmbedding",
    "RMSNorm",
    "Rotary",
    "ShardedModule",
    "Target",
    "WeightGradients",
    "goldfish_labels",
    "initialize",
    "sharded_parameters",
]
