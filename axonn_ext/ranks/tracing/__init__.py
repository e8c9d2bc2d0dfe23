"""Records every collective that is issued, and the time that ops spend waiting for peers."""

from axonn_ext.ranks.tracing.trace import (
    CommunicationRecord,
    CommunicationTrace,
    record_issued,
    trace_communication,
)
from axonn_ext.ranks.tracing.waiting import waited_seconds

__all__ = [
    "CommunicationRecord",
    "CommunicationTrace",
    "record_issued",
    "trace_communication",
    "waited_seconds",
]
