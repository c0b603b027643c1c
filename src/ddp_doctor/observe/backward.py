"""Backward passes: the parameters they reach, the local gradients, and the loss terms.

A hook on a parameter sees the *local* gradient, before any wrapper or all-reduce combines it. The
hooks are registered when an observed backward begins and removed when it ends.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_doctor.facts.fingerprints import dense, projection
from ddp_doctor.facts.places import call, place
from ddp_doctor.facts.types import uneven
from ddp_doctor.observe import losses
from ddp_doctor.observe.patching import Args, Kwargs, Patches
from ddp_doctor.observe.random_numbers import note_state
from ddp_doctor.observe.recorder import REDUCED, Recorder
from ddp_doctor.observe.states import Backward, OptimizerState

MAX_NODES = 20_000
MAX_BACKWARDS = 512


def install(recorder: Recorder, patches: Patches) -> None:
    of = _Backwards(recorder, patches)
    for owner in (torch.Tensor, torch.autograd):
        patches.observe(owner, "backward", of.before, of.after, failed=of.abandoned)


class _Backwards:
    """The backward passes of one process."""

    def __init__(self, recorder: Recorder, patches: Patches) -> None:
        self.recorder, self.patches = recorder, patches
        self.record: Backward | None = None  # of the observed backward that runs
        self.sees_fsdp = False
        self.look = recorder.session.guard(self._look)
        self.look_early = recorder.session.guard(self._look_early)
        # By parameter with hooks: its gradient before them, and how many collectives there were.
        self.early: dict[int, tuple[Tensor | None, int]] = {}

    def before(self, args: Args, kwargs: Kwargs) -> Any:
        """Returns the record of this backward, and the nodes that it starts from."""
        recorder, session = self.recorder, self.recorder.session
        recorder.in_backward += 1
        if recorder.in_backward > 1:
            return None
        recorder.backward_count += 1
        at = place() if recorder.on else ""
        session.set_status(f"backward at {at}" if at else "backward")
        record: Backward = {"place": at, "reached": set()}
        if not recorder.on:
            return record, []
        roots = _roots(args, kwargs)
        note_state(recorder)
        record["call"] = call()
        record["scale"] = recorder.scales
        record["retained"] = _retains(args, kwargs)
        record["prepared"] = {str(wrapper.index): wrapper.prepared for wrapper in recorder.wrappers}
        record["terms"] = []
        record["values"] = [
            float(root.detach())
            for root in roots[:1]
            if root.numel() == 1 and root.device.type != "meta"
        ]
        nodes = [root.grad_fn for root in roots]
        self._watch(record)
        return record, nodes

    def _watch(self, record: Backward) -> None:
        """Look at every gradient and every loss term that this backward will reach."""
        recorder = self.recorder
        parameters = recorder.known_parameters().values()
        recorder.leftover = set()
        recorder.hooks = []
        self.early.clear()
        for parameter in parameters:
            if parameter.requires_grad and parameter.is_leaf:
                self._hook(parameter, record)
        shards = any(hasattr(parameter, "placements") for parameter in parameters)
        self.record = record
        if shards and not self.sees_fsdp:
            self.sees_fsdp = True
            self._see_fsdp()
        for term in recorder.terms:
            term |= {"hits": 0.0, "hit": False}

    def _hook(self, leaf: Tensor, record: Backward) -> None:
        """Look at a gradient after the script's own hooks, and before one that combines ranks."""
        hooks: Any = leaf._backward_hooks
        own = list(hooks.items()) if hooks else []
        if own:
            first = leaf.register_hook(partial(self.look_early, id(leaf)))
            self.recorder.hooks.append(first)
            early = hooks[first.id]
            hooks.clear()  # torch calls them as they came into the dict, not in an order of its own
            hooks.update([(first.id, early), *own])
        self.recorder.hooks.append(leaf.register_hook(partial(self.look, leaf, record)))

    def _look_early(self, key: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.early[key] = projection(gradient), self.recorder.collective_count

    def _see_fsdp(self) -> None:
        """Look at the whole gradients of fully_shard: only there is what one rank has computed.

        Private, like the attributes that are read; without them nothing is measured.
        """
        try:
            from torch.distributed.fsdp._fully_shard import _fsdp_param_group as file
        except ImportError:
            return
        group: Any = file.FSDPParamGroup
        self.patches.observe(group, "post_backward", self.gather_local, self.keep_local)

    def gather_local(self, args: Args, kwargs: Kwargs) -> None:
        """fully_shard is about to reduce the gradients of a group, or to keep them for later."""
        recorder, record = self.recorder, self.record
        for parameter, value in _whole(args[0]) if record is not None and recorder.on else ():
            key = id(parameter)
            recorder.by_fsdp.add(key)
            added = value - recorder.waiting.pop(key, 0.0)
            if not added.any():
                continue
            self._note_leftover(parameter)
            recorder.local[key] = recorder.local.get(key, 0.0) + added
            if record is not None:
                record["reached"].add(key)

    def keep_local(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        """What fully_shard has kept will be there again after the next backward."""
        if self.recorder.on:
            kept = {id(parameter): value for parameter, value in _whole(args[0]) if value.any()}
            self.recorder.waiting |= kept

    def _note_leftover(self, parameter: Tensor) -> None:
        """Whether the gradient that the last step used is still there."""
        grad, used = parameter.grad, self.recorder.used.get(id(parameter))
        # None: cannot be compared; 0: adds nothing
        now = None if grad is None or used is None or not used.any() else projection(grad)
        if now is not None and used is not None and torch.equal(used, now):
            self.recorder.leftover.add(id(parameter))

    def _look(self, parameter: Tensor, record: Backward, gradient: Tensor | None) -> None:
        """A local gradient has arrived: add it up, and see what it is added to.

        `gradient`: None if a function of the script's own returned none.
        """
        if gradient is None:
            return
        recorder, key = self.recorder, id(parameter)
        record["reached"].add(key)
        value = projection(gradient)
        early, calls = self.early.pop(key, (value, recorder.collective_count))
        if calls != recorder.collective_count:
            value = early  # a hook of the script's own has combined the ranks
        if value is None:
            return
        grad = parameter.grad
        own = None if grad is None else dense(grad)
        fresh = grad is None or own is None or (grad.layout == torch.strided and not own.any())
        before = 0.0 if fresh else recorder.local.get(key, 0.0)
        if not fresh:
            self._note_leftover(parameter)
        elif any(key in one.get("reached", ()) for one in recorder.all_backwards()):
            before = math.nan  # the script keeps what an earlier backward of this step has computed
        recorder.local[key] = before + value

    def after(self, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
        recorder = self.recorder
        recorder.in_backward -= 1
        if recorder.in_backward or token is None:
            return
        record, nodes = token
        self._remove_hooks()
        self.record = None
        recorder.session.set_status("after backward")
        # A hook may step an optimizer: observing can begin or end while backward runs.
        observed = recorder.on and "call" in record
        if observed:
            self._note_terms(record, nodes)
        for wrapper in recorder.wrappers:
            if not observed or record["wrappers"].get(str(wrapper.index)):
                wrapper.prepared = None
        for state in recorder.optimizers.values() if observed else ():
            self._hand_to(state, record)

    def _note_terms(self, record: Backward, nodes: list[Any]) -> None:
        """Which losses and wrapped models this backward went through."""
        recorder = self.recorder
        for node in _nodes(nodes) if recorder.reduced_losses else ():
            if node.metadata.get(REDUCED) in recorder.reduced_losses:
                recorder.reduced_losses[node.metadata[REDUCED]]["needed"] = True
        hit = _terms(recorder, nodes)
        record["terms"] = [losses.fact_of(term) for term in hit[:40]]
        used = {id(term) for term in hit}
        recorder.terms = [term for term in recorder.terms if id(term) not in used]
        record["wrappers"] = _reached(recorder, record)

    def _hand_to(self, state: OptimizerState, record: Backward) -> None:
        """The backward belongs to an optimizer's next step if it reached its parameters."""
        mine = {id(parameter) for parameter in state.parameters()}
        if mine and len(state.pending) >= MAX_BACKWARDS:
            state.cut = True
        elif mine and (mine & record["reached"] or not record["reached"]):
            if not state.pending:
                state.leftover = len(mine & self.recorder.leftover)
            state.pending.append(record)
            self.recorder.note_gradients(state)

    def abandoned(self, error: BaseException) -> None:
        self.recorder.in_backward = max(0, self.recorder.in_backward - 1)
        if self.recorder.in_backward == 0:
            self._remove_hooks()

    def _remove_hooks(self) -> None:
        for handle in self.recorder.hooks:
            handle.remove()
        self.recorder.hooks = []


def _whole(group: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each sharded parameter of a group of fully_shard, and its whole gradient's projection."""
    for one in getattr(group, "fsdp_params", ()):
        own = getattr(getattr(one, "_unsharded_param", None), "grad", None)
        parts = [own, getattr(one, "unsharded_accumulated_grad", None)]
        seen = [projection(part) for part in parts if part is not None]
        nothing = torch.zeros(1, device="cpu")
        yield one.sharded_param, sum((part for part in seen if part is not None), nothing)


def _roots(args: Args, kwargs: Kwargs) -> list[Tensor]:
    first = args[0] if args else kwargs.get("tensors")
    if isinstance(first, Tensor):
        return [first]
    if isinstance(first, Iterable):
        return [root for root in first if isinstance(root, Tensor)]
    return []


def _retains(args: Args, kwargs: Kwargs) -> bool:
    """Whether this backward keeps its graph, so that another one can run through it."""
    given = {**dict(zip(("retain_graph", "create_graph"), args[2:4], strict=False)), **kwargs}
    return bool(given.get("retain_graph") or given.get("create_graph"))


def _nodes(roots: list[Any], stop: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """The nodes of a graph, at most `MAX_NODES` of them; none behind one at which to `stop`."""
    seen = {node for node in roots if node is not None}
    todo = list(seen)
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        yield node
        for following, _ in () if stop is not None and stop(node) else node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def _terms(recorder: Recorder, roots: list[Any]) -> list[dict[str, Any]]:
    """The loss functions that the gradient reached, and the reductions that it meets first, unless
    all items of these functions have one weight.
    """
    hit = [term for term in recorder.terms if term.get("hit")]
    of_losses = [term for term in hit if term["loss"]]
    if of_losses and not any(map(uneven, of_losses)):
        return of_losses
    numbers = {term["node"] for term in hit}
    tops = numbers
    if len(numbers) > 1:
        met = _nodes(roots, stop=lambda node: node.metadata.get(losses.NODE) in numbers)
        tops = {node.metadata.get(losses.NODE) for node in met}
    return of_losses + [term for term in hit if term["node"] in tops and not term["loss"]]


def _reached(recorder: Recorder, record: Backward) -> dict[str, int]:
    """How many parameters of each wrapped model have received a gradient."""
    modules = [(str(wrapper.index), wrapper.module()) for wrapper in recorder.wrappers]
    return {
        index: len({id(parameter) for parameter in module.parameters()} & record["reached"])
        for index, module in modules
        if module is not None
    }
