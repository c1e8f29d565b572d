"""Kinds of operations in a recorded step of pipelined training, in the words of the files."""

FORWARD, BACKWARD = "forward-compute", "backward-compute"
SEND_FORWARD, RECEIVE_FORWARD = "forward-send", "forward-recv"
SEND_BACKWARD, RECEIVE_BACKWARD = "backward-send", "backward-recv"
GATHER = "params-all-gather"
REDUCE = "grads-reduce-scatter"
REDUCE_APART = "separate-grads-all-reduce"
"""gradients that are reduced by themselves; only jobs that reduce the others beside their backward passes have it"""
NORMS = "layernorm-grads-all-reduce"
EMBEDDING = "embedding-grads-all-reduce"
COLLECT = "gc"
"""Python's garbage collection"""
CLIP = "optimizer-clip-main-grad"
OPTIMIZER = "optimizer"

COMPUTE = (FORWARD, BACKWARD)
TRANSFERS = (SEND_FORWARD, RECEIVE_FORWARD, SEND_BACKWARD, RECEIVE_BACKWARD)
OF_ALL_REPLICAS = (GATHER, REDUCE, REDUCE_APART, CLIP)
"""collectives in which the replicas of a stage meet"""
COMMUNICATION = (*TRANSFERS, *OF_ALL_REPLICAS, NORMS, EMBEDDING)
KINDS = (*COMPUTE, *COMMUNICATION, COLLECT, OPTIMIZER)
