"""`axonn-ext bench train`: times the same training with torch's own methods and with ours.

plan              what a launch does, and the rows of its results
gpt, systems      torch's GPT-2, and a training step of each system
check             whether every system computes the same losses
run               timing and peak memory, in the processes of a launch
report            the results as a table and a chart
options, command  the command line
"""
