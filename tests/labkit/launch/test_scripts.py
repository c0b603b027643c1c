"""Scripts that chapters run: their output, their errors, and what is left of them."""

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
