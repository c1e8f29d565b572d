cluster FILE --json
