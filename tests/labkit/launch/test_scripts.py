"""Scripts that chapters run: their output, their errors, and what is left of them."""

from pathlib import Path

import pytest

from labkit.launch.scripts import ScriptError, project_root, run_script

ROOT = project_root()


def test_a_script_is_run_from_the_projects_root_and_its_output_comes_back(script):
    name = script(
        "import os, sys\n"
        "print(os.path.isdir('labs'), sys.argv[1:], os.environ['OMP_NUM_THREADS'])\n"
        "print('[Gloo] Rank 0 is connected to 1 peer ranks.')\n"
        "print('noise', file=sys.stderr)\n"
    )
    assert run_script(name, "--flag", "x") == "True ['--flag', 'x'] 1"


@pytest.mark.parametrize("ranks", [None, 1])
def test_a_script_finds_the_modules_loaded_that_it_is_to_share(script, ranks):
    name = script(
        "import os, sys\n"
        "print('colorsys' in sys.modules, sys.argv[1:], os.environ.get('WORLD_SIZE'))\n"
        "print(__name__, sys.path[0] == os.path.dirname(os.path.abspath(__file__)))\n"
    )
    world = str(ranks) if ranks else None
    said = run_script(name, "x", ranks=ranks, preload=["colorsys"])
    assert said == f"True ['x'] {world}\n__main__ True"


def test_a_script_that_fails_says_what_it_wrote_last(script):
    name = script("print('so far'); raise ValueError('the reason')")
    with pytest.raises(ScriptError, match=r"(?s)exit code 1:.*so far.*ValueError: the reason"):
        run_script(name)


def test_a_script_that_does_not_exist_is_named():
    with pytest.raises(FileNotFoundError, match=r"no script labs/none\.py"):
        run_script("labs/none.py")


def test_outside_a_checkout_the_error_says_where_to_go(tmp_path):
    with pytest.raises(FileNotFoundError, match="not inside a checkout of this project"):
        project_root(tmp_path)


STARTS_MORE = """
import sys
import pytorch_lightning as ptl
import torch

class Model(ptl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        print("rank", self.global_rank, "of", self.trainer.world_size, sys.orig_argv[1],
              sys.stdout.line_buffering)
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
options = {"accelerator": "cpu", "strategy": "ddp", "devices": 2, "max_epochs": 1}
trainer = ptl.Trainer(**options, **dict.fromkeys(off, False))
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(2, 2)))
torch.distributed.barrier()
"""


def test_lightning_and_the_processes_that_it_starts_are_forks(script):
    said = run_script(script(STARTS_MORE), timeout=300)
    # A fork keeps the command line of its server, which begins with -c.
    assert sorted(said.splitlines()) == ["rank 0 of 2 -c True", "rank 1 of 2 -c True"]


def test_a_forked_script_finds_texts_in_its_arguments_as_a_fresh_one_does(script):
    name = script("import sys\nprint({type(word).__name__ for word in sys.argv})")
    assert run_script(Path(name), 7, preload=["json"]) == "{'str'}"
