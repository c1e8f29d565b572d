predict FILE --cluster h100-sxm --plan-file PLAN --json
