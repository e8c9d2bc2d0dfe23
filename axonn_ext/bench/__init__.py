"""Benchmarks: what is timed, how, and how it is shown; `axonn-ext bench`.

measure                    interleaved timing of calls that all ranks make together
shapes, cases, reference   what is timed, and what its result must be
results, report, plot      what comes out: rows, JSON, a table, a chart
output                     what commands show and write in the same way
worker, command            a rank's part, and the command line
"""
