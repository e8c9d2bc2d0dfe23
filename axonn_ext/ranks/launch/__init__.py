"""Starts processes, one for each rank, and watches them until the last has ended."""
