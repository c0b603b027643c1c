"""Answers to try this chapter's checks on."""


# %% check_plan right: all orders are gathered, and the first is used
class GathersAllOrders(Rebuilding):
    def rebuild(self):
        if not self.rebuilt and self.last_order:
            own = torch.tensor(self.last_order)
            orders = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(orders, own)
            self.use(pack(self.parameters, orders[0].tolist(), self.cap_bytes))
            self.rebuilt = True


# %% check_plan right: the plan as one padded tensor
class PaddedPlan(Rebuilding):
    def rebuild(self):
        if self.rebuilt or not self.last_order:
            return
        plan = pack(self.parameters, self.last_order, self.cap_bytes)
        number_of = torch.empty(2, len(self.parameters), dtype=torch.int64)
        for number, indices in enumerate(plan):
            for index in indices:
                place = self.last_order.index(index)
                number_of[:, index] = torch.tensor([number, place])
        dist.broadcast(number_of, src=0)
        numbers, places = number_of.tolist()
        order = sorted(range(len(places)), key=places.__getitem__)
        plan = [[] for _ in set(numbers)]
        for index in order:
            plan[numbers[index]].append(index)
        self.use(plan)
        self.rebuilt = True


# %% check_plan wrong: the order of definition, the same on every rank
# orders[0].tolist() → range(len(own))


# %% check_plan wrong: sent, but the own order is used
# orders[0].tolist() → self.last_order


# %% check_plan wrong: the order is a tensor, not a list of integers
# orders[0].tolist() → orders[0]


# %% check_plan wrong: rank 0 has its own plan, the others the order of definition
# orders[0].tolist() → self.last_order if dist.get_rank() == 0 else range(len(own))


# %% check_plan wrong: sent twice
# dist.all_gather(orders, own) → dist.all_gather(orders, own)
#             dist.all_gather(orders, own)


# %% check_report right: a sentence in which the name of a parameter is a part of a word
class SaysReplace(DDP):
    def forward(self, *inputs):
        if self.reducer.expecting and self.reducer.order:
            named = self.module.named_parameters()
            names = [name for name, p in named if p.requires_grad]
            missing = sorted(set(range(len(names))) - set(self.reducer.order))
            raise RuntimeError(
                "zero_grad would replace these missing gradients: "
                f"{', '.join(names[i] for i in missing)}."
            )
        return super().forward(*inputs)


# %% check_report right: hooks of its own note what arrives
class OwnHooks(DDP):
    def __init__(self, module, *options):
        super().__init__(module, *options)
        self.arrived, self.counts = set(), True
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self.arrives(name)
                )

    def arrives(self, name):
        if self.counts:
            self.arrived.add(name)

    def forward(self, *inputs):
        trainable = {n for n, p in self.module.named_parameters() if p.requires_grad}
        if self.arrived and self.arrived != trainable:
            raise RuntimeError(f"no gradient: {sorted(trainable - self.arrived)}")
        self.arrived.clear()
        self.counts = self.sync
        return super().forward(*inputs)


# %% check_report wrong: a backward under no_sync is counted, too
# return super().forward(*inputs) → output = super().forward(*inputs)
#         if not self.sync:
#             self.reducer.announce(output)
#         return output


# %% check_report wrong: it looks at .grad, which zero_grad has cleared
# names[i] for i in missing →
# n for n, p in self.module.named_parameters() if p.grad is None


# %% check_report wrong: frozen parameters shift the names
# if p.requires_grad → if True
# range(len(names)) → range(len(self.reducer.parameters))


# %% check_report wrong: a forward without a backward is an error
# self.reducer.expecting and self.reducer.order → self.reducer.expecting


# %% check_report wrong: only the first missing parameter
# for i in missing → for i in missing[:1]


# %% check_report wrong: the parameters that did arrive
# for i in missing → for i in self.reducer.order


# %% check_report wrong: whole layers, also where half of one is missing
# names[i] for i in missing →
# n for n in names if n[:9] in {names[i][:9] for i in missing}


# %% check_report wrong: another kind of error
# RuntimeError → ValueError


# %% check_invariants right: everything is counted anew
class CountsAnew(WithUnused):
    def announce(self, output):
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        self.launched, self.order, self.expecting = 0, [], True
        self.absent = unreached(self.parameters, output) if self.find_unused else []


# %% check_invariants right: the same buckets are made again
class MakesBucketsAgain(WithUnused):
    def announce(self, output):
        where = {id(p): index for index, p in enumerate(self.parameters)}
        self.use([[where[id(p)] for p in b.parameters] for b in self.buckets])
        self.expecting = True
        self.absent = unreached(self.parameters, output) if self.find_unused else []


# %% check_invariants wrong: an announced backward that never came keeps its counts
# in self.buckets: → in () if self.expecting else self.buckets:


# %% check_invariants wrong: a DDP of its own, without rank 0's weights
class OwnStartToo(DDP):
    def broadcast(self, tensors):
        pass


# %% check_window right: all but the last in one block
def two_parts(ddp, window):
    def backward(tokens):
        (loss_of(ddp(tokens[:, :-1]), tokens) / len(window)).backward()

    with ddp.no_sync():
        for tokens in window[:-1]:
            backward(tokens)
    backward(window[-1])


# %% check_window right: gradients scaled afterwards
def scaled_afterwards(ddp, window):
    for number, tokens in enumerate(window, start=1):
        ddp.sync = number == len(window)
        loss_of(ddp(tokens[:, :-1]), tokens).backward()
    for parameter in ddp.parameters():
        parameter.grad /= len(window)


# %% check_window wrong: all send
# with ddp.no_sync(): → if True:


# %% check_window wrong: made for four micro-batches
# len(window) → 4


# %% check_plan blind number.* → 1: any rank may make the plan
# %% check_window blind arguments: the last element: the window is not read again
# %% check_window blind calls: each rank calls it once
# %% check_plan blind statement, line 4: done twice, it is the same
# %% check_plan blind frozen: no parameter is frozen
# %% check_invariants blind frozen: a reducer holds no frozen parameter
# %% check_invariants blind \[:-1\]: the exception comes before the last bucket
