"""Matmuls combined with the collective before or after them, for use in any model.

W is the number of ranks of `group`, which is a ProcessGroup or its name. A process forked from a
rank cannot use its groups. Every rank must make the same calls in the same order, with equal
`algorithm` and `deterministic`, and need the same gradients (those of matmul_all_reduce are each
rank's own).

All ops are differentiable, and their gradients are computed by the same ops. All can be traced and
compiled (`torch.compile(fullgraph=True)`): the schemas in torch.ops.axonn take `str group_name, int
group_size`, so fakes need no live group, and a compiled graph is never used at another size. Of
torch.func, functional_call works, and so do vmap of a call without gradients and what "auto" does
on one rank; other transforms are refused by name.

Shapes are those of one rank. b is [K, N] as in torch.mm; `weight.t()` is used without a copy. W
must divide a scattered dimension, and all shards of a gather must be equal. Ragged and empty
tensors work, at every W.

`algorithm`, on which the bits of results depend; for equal bits in every run, name one or keep
AXONN_CACHE_DIR:

    "fused"       the collective runs inside the matmul, through symmetric memory: peers' data is
                  read in place, and partial products are written where their owner adds them, in a
                  fixed order (bitwise repeatable)
    "chunked"     the library's matmul and c10d's collective, cut into a few chunks and pipelined
    "sequential"  the library's matmul and c10d's collective, one after the other: the reference
    "auto"        the algorithm that was measured to be the fastest (axonn_ext.warm_up); if none was
                  measured, "fused" where all ranks of the group share a host, else "sequential"

The dtypes are float32, float64, bfloat16 and float16; under autocast, operands (also those of a
Linear) are cast as torch.mm casts its own. Sums over ranks accumulate in float32 (float64 for
float64); data crosses ranks in the tensors' own dtype.

On GPUs, NCCL accumulates sums over ranks in the tensors' own dtype. There "fused" is for bfloat16
and float16 on up to 8 ranks, each with a GPU of sm_80 or later that can access its peers' memory.
Its kernels are CUTLASS's on sm_90 where they are built, and elsewhere Triton's, if it is installed.
It accumulates sums in float32, and raises NotImplementedError where it cannot run. Modules with
"fused" run their collectives without a product as "sequential". "auto" measures "fused" only where
`axonn-ext verify` has found its results correct. Once "auto" has chosen, no call makes the host
wait.

Every op raises ValueError or TypeError for arguments that do not fit, and names the op, the
argument, the expected and the given value. It raises RuntimeError if a peer dies, fails, or does
not make its call within AXONN_TIMEOUT_SECONDS. If ranks make different calls, every rank gets a
RuntimeError that names both, and the group is unusable from then on.
"""

from __future__ import annotations

from axonn_ext.kernels.triton import register  # noqa: F401  gives the ops their kernels in Triton
from axonn_ext.ops import (
    functions,
    specs,  # noqa: F401  makes the ops traceable
)
from axonn_ext.ops.functions import *  # noqa: F403  all of them are public
from axonn_ext.spec.parallel import ALGORITHMS

__all__ = ["ALGORITHMS"]
__all__ += functions.__all__
