"""What a model learns word for word, how much of it, and how to keep it from that.

goldfish    Goldfish loss: which targets it leaves out
"""
