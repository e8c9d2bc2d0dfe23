"""Pipelines: a model's stages on the grid's pipe axis, which run tasks as messages arrive.

    pipeline = Pipeline(model, grid)            of axonn_ext.models, or a list of modules
    loss = pipeline.step(micro_batches)         forward and backward of all of them
    pipeline.sync_gradients(); clip; optimizer

docs/pipeline.md explains the schedules.
"""

from axonn_ext.pipeline.failures import PipelineError
from axonn_ext.pipeline.models import MicroBatch
from axonn_ext.pipeline.pipeline import Pipeline
from axonn_ext.spec.pipeline_options import PipelineOptions

__all__ = ["MicroBatch", "Pipeline", "PipelineError", "PipelineOptions"]
