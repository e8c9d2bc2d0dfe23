"""Generates and scores text with a model on any grid."""

from axonn_ext.models.generation.decode import NotFiniteError, check_prompts, generate, stream
from axonn_ext.models.generation.sampling import Sampling
from axonn_ext.models.generation.scoring import Score, score, windows

__all__ = [
    "NotFiniteError",
    "Sampling",
    "Score",
    "check_prompts",
    "generate",
    "score",
    "stream",
    "windows",
]
