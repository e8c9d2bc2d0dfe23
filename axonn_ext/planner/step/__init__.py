"""Describes one rank's step: its products, its collectives and their order."""
