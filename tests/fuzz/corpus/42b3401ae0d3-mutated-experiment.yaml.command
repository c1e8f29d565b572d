experiment run FILE --json
