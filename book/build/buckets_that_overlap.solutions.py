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


# %% check_turns wrong: all are sent when the last gradient has arrived
# if not self.ready[turn]: → if not all(self.ready):


# %% check_turns right: it keeps no log
# self.all_reduce(self.order[turn].grad) →
# self.works.append(dist.all_reduce(self.order[turn].grad, async_op=True))


# %% check_turns wrong: logged in turn, and sent by finish
# self.all_reduce(self.order[turn].grad) → self.works.append(self.order[turn].grad)
#             self.log.append((self.order[turn].grad.nbytes, self.arrived))
# super().finish() → for gradient in self.works:
#             dist.all_reduce(gradient)
#         self.works.clear()
#         self.arrived = 0


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


# %% check_views wrong: copies of the views
# parameter.grad = view → parameter.grad = view.clone()


# %% check_views wrong: the averages are copied first
# bucket.work.wait() → bucket.finish()


# %% check_views wrong: the averages are copied, in the buffer
# parameter.grad = view → parameter.grad = view.copy_(view.clone())


# %% check_views wrong: assigned once, so that zero_grad takes the views away
# parameter.grad = view → if not hasattr(parameter, "seen"):
#                     parameter.grad = view
#                 parameter.seen = True


# %% check_turns blind statement, line 18: a second finish waits for nothing
# %% check_turns blind NaN|clamped: no gradient is NaN, or above 10
# %% check_turns blind ved .= 1: the check counts what has arrived by itself
# %% check_views blind statement, line [34]: done twice, it is the same
# %% check_views blind frozen: no parameter is frozen
