"""Maps the folders hw/, sim/, sw/ and synth/ to the import packages plora.hw, plora.sim, plora.sw and plora.synth.

The tables in pyproject.toml can only discover packages whose folder and import name agree, or list
them by hand; computing the list here means that a new folder with an ``__init__.py`` is found.
"""

from setuptools import find_packages, setup

LAYERS = ("hw", "sim", "sw", "synth")

setup(
    package_dir={f"plora.{layer}": layer for layer in LAYERS},
    packages=[
        f"plora.{name}" for layer in LAYERS for name in [layer, *(f"{layer}.{sub}" for sub in find_packages(layer))]
    ],
    package_data={
        # data/, results/, cpp/ and verilog/ are folders of a package, not packages
        "": ["data/**/*", "results/*", "cpp/**/*", "verilog/*", "*.toml", "*.json", "py.typed"],
    },
    zip_safe=False,
)
