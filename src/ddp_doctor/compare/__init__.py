"""`compare`: two commands from the same weights, and what their optimizers get.

    python -m ddp_doctor compare "torchrun --nproc-per-node 2 train.py --batch 8" \\
        "python train.py --batch 16"

`commands` runs one after the other and leaves nothing behind, `record` writes in their processes,
and `verdict` compares what was written.
"""
