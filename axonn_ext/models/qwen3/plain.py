"""Qwen3 in plain torch.nn. It is Llama's body, which follows what family.py says."""

from axonn_ext.models.llama.plain import Body

__all__ = ["Body"]
