"""`axonn-ext bench ops`: times ops that move memory against torch's and the speed of a copy.

cases     each op, by each of the ways that are compared, and whether it is right
run       checks and timing of one op; rows
command   the command line, and the table
"""
