"""What the planner knows of a machine: products, attention, and links; a machine is a file here."""
