"""Answers to try this chapter's checks on."""

# %% check_findings right: an attribute instead of the context
with_an_attribute = my_script.replace(
    "        with model.no_sync():\n",
    "        if True:\n            model.require_backward_grad_sync = micro == 3\n",
).replace("loss.backward()", "(loss / 4).backward()")

# %% check_findings right: every micro-batch is averaged
every_micro_batch = my_script.replace("with model.no_sync():", "if True:").replace(
    "loss.backward()", "(loss / 4).backward()"
)

# %% check_findings wrong: divided, but never averaged
never_averaged = my_script.replace("loss.backward()", "(loss / 4).backward()")

# %% check_findings wrong: averaged, but not divided
not_divided = my_script.replace("with model.no_sync():", "if True:")

# %% check_findings wrong: divided by eight
# loss / 4 → loss / 8


# %% check_findings wrong: the first micro-batch is averaged instead of the last
# micro == 3 → micro == 0


# %% check_findings wrong: one micro-batch
one_micro_batch = my_script.replace("range(4):\n        x", "range(1):\n        x")


# %% check_findings wrong: the four micro-batches are only in a comment
in_a_comment = my_script.replace(
    "for micro in range(4):\n        x",
    "for micro in range(1):  # instead of: for micro in range(4):\n        x",
).replace("with model.no_sync():", "if True:")
