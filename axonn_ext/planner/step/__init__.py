"""What one rank does in a step: its products, its collectives and their order."""
