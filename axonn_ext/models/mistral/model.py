"""Mistral for a grid: Llama's modules and names, as Hugging Face's MistralForCausalLM has them."""

from __future__ import annotations

from axonn_ext.models.llama.model import Llama


class Mistral(Llama):
    """A Llama of other sizes; what sets it apart is in family.py."""


MODEL = Mistral
