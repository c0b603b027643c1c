"""In a process that a corpus script starts: fingerprint its optimizer steps once torch is there."""

import importlib.util
import os
import sys


class _AfterTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_then_watch(module):
            load(module)
            steps.watch(os.environ["FINGERPRINTS"])

        spec.loader.exec_module = load_then_watch
        return spec


if "FINGERPRINTS" in os.environ:
    # Now: multiprocessing replaces the path later, and this file's folder is not on its parent's.
    steps = importlib.import_module("steps")
    sys.meta_path.insert(0, _AfterTorch())
