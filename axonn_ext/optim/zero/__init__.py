"""ZeRO: each rank of the data axis keeps a part of the summed gradients and of AdamW's state.

Source: Rajbhandari et al., ZeRO, sections 5.1 and 5.2 (https://arxiv.org/abs/1910.02054).
"""

from axonn_ext.optim.zero.buckets import Bucket, Run, buckets_of
from axonn_ext.optim.zero.exchange import BlockingExchange
from axonn_ext.optim.zero.shards import GradientShards, all_shards, shards_of

__all__ = [
    "BlockingExchange",
    "Bucket",
    "GradientShards",
    "Run",
    "all_shards",
    "buckets_of",
    "shards_of",
]
