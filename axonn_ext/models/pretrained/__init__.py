"""Loads and saves Hugging Face models on any grid."""

from axonn_ext.models.pretrained.adapter_files import load_adapter, save_adapter
from axonn_ext.models.pretrained.files import read_model
from axonn_ext.models.pretrained.load import from_pretrained
from axonn_ext.models.pretrained.lora import adapters_of, add_adapters, merge_adapters
from axonn_ext.models.pretrained.save import save_pretrained

__all__ = [
    "adapters_of",
    "add_adapters",
    "from_pretrained",
    "load_adapter",
    "merge_adapters",
    "read_model",
    "save_adapter",
    "save_pretrained",
]
