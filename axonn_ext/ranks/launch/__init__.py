"""Starts one process per rank, and watches them until the last has ended."""
