"""Comm hooks: what communicates a bucket instead of the plain all-reduce.

A hook is called as `hook(state, bucket)` when a bucket's turn has come, in launch order. It returns
a Future of the gradients to use: one flat tensor as long as `bucket.buffer()`. The bucket's
gradients are local and *not* divided; the hook has to average them. Register it with
`register_comm_hook(state, hook)` on `miniddp.torch_drop_in.DistributedDataParallel` or on torch's
wrapper. `state` is the process group (None for the default one), for PowerSGD a `PowerSGDState`,
and for the hierarchical average a `HierarchicalState`.

================================  =======================================  =======================
hook                              bytes sent per byte of float32           the result
================================  =======================================  =======================
`average`                         1                                        exact
`total`                           1                                        W times the average
`hierarchical_average`            1, fewer of them between nodes           exact
`fp16_compress`, `bf16_compress`  1/2                                      11, 8 significant bits
`power_sgd`                       r (n + m) / (n m) for an n × m matrix    the best part of rank r;
                                                                           the rest is kept
================================  =======================================  =======================

Sources: torch/distributed/algorithms/ddp_comm_hooks; Vogels, Karimireddy and Jaggi, "PowerSGD:
Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from miniddp.collectives import Nodes, hierarchical_all_reduce


def average(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean over the ranks: what the wrapper computes without a hook, up to rounding.

    Divides before the sum, so that a sum of W large gradients cannot overflow.
    """
    return _sum(bucket.buffer().div_(dist.get_world_size(state)), state)


