"""Our own start of nanochat's scripts.base_train: its folder of data is the one beside it."""

import os
import runpy
import sys

sys.path.insert(0, os.getcwd())
os.environ["NANOCHAT_BASE_DIR"] = os.path.join(os.getcwd(), "made")
os.environ["NANOCHAT_DTYPE"] = "float32"
runpy.run_module("scripts.base_train", run_name="__main__")
