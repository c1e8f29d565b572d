"""The exit codes of the console command."""

FOUND_ERRORS = 1
"""`chakra validate` found errors in the traces"""
BAD_INPUT = 2
"""one line on stderr says what; a fault while `validate` predicts a row is 1"""
NOTHING_FITS = 3
"""`plan` found nothing that fits, or `predict --must-fit` a plan or program that does not"""
WORSE = 4
"""`diff` found the changed program slower or larger than --max-slowdown or --max-growth allow"""
BUG = 70
"""a result breaks physics or arithmetic; the line on stderr has the numbers to report"""
INTERRUPTED = 130
