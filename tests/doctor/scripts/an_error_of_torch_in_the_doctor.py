# not judged: The doctor failed: RuntimeError: odd
class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ == "clone":
            raise RuntimeError("odd")
        return super().__torch_function__(function, types, args, kwargs)

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("odd", torch.ones(2).as_subclass(Odd))

    def forward(self, out):
        return out.pow(4).mean()

update(Loss()(model(torch.randn(8, 6))))
