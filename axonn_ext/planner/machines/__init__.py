"""Models of a machine's matrix products, attention and links. Each machine is a file here."""
