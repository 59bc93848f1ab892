"""The templates: each is whole, each shell script is one, `--template` prints them."""

from __future__ import annotations

import re
import subprocess

import pytest

from lowshard import cli
from lowshard.errors import LaunchError
from lowshard.launch.template import template_list, template_names, template_text

SCRIPTS = [name for name in template_names() if name.endswith(".sh")]


def test_there_is_a_template_for_each_case() -> None:
    assert template_names() == [
        "flux.sh",
        "hostfile_mpich",
        "hostfile_openmpi",
        "slurm_many_nodes.sh",
        "slurm_mpirun.sh",
        "slurm_one_node.sh",
    ]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_one_that_bash_reads(name: str) -> None:
    text = template_text(name)
    assert text.startswith("#!/bin/bash\n")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in SCRIPTS if "slurm" in name])
def test_slurms_directives_stand_before_the_first_command_and_ask_for_a_clean_stop(name: str) -> None:
    lines = template_text(name).splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert directives
    assert max(directives) < first
    asked = {lines[i].split()[1].partition("=")[0] for i in directives}
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--signal", "--time"} <= asked
    # The batch shell gets the signal only with B:, and hands it on only if it has become the launcher.
    own = "--signal=B:" in template_text(name)
    assert own == bool(re.search(r"^exec lowshard run", template_text(name), re.MULTILINE))


def test_the_list_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--template", "list"])
    assert end.value.code == 0
    assert capsys.readouterr().out == template_list()
    lines = template_list().splitlines()
    assert [line.split()[0] for line in lines] == template_names()
    assert all(len(line.split()) > 3 for line in lines)


def test_a_template_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--template", "flux.sh"])
    assert end.value.code == 0
    assert capsys.readouterr().out == template_text("flux.sh")


def test_a_template_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--template", "../cli.py"])
    assert end.value.code == 2
    assert "the templates are flux.sh" in capsys.readouterr().err
    with pytest.raises(LaunchError):
        template_text("nothing")
