"""LLaMA-Factory's trainer for supervised fine-tuning, with each of its losses."""

import importlib
import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import Seq2SeqTrainingArguments

from surveys.trainers.cases import Case
from surveys.trainers.hugging_face import arguments, rows
from surveys.trainers.tiny import Watched, collate, model

LOSSES = "dft", "eaft", "asft"


def sft(case: Case, rank: int, loss: str = "") -> list[Tensor]:
    """ASFT adds a divergence from a reference model. That is a copy, so it has no gradient here."""
    trainer = importlib.import_module("llamafactory.train.sft.trainer").CustomSeq2SeqTrainer
    wanted: dict[str, Any] = {f"use_{name}_loss": name == loss for name in LOSSES}
    wanted |= {"use_badam": False, "disable_shuffling": True, "asft_alpha": 0.1}
    net = model()
    optimizer = Watched(net)
    with tempfile.TemporaryDirectory() as folder:
        given = arguments(case, folder)
        del given["train_sampling_strategy"]  # it is newer; `disable_shuffling` does the same
        settings = Seq2SeqTrainingArguments(**given)
        settings.fp8 = False
        trainer(
            SimpleNamespace(**wanted),
            None,
            ref_model=model() if loss == "asft" else None,
            model=net,
            args=settings,
            tokenizer=None,
            data_collator=partial(collate, pad=case.pad),
            train_dataset=rows(case),
            optimizers=(optimizer, None),
        ).train()
    return optimizer.judged(case)
