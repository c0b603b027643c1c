"""TRL's trainers for supervised fine-tuning, preferences, rewards, and reinforcement learning."""

import tempfile
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import SequenceClassifierOutput
from trl.trainer import grpo_trainer, rloo_trainer

from surveys.trainers.cases import BETA, EOS, FIRST_WORD, LONGEST, PAD, VOCABULARY, Case, Sample
from surveys.trainers.hugging_face import arguments
from surveys.trainers.tiny import Watched, collate, model

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(FIRST_WORD, VOCABULARY))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Each word is one token, and nothing is added."""
    words = {word: i for i, word in enumerate(WORDS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"pad_token": WORDS[PAD], "eos_token": WORDS[EOS]}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **ends)


def text(tokens: tuple[int, ...]) -> str:
    return " ".join(WORDS[token] for token in tokens)


def run(kind: str, case: Case, settings: dict[str, Any], **parts: Any) -> list[Tensor]:
    """Train with the trainer and the configuration of this kind. `parts` go to the trainer."""
    net = parts.pop("model", None) or model()
    optimizer = Watched(net)
    given = {"bf16": False, "gradient_checkpointing": False, "pad_to_multiple_of": case.pad or None}
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(trl, f"{kind}Config")(**arguments(case, folder) | given | settings)
        parts |= {"processing_class": tokenizer(), "optimizers": (optimizer, None)}
        getattr(trl, f"{kind}Trainer")(net, args=config, **parts).train()
    return optimizer.judged(case)


def sft(case: Case, rank: int) -> list[Tensor]:
    """The samples have labels already, so TRL's preparation, which drops unscored ones, is off."""
    batches = [collate([one]) for one in case.samples]
    columns = ("input_ids", "labels")
    rows = [{name: batch[name][0].tolist() for name in columns} for batch in batches]
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    return run("SFT", case, settings, train_dataset=Dataset.from_list(rows))


def dpo(case: Case, rank: int) -> list[Tensor]:
    """A batch of B samples is B/2 pairs. The reference is a copy of the policy."""
    pairs = zip(case.samples[::2], case.samples[1::2], strict=True)
    rows = [
        {
            "prompt": text(chosen.prompt),
            "chosen": f" {text(chosen.completion)}",
            "rejected": f" {text(rejected.completion)}",
        }
        for chosen, rejected in pairs
    ]
    settings = {"per_device_train_batch_size": case.size // 2, "beta": BETA}
    parts = {"train_dataset": Dataset.from_list(rows), "ref_model": model()}
    return run("DPO", case, settings, **parts)


def kto(case: Case, rank: int) -> list[Tensor]:
    """A sample is desirable if its reward is positive. The reference is a copy of the policy."""
    rows = [
        {
            "prompt": text(one.prompt),
            "completion": f" {text(one.completion)}",
            "label": one.reward > 0,
        }
        for one in case.samples
    ]
    parts = {"train_dataset": Dataset.from_list(rows), "ref_model": model()}
    return run("KTO", case, {"beta": BETA}, **parts)


class Scores(LlamaForCausalLM):
    """A reward that is 0 and has the gradient of BETA · log p(sequence). Then this trainer's loss
    has the gradient of DPO's: the prompt, which both sequences have, cancels.
    """

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, **_: Any
    ) -> SequenceClassifierOutput:
        logits = super().forward(input_ids, attention_mask).logits[:, :-1]
        found = -F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none")
        score = BETA * (found * attention_mask[:, 1:]).sum(1, keepdim=True)
        return SequenceClassifierOutput(logits=score - score.detach())


def reward(case: Case, rank: int) -> list[Tensor]:
    pairs = zip(case.samples[::2], case.samples[1::2], strict=True)
    rows = [
        {
            f"{name}_ids": [*one.prompt, *one.completion]
            for name, one in zip(("chosen", "rejected"), pair, strict=True)
        }
        for pair in pairs
    ]
    plain = model()
    plain.config.num_labels = 1
    net = Scores(plain.config)
    net.load_state_dict(plain.state_dict())
    settings = {"per_device_train_batch_size": case.size // 2}
    return run("Reward", case, settings, model=net, train_dataset=Dataset.from_list(rows))


def grpo(case: Case, rank: int, loss_type: str) -> list[Tensor]:
    # As its documentation recommends.
    recommended: dict[str, dict[str, Any]] = {
        "luspo": {"importance_sampling_level": "sequence"},
        "cispo": {"epsilon_high": 5.0},
    }
    settings = {"loss_type": loss_type, "scale_rewards": "none"}
    return online("GRPO", case, settings | recommended.get(loss_type, {}))


def rloo(case: Case, rank: int) -> list[Tensor]:
    """A completion's advantage is its reward minus that of the other one."""
    return online("RLOO", case, {})


def online(kind: str, case: Case, settings: dict[str, Any]) -> list[Tensor]:
    """`generate` returns the case's completions, and nothing shuffles them. Rewards are not scaled.

    Completions of samples that are not scored are truncated: they do not end.
    """
    net = model()
    net.generate = partial(completed, case.samples)
    for module in (grpo_trainer, rloo_trainer):
        module.shuffle_sequence_dict = lambda batch: batch
    rewards = {(text(one.prompt), one.completion): one.reward for one in case.samples}
    settings |= {
        "num_generations": 2,
        "steps_per_generation": case.steps * case.generated,
        "max_steps": case.windows,
        "max_completion_length": LONGEST,
        "mask_truncated_completions": True,
        "beta": 0.0,
        "shuffle_dataset": False,
    }

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        pairs = zip(prompts, map(tuple, completion_ids), strict=True)
        return [rewards.get(pair, 0.0) for pair in pairs]

    data = Dataset.from_list([{"prompt": text(one.prompt)} for one in case.by_rank()[::2]])
    parts = {"model": net, "train_dataset": data, "reward_funcs": reward}
    return run(kind, case, settings, **parts)


def completed(samples: tuple[Sample, ...], input_ids: Tensor, **_: Any) -> Tensor:
    """The prompts (B, P), each with its next completion: (B, P + LONGEST)."""
    rows, left = [], list(samples)
    for prompt in input_ids.tolist():
        words = tuple(token for token in prompt if token != PAD)
        one = next(one for one in left if one.prompt == words)
        left.remove(one)
        tokens = one.completion if one.scored else one.completion[:-1]
        rows.append([*tokens, *[PAD if one.scored else FIRST_WORD] * (LONGEST - len(tokens))])
    return torch.cat([input_ids, torch.tensor(rows)], dim=1)
