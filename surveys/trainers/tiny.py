"""The tiny model, its batches, the optimizer that keeps gradients, and the wanted gradient."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from labkit.testing import compare
from surveys.trainers.cases import EOS, PAD, VOCABULARY, Case, Deal, Sample, wanted

IGNORED = -100


def model(name: str = "llama") -> nn.Module:
    """About 4,000 parameters in float32, the same on every rank and in every run."""
    torch.manual_seed(0)
    tokens = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    # With the usual range, 0.02, all samples have nearly the same gradient.
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
    blocks = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name in ("llama", "lora"):
        net = LlamaForCausalLM(LlamaConfig(**tokens, **sizes, **blocks, intermediate_size=32))
        return adapted(net) if name == "lora" else net
    drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    crosses = {"add_cross_attention": name == "captioner"}
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, **tokens, **sizes, **drops, **crosses)
    if name == "gpt2":
        return GPT2LMHeadModel(config)
    images = ViTConfig(**blocks, intermediate_size=32, image_size=8, patch_size=4)
    joined = VisionEncoderDecoderConfig.from_encoder_decoder_configs(images, config)
    joined.pad_token_id, joined.decoder_start_token_id = PAD, EOS
    return Captioner(joined)


def adapted(net: nn.Module) -> nn.Module:
    """The same, with PEFT's LoRA on two of its layers; only LoRA is trained."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(
        net, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


class Captioner(VisionEncoderDecoderModel):
    """transformers' encoder-decoder for images; the first token of a prompt makes the image."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Any:
        pixels = torch.arange(1.0, 65.0).view(8, 8) * input_ids[:, :1, None, None]
        return super().forward(pixels.sin().expand(-1, 3, -1, -1), **kwargs)


def loader(case: Case, rank: int) -> DataLoader:
    """The micro-batches of `rank`, with `step_tokens`: the scored tokens of their step."""
    return DataLoader(case.own(rank), case.size, collate_fn=partial(collate_counted, pad=case.pad))


def union_loader(
    case: Deal, rank: int, samples: Sequence[Any], collate_fn: Callable[..., Any] | None = None
) -> DataLoader:
    """The samples that `rank` has in each step, for losses that do not split."""
    own = [samples[i] for i in case.ranks[rank]]
    return DataLoader(own * case.windows, len(own), collate_fn=collate_fn)


def collate_counted(rows: Sequence[dict[str, Any]], pad: int) -> dict[str, Tensor]:
    tokens = max(one["step_tokens"] for one in rows)
    return collate(rows, pad) | {"step_tokens": torch.tensor(tokens)}


def collate(samples: Sequence[Any], pad: int = 0) -> dict[str, Tensor]:
    """A right-padded batch (B, T); labels are -100 but for the tokens that are scored.

    A sample is a Sample, or a dict with its fields.
    """
    names = Sample._fields
    samples = [Sample(*(of[n] for n in names)) if isinstance(of, dict) else of for of in samples]
    tokens = [torch.tensor([*one.prompt, *one.completion]) for one in samples]
    labels = [of.clone() for of in tokens]
    for of, one in zip(labels, samples, strict=True):
        of[: len(one.prompt) if one.scored else None] = IGNORED
    width = max(map(len, tokens))
    more = (0, -width % pad if pad else 0)
    inputs = F.pad(pad_sequence(tokens, True, PAD), more, value=PAD)
    wanted = F.pad(pad_sequence(labels, True, IGNORED), more, value=IGNORED)
    return {"input_ids": inputs, "attention_mask": (inputs != PAD).long(), "labels": wanted}


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss of every token, (B, T − 1); 0 where it is not scored."""
    names = ["input_ids", "attention_mask"]
    if isinstance(model, Captioner):  # it shifts the labels, not the logits
        logits = model(**{name: batch[name] for name in (*names, "labels")}).logits[:, 1:]
    else:
        logits = model(**{name: batch[name] for name in names}).logits[:, :-1]
    return F.cross_entropy(
        logits.transpose(1, 2), batch["labels"][:, 1:], ignore_index=IGNORED, reduction="none"
    )


def gradient_of(weighted: list[tuple[Sample, float]], likely: bool, network: str) -> list[Tensor]:
    """The gradient of Σ weight · Σ token losses, from one backward in one process.

    If `likely`, each token's loss is multiplied by its probability, which carries no gradient.
    """
    batch = collate([one for one, _ in weighted])
    weights = torch.tensor([weight for _, weight in weighted])

    def loss(net: nn.Module) -> Tensor:
        found = losses(net, batch)
        return ((found * found.detach().neg().exp() if likely else found).sum(1) * weights).sum()

    return compare.gradient_of(model(network), loss)


def references(case: Case, promise: str, network: str) -> dict[str, list[Tensor]]:
    """The promised gradient, and those of the two usual means of means."""
    likely = promise.startswith("p ×")
    return {
        name: gradient_of(parts, likely, network) for name, parts in wanted(case, promise).items()
    }


def trained(
    case: Case | Deal, net: nn.Module, batches: Iterable[Any], loss_of: Callable[..., Tensor]
) -> list[Tensor]:
    """A loop under DDP: a step after every K micro-batches, and after the last one.

    `loss_of` gets the network and a batch.
    """
    watched = Watched(net)
    wrapped = DistributedDataParallel(net) if case.world > 1 else net
    micro_batches = list(batches)
    for i, batch in enumerate(micro_batches, 1):
        loss_of(wrapped, batch).backward()
        if i % case.steps == 0 or i == len(micro_batches):
            watched.step()
            watched.zero_grad()
    return watched.judged(case)


class NoStepError(Exception):
    """The optimizer was called more or less often than the case has windows."""


def whole(tensor: Tensor) -> Tensor:
    """A copy; if the tensor is sharded, of all shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


class Watched(torch.optim.SGD):
    """Keeps what each step receives, in `seen`, and leaves the weights as they are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad], lr=0.0)
        self.seen: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        parameters = [p for group in self.param_groups for p in group["params"]]
        got = [whole(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters]
        self.seen.append(got)
        return loss

    def judged(self, case: Case | Deal, sharded: bool = False) -> list[Tensor]:
        """The gradient of the judged step. Raises NoStepError if it was not taken, and TypeError if
        the parameters should be `sharded` and are not.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        if sharded and not all(isinstance(p, DTensor) for p in parameters):
            raise TypeError("the parameters of the optimizer are not sharded")
        if len(self.seen) != case.windows:
            raise NoStepError(f"{len(self.seen)} steps were taken, not {case.windows}")
        return self.seen[case.judged]
