predict FILE --cluster h100-sxm --dp-replicate 2 --json
