"""A certificate of three functions: do W ranks compute the gradient that one process computes?

Nothing in torch is replaced. Each property compares two gradients from the same weights:

    P0      what `.grad` holds               the average of what autograd computed on each rank
    P1      W ranks                          one process with all samples
    P2      W ranks, samples dealt again     the same W ranks

Four controls say whether P1 can be judged: the same step once more, with other seeds; the rows that
the model got; one process with the samples in another order; one process with every sample twice,
whose gradient is the same if the loss is a mean, and twice as long if it is a sum.

`gradients` measures in a rank, `verdict` concludes, and `processes` starts the ranks.
"""
