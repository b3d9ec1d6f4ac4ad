from pathlib import Path

from setuptools import find_packages, setup

EXAMPLES = ["tqdm", "matplotlib", "ase"]
PEERS, DOCS = ["transformers>=5", "torch-geometric", "scipy"], ["mkdocs-material>=9.5"]

setup(
    name="tiga",
    version="0.1.0",
    description="Attention is message passing: write what one edge does, get one differentiable PyTorch operator",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["tiga", "tiga.*"]),
    package_data={"tiga": ["py.typed", "codegen/device.h"]},
    install_requires=["torch>=2.11", 'triton>=3.6; platform_system == "Linux"'],
    extras_require={
        "examples": EXAMPLES,
        "test": [*EXAMPLES, *PEERS, *DOCS, "pytest", "pytest-xdist", "expecttest", "hypothesis", "ruff", "mypy"],
        "docs": DOCS,
    },
)
