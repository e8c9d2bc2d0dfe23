"""What a rank holds: its states, what is kept for backward, buffers, and the peak of a step."""
