"""Answers to try this chapter's checks on."""

# %% check_fewest right: all combinations, the smallest first
from itertools import combinations

all_checks = sorted({check for errors in caught.values() for check in errors})
by_size = (
    set(some) for size in range(1, 13) for some in combinations(all_checks, size)
)
smallest = next(s for s in by_size if all(s & set(e) for e in caught.values()))


# %% check_fewest right: checks are removed from the whole list, one by one
chosen_by_removal = sorted({check for errors in caught.values() for check in errors})
for one in list(chosen_by_removal):
    rest = set(chosen_by_removal) - {one}
    if all(rest & set(errors) for errors in caught.values()):
        chosen_by_removal.remove(one)
remaining = list(chosen_by_removal)


# %% check_fewest wrong: all twelve
everything = {check for errors in caught.values() for check in errors}


# %% check_fewest wrong: the eight that catch the most
from collections import Counter

most = Counter(check for errors in caught.values() for check in errors)
the_eight_largest = {check for check, _ in most.most_common(8)}


# %% check_fewest wrong: one that is needed is missing
single = {next(iter(errors)) for errors in caught.values() if len(errors) == 1}
without_one = set(sorted(single)[1:])


# %% check_fewest wrong: names of exhibits instead of checks
exhibits = set(list(caught)[:8])


# %% check_trainer right: the norm is written out
import torch


class WrittenOut(ClipBeforeSync):
    def finish_and_clip(self, max_norm):
        self.finish()
        held = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in held]).norm()
        for gradient in held:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


# %% check_trainer right: one call for the norm, one for the clipping
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class InTwoCalls(ClipBeforeSync):
    def finish_and_clip(self, max_norm):
        self.finish()
        held = [p.grad for p in self.module.parameters() if p.grad is not None]
        clip_grads_with_norm_(self.module.parameters(), max_norm, get_total_norm(held))


# %% check_trainer wrong: before and after
# self.finish() → clip_grad_norm_(self.module.parameters(), max_norm)
#         self.finish()


# %% check_trainer wrong: each parameter alone
# (norm + 1e-6) → (gradient.norm() + 1e-6)


# %% check_trainer wrong: to 1, whatever is asked for
# max_norm / → 1.0 /


# %% check_trainer wrong: values instead of the norm
# mul_((max_norm / (norm + 1e-6)).clamp(max=1.0)) → clamp_(-max_norm, max_norm)

# %% check_trainer wrong: gradients of zero become None
# norm = → for p in self.module.parameters():
#             p.grad = p.grad if p.grad is not None and p.grad.any() else None
#         norm =


# %% check_trainer blind norm . 1e-06: far below a norm
# %% check_trainer blind clamped: what is clipped is not above 10
