"""How much of its training text a model repeats: documents, extraction, and what comes of it."""
