"""Memory that Muon needs while it orthogonalises the largest matrix of a rank.

Source: axonn_ext/optim/muon.py and newton_schulz.py.
"""

from __future__ import annotations

from axonn_ext.planner.memory.stage import Stage
from axonn_ext.planner.memory.states import FP32
from axonn_ext.planner.step.muon import BF16, Mesh, owned_by
from axonn_ext.planner.step.parameters import elements_of


def muon_buffers(stage: Stage) -> int:
    """Returns the bytes of an update on its way; 0 without Muon.

    They are the gradient in fp32 and Nesterov's mean, the matrix before and after the division by
    its norm, what a product reads of other ranks, the product, and its sum in fp32. Without ZeRO,
    ranks of data then have the updates of a whole bucket, and a slice that was gathered.
    """
    job, grid, model = stage.job, stage.job.grid, stage.job.placed_model
    if not (job.options.optimizer.is_muon and stage.layers):
        return 0
    linear = max(model.block_linears, key=lambda w: w.n * w.k)
    own, mesh = elements_of(grid, linear), Mesh(grid.as_dict(), linear)
    gathered = own * BF16 * mesh.p * (mesh.p > 1)
    gram = mesh.of_gram * BF16 * (2 + (mesh.q if mesh.q > 1 else 0))
    combined = (BF16 + FP32) if mesh.p * mesh.q > 1 else BF16
    held = own * (stage.wide + FP32 + 2 * BF16 + combined) + gram + gathered
    if grid.data == 1 or stage.num_parts > 1:
        return held
    part = max(owned_by(model, grid, stage.layers).parts)
    at_once = min(part * grid.data, job.options.optimizer.bucket_elements)
    return max(held, BF16 * (part + part * grid.data + at_once))
