"""The wheel holds all of the project in one package, `llm_pipeline`; pyproject.toml has the rest.

A script of a clone finds `models`, `data` and `training` next to itself; in the wheel they are below that package,
whose folder training/cli/commands.py puts first on the path.
"""

from setuptools import find_packages, setup

FOLDERS = ("models", "data", "training")
setup(
    packages=[
        "llm_pipeline",
        "llm_pipeline.scripts",
        *(f"llm_pipeline.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])),
    ],
    package_dir={"llm_pipeline": "."},
    package_data={
        "llm_pipeline": ["conf/**/*.yaml", "docs/migration.md"],
        "llm_pipeline.data": ["chat_templates/*.jinja"],
        "llm_pipeline.data.inspection": ["*.html"],
        "llm_pipeline.training.observability": ["*.html"],
        "llm_pipeline.scripts": ["*.sh"],
    },
)
