"""What this project can prove on the GPUs that are here: `make gpu`, or ``python -m tests.gpu``.

Each part proves one claim about the code on GPUs, and says on what: how many ranks, on which
devices, over which backend. With one GPU two ranks share it, over gloo with CUDA tensors, because
NCCL refuses two ranks on one GPU; NCCL itself runs with one rank. With two GPUs or more every rank
has its own, over NCCL. What needs more GPUs than there are is listed as not proved: nothing is
skipped silently.

``--device cpu`` rehearses: every part runs on the CPU, as far as it can. That proves nothing about
GPUs, and the table says so; it shows that the parts themselves work.

Exit code: 0 all that the GPUs here can prove is proved; 1 something failed; 2 there is no GPU.

`machine` says what is there, `proofs` what a part and a proof are, `parts` lists the parts.
"""
