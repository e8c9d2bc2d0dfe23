"""Searches all ways to run a model on a number of ranks for the fastest ones that fit."""
