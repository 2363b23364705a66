"""A disk with little room, for tests of servers whose disk is full."""

import os
import subprocess
from contextlib import contextmanager

import pytest

NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="mounts a small disk, which needs root")


@contextmanager
def small_disk(folder, megabytes):
    """A disk at a folder; gives what gives it another size."""

    def mount(*options):
        subprocess.run(["mount", *options, str(folder)], check=True)

    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs")
    try:
        yield lambda size: mount("-o", f"remount,size={size}m")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
