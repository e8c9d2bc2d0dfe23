"""`axonn-ext bench ranking`: compares the planner's order of all grids with the measured order.

cases      the models, and the jobs of every legal grid
ranks      training steps on each grid, timed by all ranks
compare    the two orders, and what is said about them
command    the command line
"""
