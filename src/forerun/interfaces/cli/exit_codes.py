"""The exit codes of the console command."""

FOUND_ERRORS = 1
"""`chakra validate` found errors in the traces, or `validate` could not predict a row because of a fault in Forerun"""
BAD_INPUT = 2
"""one line on stderr describes the error"""
NOTHING_FITS = 3
"""`plan`, `dse` or `experiment scale` found nothing that fits, or a command with --must-fit found that the plan does
not fit
"""
WORSE = 4
"""`diff` found the changed program slower or larger than --max-slowdown or --max-growth allow"""
LIMIT_REACHED = 5
"""`--time-limit` or `--memory-limit-process` ended the command"""
BUG = 70
"""a result breaks physics or arithmetic; the line on stderr has the numbers to report"""
INTERRUPTED = 130
