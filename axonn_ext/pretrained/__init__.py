"""Hugging Face's models, in and out, on any grid."""

from axonn_ext.pretrained.load import from_pretrained
from axonn_ext.pretrained.save import save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
