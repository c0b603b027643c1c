"""The first eight pairs in one batch."""

import copy


def gradient(script, load):
    policy = load(script.Policy())
    reference = copy.deepcopy(policy).requires_grad_(False)
    script.dpo_loss(policy, reference, *script.preferences()[:8]).backward()
    return policy
