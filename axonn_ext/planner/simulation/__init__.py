"""Simulates when each task of a step runs, on one rank and in a pipeline."""
