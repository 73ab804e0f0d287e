"""The package map: sibling folders become sub-packages of ``portkern``. The rest: pyproject.toml.

The lists are made from the tree, so that a new sub-package needs no line here.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "portkern": "portkern",
    "portkern.backends": "backends",
    "portkern.kernels": "kernels",
    "portkern.peers": "peers",
    "portkern.tuning_db": "tuning_db",
}

setup(
    package_dir=FOLDERS,
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
    ],
)
