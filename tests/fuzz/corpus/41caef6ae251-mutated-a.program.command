predict --program FILE --cluster h100-sxm --json
