"""What this project can prove on the GPUs that are here: `make gpu`, or ``python -m tests.gpu``.

Each part proves one claim about the code on GPUs, and names the ranks, devices, and backend. With
one GPU, two ranks share it over gloo with CUDA tensors, because NCCL refuses two ranks on one GPU;
NCCL itself runs with one rank. With two or more GPUs, each rank has its own, over NCCL. What needs
more GPUs than there are is listed as not proved: nothing is skipped silently.

``--device cpu`` rehearses: every part runs on the CPU, as far as it can. This proves nothing about
GPUs, and the table says so.

Exit code: 0 if all that these GPUs can prove is proved; 1 if something failed; 2 without a GPU.
"""
