"""transformers' Trainer, and the loop of Accelerate's guide."""

import tempfile
from functools import partial
from itertools import islice
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from surveys.trainers.cases import Case
from surveys.trainers.plain import own_group
from surveys.trainers.tiny import IGNORED, Watched, adapted, collate, losses, model


def arguments(case: Case, folder: str) -> dict[str, Any]:
    """What all trainers of this family are given: one pass in the given order, no clipping."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": case.size,
        "gradient_accumulation_steps": case.steps,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


def trainer(
    case: Case, rank: int, average: bool, net: nn.Module | str = "llama", **parts: Any
) -> list[Tensor]:
    """`parts` go to the Trainer."""
    net = model(net) if isinstance(net, str) else net
    optimizer = Watched(net)
    with tempfile.TemporaryDirectory() as folder:
        given = arguments(case, folder) | {"average_tokens_across_devices": average}
        given = TrainingArguments(**given)
        parts |= {"data_collator": partial(collate, pad=case.pad), "optimizers": (optimizer, None)}
        Trainer(net, given, train_dataset=rows(case), **parts).train()
    return optimizer.judged(case)


def rows(case: Case) -> list[dict[str, Any]]:
    """All samples as plain data: these trainers deal them themselves."""
    return [one._asdict() for one in case.samples]


def accelerate_loop(case: Case, rank: int, sharded: bool = False) -> list[Tensor]:
    """As in the guide: summed losses × K × W / N, with N gathered before the first backward.

    With `sharded`, Accelerate is told to use FSDP2: on CPUs it takes DDP whatever plugin it gets.
    """
    plugin = None
    if sharded:
        own_group()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.steps, fsdp_plugin=plugin)
    if plugin:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    net = model()
    watched = Watched(net)
    loader = DataLoader(rows(case), case.size, collate_fn=partial(collate, pad=case.pad))
    net, optimizer, loader = accelerator.prepare(net, watched, loader)
    batches = iter(loader)
    while window := list(islice(batches, case.steps)):
        count = sum((batch["labels"] != IGNORED).sum() for batch in window)
        count = accelerator.gather(count).sum().item()
        for batch in window:
            loss = losses(net, batch).sum()
            accelerator.backward(loss * case.steps * accelerator.num_processes / count)
        optimizer.step()
        optimizer.zero_grad()
    return watched.judged(case, sharded)


def loaded(case: Case, rank: int, replicas: int, lora: bool) -> list[Tensor]:
    """Its Trainer with a model that FSDP2 shards while it is loaded: W / `replicas` shards.

    With several `replicas`, the Trainer defers only their all-reduce: `set_requires_all_reduce`.

    With `lora`, PEFT's adapter is attached to the sharded model: its parameters are not sharded.
    """
    sizes = DistributedConfig(fsdp_size=case.world // replicas, dp_replicate_size=replicas)
    whole = model()
    given = {"config": whole.config, "state_dict": whole.state_dict()}
    net = LlamaForCausalLM.from_pretrained(None, distributed_config=sizes, **given)
    if not isinstance(net, FSDPModule):
        raise TypeError("the model is not sharded")
    return trainer(case, rank, True, adapted(net) if lora else net)
