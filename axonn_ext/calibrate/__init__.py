"""`axonn-ext bench links`: measures this machine, so that the planner can plan for it.

plan       the groups of ranks and products to measure
ranks      the measurements, made by all ranks at once
messages   messages between the stages of a pipeline
fit        bandwidth and latency from the times of messages
file       the machine file with the results
command    the command line
nccl_tests, with_links   logs of nccl-tests, and the machine file with their measurements
"""
