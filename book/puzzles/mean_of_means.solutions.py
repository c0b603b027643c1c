"""Answers to try this chapter's checks on."""


# %% check_step right: the count is all-reduced
def counted(model, window):
    [batch] = window
    logits = model(batch.pixels, batch.tokens)
    losses = F.cross_entropy(logits.mT, batch.targets, reduction="none")
    means = losses.sum(1) / (batch.targets != -100).sum(1)
    captions = torch.tensor(float(len(means)))
    dist.all_reduce(captions)
    loss = means.sum() * dist.get_world_size() / captions
    loss.backward()
    return loss


# %% check_step right: one caption at a time
def one_by_one(model, window):
    [batch] = window
    logits = model(batch.pixels, batch.tokens)
    total = sum(
        F.cross_entropy(*pair) for pair in zip(logits, batch.targets, strict=True)
    )
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(batch.targets))
    loss = total / (sum(counts) / len(counts))
    loss.backward()
    return loss


# %% check_step wrong: the mean of the own captions
def own_captions(model, window):
    [batch] = window
    logits = model(batch.pixels, batch.tokens)
    losses = F.cross_entropy(logits.mT, batch.targets, reduction="none")
    loss = (losses.sum(1) / (batch.targets != -100).sum(1)).mean()
    loss.backward()
    return loss


# %% check_step wrong: 16 captions per rank are written into the code
def sixteen_per_rank(model, window):
    [batch] = window
    logits = model(batch.pixels, batch.tokens)
    losses = F.cross_entropy(logits.mT, batch.targets, reduction="none")
    means = losses.sum(1) / (batch.targets != -100).sum(1)
    loss = means.sum() / len(means) * (16 / len(means))
    loss.backward()
    return loss


# %% check_step wrong: padding counts
def padding_counts(model, window):
    [batch] = window
    logits = model(batch.pixels, batch.tokens)
    losses = F.cross_entropy(logits.mT, batch.targets, reduction="none")
    loss = global_mean(losses.mean(1).sum(), len(batch.targets))
    loss.backward()
    return loss


# %% check_step wrong: the mean of all tokens
def all_tokens(model, window):
    [batch] = window
    logits = model(batch.pixels, batch.tokens).flatten(0, 1)
    total = F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
    loss = global_mean(total, int((batch.targets != -100).sum()))
    loss.backward()
    return loss
