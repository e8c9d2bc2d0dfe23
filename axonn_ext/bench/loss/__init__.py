"""`axonn-ext bench loss`: times cross-entropy, and counts its memory, against torch's in fp32.

systems           a loss and its gradient, by each of the ways that are compared
memory            the most bytes that a call holds at once
run               checks, timing and memory of one vocabulary
results           rows
report, plot      the results as a table, JSON and a picture
command           the command line
"""
