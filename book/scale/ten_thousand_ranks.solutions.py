"""Answers to try this chapter's checks on."""


# %% check_samples right: recursion
def larger(world, way, samples=1):
    whole = step_seconds(world, way, plan(), samples * world)
    if whole * 0.9 < compute(world, samples * world).end:
        return samples
    return larger(world, way, 2 * samples)


# %% check_samples right: the first exponent
def first_exponent(world, way):
    def waits(samples):
        batch = samples * world
        return 1 - compute(world, batch).end / step_seconds(world, way, plan(), batch)

    return 2 ** next(k for k in range(20) if waits(2**k) < 0.1)


# %% check_samples wrong: the numbers for 16,384 ranks
def from_a_table(world, way):
    return {"flat ring": 512, "hierarchical": 256, "tree": 4}[way]


# %% check_samples wrong: one doubling too many
def one_too_many(world, way):
    samples, waits = 1, 1.0
    while waits >= 0.1:
        batch = samples * world
        waits = 1 - compute(world, batch).end / step_seconds(world, way, plan(), batch)
        samples *= 2
    return samples


# %% check_samples wrong: in steps of one
def one_by_one(world, way):
    samples = 1
    while True:
        batch = samples * world
        if (
            1 - compute(world, batch).end / step_seconds(world, way, plan(), batch)
            < 0.1
        ):
            return samples
        samples += 1


# %% check_samples wrong: the same all-reduce for all
def always_a_ring(world, way):
    samples = 1
    while True:
        batch = samples * world
        whole = step_seconds(world, "flat ring", plan(), batch)
        if 1 - compute(world, batch).end / whole < 0.1:
            return samples
        samples *= 2


# %% check_samples wrong: waiting for half of the step is accepted
def half_of_the_step(world, way):
    samples = 1
    while True:
        batch = samples * world
        if compute(world, batch).end / step_seconds(world, way, plan(), batch) > 0.5:
            return samples
        samples *= 2
