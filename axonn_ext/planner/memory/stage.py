"""The sizes of a job on a pipe coordinate, whose memory is counted."""

from __future__ import annotations

from axonn_ext.planner.job import Job
from axonn_ext.planner.memory.activations import kept_of_share, sizes_of
from axonn_ext.planner.memory.in_flight import Units
from axonn_ext.planner.memory.states import FP32, StageStates


class Stage:
    """The sizes of one job on a pipe coordinate. Unless noted otherwise, they are bytes of a rank.

    running    the number of blocks of the running virtual stage
    again      how many of them are recomputed as a whole; of virtual stages, the fewest
    last_again whether the last one is, where backward begins
    tied       whether one rank has both uses of a tied table, whose gradient waits for the second
    wide       per element, where overlap's buckets, the gradient norm and AdamW copy low
               precision to fp32
    copy       per element, where collectives copy bf16 and fp16 to fp32, as they do on the CPU
               (csrc/ops/composed/c10d_collectives.cpp)
    block      a block's weights, whole over z
    table      the table of the embedding or the head, whole over z; 0 if the stage has none
    split      the ranks that split each weight
    fuses      whether the ops of Linears are fused, on a GPU
    may_fuse   whether they are, or "auto" may choose so
    num_parts  the data ranks that shard AdamW's state; 1: each has all of it
    sums_early whether ZeRO takes gradients in the only, or in each, backward pass of a step
    stream     a micro-batch's rows of the residual stream
    units      the micro-batches held at the fullest moments, if it is in a pipeline
    """

    def __init__(
        self, job: Job, has: StageStates, device: str, units: tuple[Units, ...], *,
        auto_fuses: bool = False,
    ) -> None:  # fmt: skip
        options, grid, size = job.options, job.grid, sizes_of(job.placed_model)
        self.job, self.number, self.share, self.elements = job, has.number, has.share, has.elements
        self.layers = self.share.num_layers
        self.in_stages, self.units = grid.pipe > 1, units
        self.running = -(-self.layers // options.pipeline.chunks) if self.in_stages else self.layers
        again, is_whole = options.recomputation, self.running == self.layers
        self.again = (again.num_blocks if is_whole else again.fewest_blocks)(self.running)
        self.last_again = self.again > again.num_blocks(self.running - 1)
        self.tied = size.tied and not self.in_stages
        self.size, self.options = size, options
        self.x, self.y, self.z = x, y, z = grid.x, grid.y, grid.z
        self.m, self.width = job.rows, options.width
        self.sharded = options.layout == "sharded"
        self.mx, self.my = (self.m // x, self.m // y) if self.sharded else (self.m, self.m)
        self.kept = kept_of_share(job, size, has.share)
        self.overlap = options.overlap
        self.wide = FP32 if self.width < FP32 else 0
        self.copy = self.wide if device == "cpu" else 0
        has_kernels = device == "cuda" and self.width < FP32  # which multiply bf16 and fp16
        self.fuses = has_kernels and options.algorithm == "fused"
        by_choice = has_kernels and options.algorithm == "auto" and auto_fuses
        self.may_fuse = self.fuses or by_choice
        self.sum_width = self.width + self.copy
        self.copied_parts = self.copy if self.sharded else 0
        self.regathers = z > 1 and self.overlap is None and options.reshard_after_forward
        self.block = size.block * self.width // (x * y)
        self.table = self.elements.table * z * self.width
        self.split, self.num_parts = x * y * z, job.num_parts
        only = options.micro_batches == 1 and self.overlap is not None and not self.in_stages
        self.sums_early = self.num_parts > 1 and (only or options.optimizer.zero > 1)
        self.stream = self.kept.block_input
