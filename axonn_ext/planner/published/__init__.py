"""Runs and studies that others published, and what the planner says of them."""
