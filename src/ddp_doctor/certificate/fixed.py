"""What is off or fixed while a certificate is measured: all that is random, clipping, compilation.

Only what acts on training is replaced: dropout passes its input on, BatchNorm uses its running
statistics, and `clip_grad_norm_` and `clip_grad_value_` leave gradients alone. After the
third step, BatchNorm and clipping act as the script has them.
"""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddp_doctor.certificate.calls import hook_call
from ddp_doctor.certificate.record import StepNotes
from ddp_doctor.run.on_cpu import change_call

OFF = "Dropout is off, clipping is off, BatchNorm uses its running statistics, nothing is compiled."
DROPOUT = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d"),
    *("alpha_dropout", "feature_alpha_dropout"),
)


class Replacements:
    """Replaces torch's functions. `as_usual` lets clipping and BatchNorm through again."""

    def __init__(self, notes: StepNotes) -> None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        self.notes = notes
        self.as_usual = False
        for name in DROPOUT:
            setattr(F, name, _identity)
        torch.dropout = _identity
        change_call(F, "scaled_dot_product_attention", _no_dropout)
        hook_call(nn.RNNBase, "__init__", after=_remove_rnn_dropout)
        change_call(F, "batch_norm", self._batch_norm)
        nn.SyncBatchNorm.forward = self._sync_batch_norm(nn.SyncBatchNorm.forward)  # type: ignore[method-assign]
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip = self._clip(getattr(nn.utils, name))
            setattr(nn.utils.clip_grad, name, clip)
            setattr(nn.utils, name, clip)

    def _batch_norm(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        kwargs |= inspect.signature(F.batch_norm).bind(*args, **kwargs).arguments
        args.clear()
        if kwargs.get("training") and kwargs["running_mean"] is not None:
            self.notes.batch_norm = True
            kwargs["training"] = self.as_usual

    def _sync_batch_norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """It computes with the statistics of all ranks, and does not call `F.batch_norm`."""

        @functools.wraps(original)
        def forward(module: Any, input: Any) -> Any:  # noqa: A002
            if self.as_usual or not module.track_running_stats:
                return original(module, input)
            batch_norm = self.notes.batch_norm  # whether one uses each rank's own samples
            result = _BatchNorm.forward(module, input)
            self.notes.batch_norm = batch_norm
            return result

        return forward

    def _clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            self.notes.clips = True
            if self.as_usual:
                return original(parameters, *args, **kwargs)
            tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            gradients = [p.grad for p in tensors if p.grad is not None]
            arguments = inspect.signature(original).bind(parameters, *args, **kwargs).arguments
            kind = arguments.get("norm_type", 2.0)
            norm = nn.utils.get_total_norm(gradients, kind) if gradients else torch.tensor(0.0)
            self.notes.norms.append(float(getattr(norm, "full_tensor", lambda: norm)()))
            return norm

        return clip


def _identity(input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    return input


def _no_dropout(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[4:5] = [0.0] * len(args[4:5])
    kwargs.pop("dropout_p", None)


def _remove_rnn_dropout(_: None, rnn: nn.RNNBase, *args: Any, **kwargs: Any) -> None:
    rnn.dropout = 0.0
