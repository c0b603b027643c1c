"""Answers to try this chapter's checks on."""

# %% check_script right: the mean number of samples per rank
mean_count = my_script.replace(
    "    loss = mse_loss(model(x), y)\n",
    """\
    count = torch.tensor([float(len(x))])
    dist.all_reduce(count, op=dist.ReduceOp.AVG)
    loss = (model(x) - y).square().sum() / count
""",
)

# %% check_script right: the own mean, weighted
weighted = my_script.replace(
    "    loss = mse_loss(model(x), y)\n",
    """\
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(x))
    share = len(x) / sum(counts)
    loss = mse_loss(model(x), y) * share * dist.get_world_size()
""",
)

# %% check_script wrong: divided by the count of all ranks, without W
# ReduceOp.AVG → ReduceOp.SUM


# %% check_script wrong: the sum
# .sum() / count → .sum()


# %% check_script wrong: the number of ranks is written into the script
# ReduceOp.AVG → ReduceOp.SUM
# .sum() / count → .sum() * 2 / count


# %% check_script wrong: the numbers of ranks and samples are written into the script
# .sum() / count → .sum() * 2 / 10


# %% check_script wrong: equal numbers of samples
equal_counts = my_script.replace("2 + 6 * dist.get_rank()", "5")


# %% check_script wrong: the unequal numbers are only in a comment
in_a_comment = my_script.replace(
    "torch.randn(2 + 6 * dist.get_rank(), 8,",
    "torch.randn(5, 8,  # not 2 + 6 * dist.get_rank()\n       ",
)

# %% check_script wrong: the surplus samples of rank 1 are cut off
cut_off = my_script.replace("    y = x.sum", "    x = x[:2]\n    y = x.sum")


# %% check_script right: the gradients are scaled after backward
scaled_afterward = my_script.replace(
    "    loss = mse_loss(model(x), y)\n",
    '    loss = mse_loss(model(x), y, reduction="sum")\n',
).replace(
    "    loss.backward()\n",
    """\
    loss.backward()
    count = torch.tensor(float(len(x)))
    dist.all_reduce(count)
    for p in model.parameters():
        p.grad *= dist.get_world_size() / count
""",
)


# %% check_script blind line 1[0135]: steps, model, optimizer, and data are free
