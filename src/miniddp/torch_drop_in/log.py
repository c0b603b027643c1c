"""What `_get_ddp_logging_data` returns, by torch's keys: settings, buckets, and times.

Source: torch/csrc/distributed/c10d/logger.cpp.
"""

import os
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist

_DTYPE_NAMES = {torch.float32: "float", torch.float64: "double", torch.float16: "c10::Half"}
# Torch's keys, and the environment variables that they report.
_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_ENVIRONMENT_OF_GLOO = {
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}


class Log:
    """The data of `_get_ddp_logging_data`; an iteration's times are read at the next forward."""

    _FULLY_SAMPLED = 10

    def __init__(self, ddp: Any):
        self.reducer = ddp.reducer
        self.iteration = 0
        self.sample_rate = 100
        self.sums: dict[str, int] = {}
        self.samples = 0
        self.logging_data: dict[str, Any] = {}
        self.initial_buckets = _bucket_bytes(ddp.reducer)

    def forward_begins(self) -> None:
        """Read the times of the iteration that ended; count the one that begins."""
        sampled = self.iteration <= self._FULLY_SAMPLED or self.iteration % self.sample_rate == 0
        if sampled and self.iteration > 0:
            self._sample()
        self.reducer.times["forward_start"] = perf_counter_ns()
        self.iteration += 1

    def _sample(self) -> None:
        times = self.reducer.times
        if "comm_end" not in times or "forward_start" not in times:
            return
        self.samples += 1
        spans = {
            "forward_compute_time": ("forward_start", "backward_start"),
            "backward_compute_time": ("backward_start", "compute_end"),
            "backward_comm_time": ("comm_start", "comm_end"),
            "backward_compute_comm_overlap_time": ("comm_start", "compute_end"),
        }
        for name, (start, end) in spans.items():
            span = times[end] - times[start]
            self.sums[name] = self.sums.get(name, 0) + span
            self.logging_data[name] = span
            self.logging_data[f"avg_{name}"] = self.sums[name] // self.samples
        self.logging_data |= {
            "iteration": self.iteration,
            "forward_compute_time_start": times["forward_start"],
            "backward_compute_time_start": times["backward_start"],
            "backward_compute_time_end": times["compute_end"],
            "backward_comm_time_start": times["comm_start"],
            "backward_comm_time_end": times["comm_end"],
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, self.reducer.order)),
            "num_buckets_reduced": self.reducer.reduced_buckets,
            "unused_parameter_size": sum(
                self.reducer.parameters[index].nbytes for index in self.reducer.usage.unreachable
            ),
        }

    def snapshot(self, ddp: Any) -> dict[str, Any]:
        """All data, by torch's names."""
        reducer = self.reducer
        dtypes = {p.dtype: None for p in reducer.parameters}
        environment = dict(_ENVIRONMENT)
        backend = ddp.process_group.name()
        if backend == "gloo":
            environment |= _ENVIRONMENT_OF_GLOO
            # There is no public way to ask; this is the only use.
            self.logging_data["gloo_num_threads"] = int(dist.ProcessGroupGloo._Options()._threads)
        data = {
            "iteration": self.iteration,
            "world_size": ddp.process_group.size(),
            "rank": ddp.process_group.rank(),
            "module_name": type(ddp.module).__name__,
            "device_ids": ", ".join(map(str, ddp.device_ids or ())),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "is_multi_device_module": int(len({p.device for p in reducer.parameters}) > 1),
            "has_sync_bn": int(any("SyncBatchNorm" in type(m).__name__ for m in ddp.modules())),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "static_graph": int(ddp.static_graph),
            "backend_name": backend,
            "dtypes": ", ".join(sorted(_DTYPE_NAMES.get(dtype, str(dtype)) for dtype in dtypes)),
            "total_parameter_size_bytes": sum(p.nbytes for p in reducer.parameters),
            "num_parameter_tensors": len(reducer.parameters),
            "bucket_sizes": self.initial_buckets,
            "has_rebuilt_buckets": int(reducer.has_rebuilt_bucket),
            "join_uneven_inputs": ddp._joins_uneven_inputs,
        }
        if reducer.has_rebuilt_bucket:
            data["rebuilt_bucket_sizes"] = _bucket_bytes(reducer)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, bucket.indices)) for bucket in reducer.buckets
            )
        if reducer.last_error is not None:
            data |= {"has_error": 1, "error": reducer.last_error}
        data |= {key: os.environ.get(name, "N/A") for key, name in environment.items()}
        return data | self.logging_data


def _bucket_bytes(reducer: Any) -> str:
    return ", ".join(str(sum(p.nbytes for p in bucket.parameters)) for bucket in reducer.buckets)
