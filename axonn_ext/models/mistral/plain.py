"""Mistral in plain torch.nn: Llama's, whose names Hugging Face's MistralForCausalLM has, too."""

from axonn_ext.models.llama.plain import Body

__all__ = ["Body"]
