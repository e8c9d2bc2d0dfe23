"""What crosses ranks: a record of every collective that is issued."""

from axonn_ext.communication.trace import (
    CommunicationRecord,
    CommunicationTrace,
    trace_communication,
)

__all__ = ["CommunicationRecord", "CommunicationTrace", "trace_communication"]
