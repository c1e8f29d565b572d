run FILE --runs 2 --no-gains --jobs 1 --json
