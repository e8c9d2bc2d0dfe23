"""`axonn-ext bench links`: the machine that the planner shall plan for, measured.

plan       what is measured: groups of ranks, products
ranks      the measurements, made by all ranks at once
fit        bandwidth and latency of the times of messages
file       the machine file that comes of it
command    the command line
"""
