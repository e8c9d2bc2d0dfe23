"""Mistral in plain torch.nn. It is Llama's body; Hugging Face's names are the same for both."""

from axonn_ext.models.llama.plain import Body

__all__ = ["Body"]
