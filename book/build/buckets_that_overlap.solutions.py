"""Answers to try this chapter's checks on."""


# %% check_turns right: a flag per position
class FlagPerPosition(SendOnArrival):
    def __init__(self, module):
        super().__init__(module)
        self.order = list(module.parameters())[::-1]
        self.position = {p: i for i, p in enumerate(self.order)}
        self.ready = [False] * len(self.order)

    def gradient_arrived(self, parameter):
        self.arrived += 1
        self.ready[self.position[parameter]] = True
        for turn in range(len(self.works), len(self.order)):
            if not self.ready[turn]:
                break
            self.order[turn].grad /= dist.get_world_size()
            self.all_reduce(self.order[turn].grad)

    def finish(self):
        super().finish()
        self.ready = [False] * len(self.order)


# %% check_turns right: the gradients that have not been sent, as a list
class ListOfTheRest(SendOnArrival):
    def __init__(self, module):
        super().__init__(module)
        self.order = list(module.parameters())[::-1]
        self.rest, self.here = list(self.order), []

    def gradient_arrived(self, parameter):
        self.arrived += 1
        self.here.append(parameter)
        while self.rest and any(self.rest[0] is p for p in self.here):
            first = self.rest.pop(0)
            first.grad.div_(dist.get_world_size())
            self.all_reduce(first.grad)
        if not self.rest:
            self.rest, self.here = list(self.order), []


# %% check_turns wrong: what arrives late is sent in finish
class LateInFinish(SendOnArrival):
    def __init__(self, module):
        super().__init__(module)
        self.order = list(module.parameters())[::-1]

    def gradient_arrived(self, parameter):
        self.arrived += 1
        if parameter is self.order[len(self.works)]:
            parameter.grad /= dist.get_world_size()
            self.all_reduce(parameter.grad)

    def finish(self):
        for parameter in self.order[len(self.works) :]:
            parameter.grad /= dist.get_world_size()
            self.all_reduce(parameter.grad)
        super().finish()


# %% check_turns wrong: all are sent when the last gradient has arrived
class AllAtTheEnd(SendOnArrival):
    def __init__(self, module):
        super().__init__(module)
        self.order = list(module.parameters())[::-1]

    def gradient_arrived(self, parameter):
        self.arrived += 1
        if self.arrived == len(self.order):
            for each in self.order:
                each.grad /= dist.get_world_size()
                self.all_reduce(each.grad)


# %% check_turns wrong: it never forgets what was ready
class NeverForgets(SendOnArrival):
    def __init__(self, module):
        super().__init__(module)
        self.order, self.ready = list(module.parameters())[::-1], set()

    def gradient_arrived(self, parameter):
        self.arrived += 1
        self.ready.add(parameter)
        while len(self.works) < len(self.order):
            following = self.order[len(self.works)]
            if following not in self.ready:
                return
            following.grad /= dist.get_world_size()
            self.all_reduce(following.grad)


# %% check_turns wrong: one gradient per hook, even if more are ready
class OnePerHook(SendOnArrival):
    def __init__(self, module):
        super().__init__(module)
        self.order, self.ready = list(module.parameters())[::-1], set()

    def gradient_arrived(self, parameter):
        self.arrived += 1
        self.ready.add(parameter)
        following = self.order[len(self.works)]
        if following in self.ready:
            following.grad /= dist.get_world_size()
            self.all_reduce(following.grad)

    def finish(self):
        for following in self.order[len(self.works) :]:
            following.grad /= dist.get_world_size()
            self.all_reduce(following.grad)
        super().finish()
        self.ready.clear()


# %% check_views right: all are waited for first
class WaitsFirst(Reducer):
    def finalize(self):
        for bucket in self.buckets:
            bucket.work.wait()
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self.prepare()


# %% check_views right: views are made anew from the buffer
class ViewsMadeAnew(Reducer):
    def finalize(self):
        for bucket in self.buckets:
            bucket.work.wait()
            first = 0
            for parameter in bucket.parameters:
                part = bucket.buffer[first : first + parameter.numel()]
                parameter.grad = part.view(parameter.shape)
                first += parameter.numel()
        self.prepare()


# %% check_views wrong: only the last bucket is waited for
class WaitsForTheLast(Reducer):
    def finalize(self):
        self.buckets[-1].work.wait()
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self.prepare()


# %% check_views wrong: copies of the views
class Clones(Reducer):
    def finalize(self):
        for bucket in self.buckets:
            bucket.work.wait()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view.clone()
        self.prepare()


# %% check_views wrong: the averages are copied first
class CopiesFirst(Reducer):
    def finalize(self):
        super().finalize()
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view


# %% check_views wrong: only the first parameter of each bucket
class FirstOfEachBucket(Reducer):
    def finalize(self):
        for bucket in self.buckets:
            bucket.finish()
            bucket.parameters[0].grad = bucket.views[0]
        self.prepare()


# %% check_views right: assigned, and averaged by one call per bucket
class OneCallPerBucket(Reducer):
    @torch.no_grad()
    def finalize(self):
        for bucket in self.buckets:
            bucket.work.wait()
            for number, parameter in enumerate(bucket.parameters):
                parameter.grad = bucket.views[number]
            bucket.missing = len(bucket.parameters)
        self.order, self.launched = [], 0


# %% check_views wrong: views of a new buffer, which is a copy
class NewBuffers(Reducer):
    def finalize(self):
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.buffer = bucket.buffer.clone()
            sizes = [p.numel() for p in bucket.parameters]
            parts = bucket.buffer.split(sizes)
            pairs = zip(bucket.parameters, parts, strict=True)
            bucket.views = [part.view_as(p) for p, part in pairs]
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self.prepare()


# %% check_views wrong: assigned once, so that zero_grad takes the views away
class AssignedOnce(Reducer):
    def finalize(self):
        for bucket in self.buckets:
            bucket.work.wait()
            if not hasattr(bucket, "assigned"):
                for p, view in zip(bucket.parameters, bucket.views, strict=True):
                    p.grad = view
                bucket.assigned = True
        self.prepare()
