"""Reads users' files, and reports what is wrong with them in a uniform way."""
