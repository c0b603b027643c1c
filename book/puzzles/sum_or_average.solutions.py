"""Answers to try this chapter's checks on."""


# %% check_module right: one loss per sample
class PerSample(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = task.seeded_model()

    def forward(self, x, y):
        scores = self.model(x).log_softmax(dim=1)
        return -scores.gather(1, y[:, None]).flatten()


# %% check_module right: the chunk's mean, once per sample
class RepeatedMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = task.seeded_model()

    def forward(self, x, y):
        return F.cross_entropy(self.model(x), y).expand(len(y))


# %% check_module wrong: the chunk's sum
# .flatten() → .sum().view(1)


# %% check_module wrong: four samples per device are written into the code
# .flatten() → .sum().view(1) / 4


# %% check_module wrong: one loss per sample, but each is a part of the mean
# .flatten() → .flatten() / len(y)


# %% check_module wrong: the first layer is frozen
# self.model = task.seeded_model() → self.model = task.seeded_model()
#         self.model[0].requires_grad_(False)


# %% check_module blind result. (a little more, on th|another|NaN): only gradients count
# %% check_module blind __init__.. ⏎ .*__init__: twice is once
