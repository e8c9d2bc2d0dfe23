"""Starting processes, one for each rank, and watching them until the last has ended."""
