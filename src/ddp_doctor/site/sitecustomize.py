"""Runs in Python processes that an observed process starts: observe them too, once torch is there.

It stands first on their path, so it also runs the `sitecustomize` that it hides.
"""

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


class _AfterTorch:
    """Finds torch as usual, and starts the doctor when it has been imported.

    Libraries look whether torch is there without importing it, so being found is not the moment.
    """

    looks = False  # another finder may ask all finders, and so this one

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.looks:
            return None
        self.looks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looks = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_then_observe(module):
            load(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _start()

        spec.loader.exec_module = load_then_observe
        return spec


def _start():
    added = _PACKAGE not in sys.path
    if added:
        sys.path.append(_PACKAGE)
    try:
        if os.environ.get("DDP_DOCTOR_CERTIFY"):
            from ddp_doctor.certificate.child import install

            install()
        elif os.environ.get("DDP_DOCTOR_COMPARE"):
            from ddp_doctor.compare.record import install

            install()
        else:
            from ddp_doctor.run.start import start

            start(leader=False)
    except Exception as error:  # never in the way of the user's process
        sys.stderr.write(f"ddp-doctor: could not start in process {os.getpid()} ({error}).\n")
    finally:
        if added:
            sys.path.remove(_PACKAGE)


def _run_hidden():
    others = [path for path in sys.path if os.path.abspath(path) != _HERE]
    for path in others:
        hidden = os.path.join(path, "sitecustomize.py")
        if os.path.isfile(hidden):
            spec = importlib.util.spec_from_file_location("sitecustomize", hidden)
            module = importlib.util.module_from_spec(spec)
            sys.modules["sitecustomize"] = module
            spec.loader.exec_module(module)
            return


if any(os.environ.get(f"DDP_DOCTOR_{kind}") for kind in ("RUN", "CERTIFY", "COMPARE")):
    sys.meta_path.insert(0, _AfterTorch())
_run_hidden()
