"""`axonn-ext bench train`: the same training with torch's own ways and with ours, timed together.

plan              what a launch is to do
gpt, systems      torch's GPT-2, and a training step of each system
check             whether every system computes the same losses
run               timing and peak memory, in the processes of a launch
results, report   what comes out: rows, JSON, a table, a chart
command           the command line
"""
