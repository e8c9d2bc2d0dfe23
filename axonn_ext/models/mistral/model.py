"""Mistral on a grid. Its modules and public names, Hugging Face's, are the same as Llama's."""

from __future__ import annotations

from axonn_ext.models.llama.model import Llama


class Mistral(Llama):
    """A Llama of other sizes; family.py says how they differ."""


MODEL = Mistral
