"""`axonn-ext bench optimizer`: times a step of AdamW, by where its state lies, against torch's.

systems           AdamW on the same weights, in each of the ways that are compared
run               checks, timing and bytes of all of them
results           rows
report, plot      the results as a table, JSON and a picture
command           the command line
"""
