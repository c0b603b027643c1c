"""PyTorch's own tests of DistributedDataParallel, on a CPU or one GPU, with the class swapped.

The tests are loaded from the installed torch, and, with ``--file``, from
PyTorch's repository: none of their text is kept here, and none of their assertions is touched. Two
things are replaced around them: the class that the name ``DistributedDataParallel`` stands for
(`swap`), and the device that tensors are placed on (`placement`). What torch's own DDP passes in
this way, constructing the class, is what another class has to pass: ``table.json`` has the tests
that ship, with the reason for each that cannot run here.

``python -m tests.torch_suite --help`` runs them; `runner` says how.
"""
