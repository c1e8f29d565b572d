predict CONFIG --cluster h100-sxm --plan-file PLAN --json --network FILE
