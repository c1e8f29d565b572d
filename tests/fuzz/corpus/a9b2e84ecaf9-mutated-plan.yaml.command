predict CONFIG --cluster h100-sxm --plan-file FILE --json
