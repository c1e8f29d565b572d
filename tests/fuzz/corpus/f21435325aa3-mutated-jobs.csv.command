cluster FILE --nodes 2 --gpus-per-node 4 --json
