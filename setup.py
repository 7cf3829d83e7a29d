"""Leaves the build's own metadata out of source distributions; everything else is in setup.cfg."""

from __future__ import annotations

from setuptools import setup
from setuptools.command.sdist import sdist


class WithoutEggInfo(sdist):
    """The command that makes a source distribution.

    setuptools adds ``ipygpumem.egg-info/SOURCES.txt`` after it has read MANIFEST.in.
    """

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files into the folder that becomes the archive."""
        super().make_release_tree(base_dir, [name for name in files if ".egg-info" not in name])


setup(cmdclass={"sdist": WithoutEggInfo})
