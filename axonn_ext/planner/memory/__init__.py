"""A rank's memory: states, activations kept for backward, buffers, and the peak of a step."""
