"""`axonn-ext bench pipeline`: times the schedules of a pipeline on emulated stages.

plan              what a run does, and the schedules that it compares
stages            a layer whose time is a sleep, and the delays of messages
systems, rivals   a step of our pipeline, and one of torch.distributed.pipelining
run               timing, in the processes of a launch
results           rows, what follows from them, and the lines that a run should reach
report, plot      the results as a table, JSON and a picture
command           the command line
"""
