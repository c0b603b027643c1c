"""Answers to try this chapter's checks on."""


# %% check_decay right: the decay is applied by hand
def decay_by_hand(parameters):
    optimizer = SGD(parameters, lr=0.005)

    @torch.no_grad()
    def add_decay(*_):
        for p in parameters:
            p.grad += 0.2 * p

    optimizer.register_step_pre_hook(add_decay)
    return optimizer


# %% check_decay right: the gradient is halved, and nothing else changes
def halved_gradient(parameters):
    optimizer = SGD(parameters, lr=0.01, weight_decay=0.1)

    def halve(*_):
        for p in parameters:
            p.grad /= 2

    optimizer.register_step_pre_hook(halve)
    return optimizer


# %% check_decay wrong: half the decay
def half_the_decay(parameters):
    return SGD(parameters, lr=0.005, weight_decay=0.05)


# %% check_decay wrong: four times the decay
def four_times(parameters):
    return SGD(parameters, lr=0.005, weight_decay=0.4)


# %% check_decay wrong: twice the decay at the old rate
def old_rate(parameters):
    return SGD(parameters, lr=0.01, weight_decay=0.2)


# %% check_decay wrong: no decay
def no_decay(parameters):
    return SGD(parameters, lr=0.005)


# %% check_decay wrong: AdamW, which cancels the factor
def another_optimizer(parameters):
    return AdamW(parameters, lr=0.01, weight_decay=0.1)