def total(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The sum over the ranks, for losses whose denominator is global already."""
    return _sum(bucket.buffer(), state)


class HierarchicalState:
    """The nodes, and one thread that averages bucket after bucket while backward goes on.

    The steps of an average wait for each other, so they need a thread. One thread and private
    groups serve all buckets, so every rank sends in launch order.

    Args:
        ranks_per_node: L. Every rank of the world has to make a state.

    Raises ValueError if the world is not made of whole nodes. Costs a thread, until `close` or the
    end of the state.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self.nodes = Nodes.groups(ranks_per_node)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hierarchical average")

    def close(self) -> None:
        """End the thread, once what is under way is done; before the groups are destroyed."""
        self.thread.shutdown()


def hierarchical_average(state: HierarchicalState, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean, by `collectives.hierarchical_all_reduce`: the least traffic between nodes.

    For CPU gradients on gloo, whose own all-reduce is a flat ring. Raises NotImplementedError for
    others: NCCL knows the machine's links, and chooses between such ways by itself.
    """
    buffer = bucket.buffer()
    if buffer.device.type != "cpu":
        raise NotImplementedError(
            f"the bucket is on {buffer.device}, and this hook is for the CPU: take "
            "comm_hooks.average, and NCCL picks the route itself"
        )
    done: Future[Exception | None] = Future()

    def average_and_tell() -> None:
        try:
            hierarchical_all_reduce(buffer, dist.ReduceOp.AVG, nodes=state.nodes)
            done.set_result(None)
        except Exception as error:
            done.set_result(error)

    def result(done: Future[Exception | None]) -> Tensor:
        # Raised here: torch's C++ would take an exception set as the result for a value.
        if (error := done.value()) is not None:
            raise error
        return buffer

    state.thread.submit(average_and_tell)
    return done.then(result)


def fp16_compress(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean, sent as float16: half the bytes; gradients above 65,504 overflow.

    Raises TypeError for complex gradients, of which only the real part would be sent.
    """
    return _compressed_average(torch.float16, state, bucket)


def bf16_compress(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean, sent as bfloat16: half the bytes, the range of float32, two to three digits.

    Raises TypeError for complex gradients, of which only the real part would be sent.
    """
    return _compressed_average(torch.bfloat16, state, bucket)


class PowerSGDState:
    """What PowerSGD keeps from one iteration to the next, on each rank, per parameter.

    It is kept per parameter and not per bucket, so it stays with its gradient when the buckets are
    rebuilt.

    Args:
        process_group: the ranks that average; the default group when None.
        rank: r, the rank of the approximation (not the number of a process).
        start_after: so many iterations are averaged exactly first, at least 2 as in torch.
        error_feedback: add what one step's approximation lost to the next step's gradient.
            Costs one more buffer as large as the gradients. Without it training may not converge.

    Raises ValueError if `rank` or `start_after` is too small.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        rank: int = 1,
        start_after: int = 2,
        error_feedback: bool = True,
    ):
        if rank < 1:
            raise ValueError(f"the rank of the approximation must be at least 1, but is {rank}")
        if start_after < 2:
            raise ValueError(
                f"start_after must be at least 2, but is {start_after}: early gradients change too "
                "fast for an approximation that starts from the last one"
            )
        self.process_group = process_group
        self.rank, self.start_after, self.error_feedback = rank, start_after, error_feedback
        self.iteration = 0
        self.errors: dict[Tensor, Tensor] = {}
        self.factors_q: dict[Tensor, Tensor] = {}
        self.in_use: dict[int, list[Tensor]] = {}  # by bucket: what the last callback reads

    def factor_of(self, parameter: Tensor, matrix: Tensor) -> Tensor:
        """The last Q of a parameter's gradient; at first orthonormal random columns.

        Every rank draws the same ones, whatever else it has drawn: the seed is the number of
        factors so far, and buckets come in the same order on every rank.
        """
        if parameter not in self.factors_q:
            generator = torch.Generator().manual_seed(len(self.factors_q))
            drawn = torch.randn(matrix.shape[1], self.rank, generator=generator)
            self.factors_q[parameter] = _orthonormal(drawn).to(matrix)
        return self.factors_q[parameter]

    def add_errors(self, matrices: Mapping[Tensor, Tensor]) -> None:
        """Add to each gradient what the last step's approximation lost of it."""
        for parameter, matrix in matrices.items():
            if parameter in self.errors:
                matrix.add_(self.errors.pop(parameter))


def power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean, sent as two thin factors per matrix: M ≈ P Qᴴ with r columns each.

    One step of subspace iteration, started from the last iteration's Q: P = M Q, averaged and made
    orthonormal; Q = Mᴴ P, averaged. Vectors, and matrices too small to gain, are averaged exactly.

    Three collectives per bucket: the exact part, P, Q. Backward waits for P: started from a
    callback, the collectives of two buckets could run in different orders on different ranks.
    Run over gloo on a CPU only; over NCCL it was read against torch's hook of the same name.
    """
    exactly = state.iteration < state.start_after
    state.iteration += bucket.is_last()
    if exactly:
        return average(state.process_group, bucket)
    group = state.process_group

    # 1. The parts: matrices, with what was lost of them last time, and everything else.
    matrices, exact = _worth_compressing(bucket, state.rank)
    state.add_errors(matrices)
    wanted = {p: m.clone() for p, m in matrices.items()} if state.error_feedback else {}

    # 2. The exact part travels while P is computed, averaged, and made orthonormal.
    exact_flat, exact_done = _start_average(exact, bucket.buffer(), group)
    factors_p = [matrix @ state.factor_of(p, matrix) for p, matrix in matrices.items()]
    flat_p, p_done = _start_average(factors_p, bucket.buffer(), group)
    p_done.wait()
    factors_p = [_orthonormal(p) for p in _parts_like(factors_p, flat_p)]

    # 3. Q travels while backward goes on.
    factors_q = [m.mH @ p for m, p in zip(matrices.values(), factors_p, strict=True)]
    flat_q, q_done = _start_average(factors_q, bucket.buffer(), group)
    # With NCCL the callback runs at once, on its own CUDA stream. Keep the memory it reads: freed
    # now, it could be reused by backward before that stream has read it.
    state.in_use[bucket.index()] = [exact_flat, *factors_p]

    def decompress(done: Future) -> Tensor:
        done.wait()
        exact_done.wait()
        for gradient, mean in zip(exact, _parts_like(exact, exact_flat), strict=True):
            gradient.copy_(mean)
        new_q = _parts_like(factors_q, flat_q)
        for (parameter, m), p, q in zip(matrices.items(), factors_p, new_q, strict=True):
            state.factors_q[parameter] = q
            torch.matmul(p, q.mH, out=m)
            if state.error_feedback:
                state.errors[parameter] = wanted[parameter].sub_(m)
        return bucket.buffer()

    return q_done.get_future().then(decompress)


def _sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Future[Tensor]:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _compressed_average(
    dtype: torch.dtype, group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> Future[Tensor]:
    buffer = bucket.buffer()
    if buffer.is_complex():
        raise TypeError(
            f"bucket {bucket.index()} holds {buffer.dtype} gradients, and {dtype} has no imaginary "
            "part: use the hook `average`"
        )
    compressed = buffer.to(dtype).div_(dist.get_world_size(group))
    return _sum(compressed, group).then(lambda done: buffer.copy_(done.value()))


def _worth_compressing(
    bucket: dist.GradBucket, rank: int
) -> tuple[dict[Tensor, Tensor], list[Tensor]]:
    """Gradients as matrices (all dimensions but the first flattened), by parameter; the others."""
    matrices: dict[Tensor, Tensor] = {}
    exact = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        n = gradient.shape[0] if gradient.ndim else 1
        m = gradient.numel() // n if n else 0
        if gradient.ndim > 1 and rank * (n + m) < n * m and rank <= min(n, m):
            matrices[parameter] = gradient.view(n, m)
        else:
            exact.append(gradient)
    return matrices, exact


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span the same space; in float32 where QR has no narrower kernel."""
    wide = columns.float() if columns.dtype in (torch.float16, torch.bfloat16) else columns
    return torch.linalg.qr(wide).Q.to(columns)


def _start_average(
    tensors: Sequence[Tensor], like: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, dist.Work]:
    """All `tensors` in one flat one, whose average is under way; without any, an empty one."""
    flat = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])
    flat.div_(dist.get_world_size(group))
    return flat, dist.all_reduce(flat, group=group, async_op=True)


def _parts_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """`flat` cut into parts of the shapes of `tensors`."""
    parts = flat.split([tensor.numel() for tensor in tensors]) if tensors else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
