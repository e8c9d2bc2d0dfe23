"""Searches all ways to run a model on a number of ranks for those that fit and are fastest."""
