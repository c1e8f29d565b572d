stragglers FILE --json
