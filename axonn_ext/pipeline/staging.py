"""Makes this rank's stages from the user's model, and refuses models that cannot be pipelined."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from axonn_ext.models.transformer import Transformer
from axonn_ext.pipeline.failures import PipelineError
from axonn_ext.pipeline.models import Layer, Loss, ModuleStages, StagedModel, TransformerStages
from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.rank_values import first_failure
from axonn_ext.spec.pipeline_options import PipelineOptions
from axonn_ext.spec.stages import Stages


def on_all_ranks(make: Callable[[], StagedModel]) -> StagedModel:
    """Returns the result of `make` if it raises on no rank. Collectives: those of first_failure."""
    made: StagedModel | None = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as failure:  # the functions that make layers are the user's
        error = failure
    text = None if error is None else f"{type(error).__name__}: {error}"
    found = first_failure(text) if dist.get_world_size() > 1 else None
    if error is not None:
        raise error
    if found is not None:
        raise PipelineError(f"rank {found[0]}: {found[1]}")
    assert made is not None
    return made


def stage(
    model: Transformer | Sequence[Layer],
    grid: Grid,
    options: PipelineOptions,
    *,
    loss: Loss | None,
    stages: Stages | None,
) -> StagedModel:
    """Returns this rank's stages. Raises TypeError or ValueError for an unsuitable model."""
    if isinstance(model, Transformer):
        if loss is not None or stages is not None:
            raise ValueError(
                "Pipeline: loss and stages are for lists of modules; a transformer has its own "
                "loss, and models.build takes its stages"
            )
        if model.grid is not grid:
            raise ValueError(f"Pipeline: grid must be the model's, {model.grid}, got {grid}")
        return _checked(TransformerStages(model), grid, options)
    if isinstance(model, nn.Module) or not isinstance(model, Sequence):
        raise TypeError(
            "Pipeline: model must be one of axonn_ext.models or a list of modules, got "
            f"{type(model).__name__}"
        )
    if loss is None:
        raise ValueError("Pipeline: loss must be given for a list of modules, got None")
    if stages is None:
        pipe = grid.size("pipe")
        try:
            stages = Stages.split(len(model), pipe, options.chunks)
        except ValueError as error:
            raise ValueError(f"Pipeline: {error}") from None
    return _checked(ModuleStages(model, grid, stages, loss), grid, options)


def _checked(model: StagedModel, grid: Grid, options: PipelineOptions) -> StagedModel:
    """Returns the model. Raises ValueError if stages, grid and options do not fit together."""
    stages, pipe = model.stages, grid.size("pipe")
    if stages.pipe != pipe or stages.chunks != options.chunks:
        raise ValueError(
            f"Pipeline: the model has {stages.num_virtual} virtual stages on pipe={stages.pipe}, "
            f"but options.chunks={options.chunks} on pipe={pipe} needs {options.chunks * pipe}"
        )
    if options.chunks > 1 and pipe == 1:
        raise ValueError("Pipeline: schedule 'interleaved' needs pipe >= 2, got pipe=1")
    first = next(model.module.parameters(), None)
    if first is None:
        raise ValueError("Pipeline: every stage must have a parameter, but this one has none")
    if first.device.type not in ("cpu", "cuda"):
        raise ValueError(f"Pipeline: parameters must be on a CPU or a CUDA GPU, got {first.device}")
    if first.device.type == "cuda" and grid.device_type != "cuda":
        raise ValueError(
            f"Pipeline: parameters on {first.device} need a grid whose groups have NCCL, got one "
            "for the CPU: call torch.distributed.init_process_group('nccl')"
        )
    return model
