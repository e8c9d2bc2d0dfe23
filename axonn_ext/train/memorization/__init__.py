"""Measures how much a model learns word for word, and how to prevent it.

goldfish    Goldfish loss: which targets it leaves out
"""
