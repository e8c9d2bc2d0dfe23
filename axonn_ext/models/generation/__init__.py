"""Generates text with a model on any grid."""

from axonn_ext.models.generation.decode import check_prompts, generate, stream
from axonn_ext.models.generation.sampling import Sampling

__all__ = ["Sampling", "check_prompts", "generate", "stream"]
