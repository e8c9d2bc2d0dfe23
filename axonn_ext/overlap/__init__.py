"""Overlaps the collectives of weights and gradients (axes z and data) with computation."""

from axonn_ext.overlap.orchestrator import Orchestrator
from axonn_ext.overlap.watch import CommunicationError
from axonn_ext.spec.parallel import Overlap

__all__ = ["CommunicationError", "Orchestrator", "Overlap"]
