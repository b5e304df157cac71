"""A second real user of this machine, `nobody`, who plants files where all can write."""

import os
import subprocess

import pytest


def run_as_nobody(script: str) -> None:
    """Runs a script of `sh` as the user `nobody`; the test is skipped where that is impossible."""
    if os.name != "posix" or os.getuid() != 0:
        pytest.skip("only root can run a command as another user")
    subprocess.run(["sh", "-c", script], user="nobody", group="nogroup", extra_groups=(), umask=0, check=True)
