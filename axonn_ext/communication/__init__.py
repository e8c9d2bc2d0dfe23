"""What crosses ranks: a record of every collective that is issued, and time spent waiting."""

from axonn_ext.communication.trace import (
    CommunicationRecord,
    CommunicationTrace,
    trace_communication,
)
from axonn_ext.communication.waiting import waited_seconds

__all__ = ["CommunicationRecord", "CommunicationTrace", "trace_communication", "waited_seconds"]
