"""Averages every gradient correctly, but every rank starts from its own weights.

Claims: data parallelism needs nothing but averaged gradients.

The bug: equal steps keep equal replicas equal, but keep different ones different. Nothing made the
weights equal at the start.

Symptom: gradients are bitwise equal, and every rank's loss falls, each on its own model. A rank's
gradients were partly computed at other ranks' weights. If every process sets the same seed there
is no symptom, until one of them draws an extra random number before it builds the model.

Seen in: hand-written training loops that rely on a seed; models with buffers that are not
broadcast.

Kind: drift. Caught by initial_state_is_broadcast.
"""

from torch import nn

from labkit.testing.museum.exhibit import Exhibit
from labkit.testing.museum.parts import AveragingTrainer


class NoInitialBroadcast(AveragingTrainer):
    def __init__(self, module: nn.Module) -> None:
        self.module = module


EXHIBIT = Exhibit(NoInitialBroadcast, bug="drift", caught_by="initial_state_is_broadcast")
