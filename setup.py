"""The packages of the wheel, found and not listed: ``anygpu`` is this folder, and each room in it goes in whole."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOMS = [f"{file.parent.name}*" for file in Path().glob("*/__init__.py")]
FOLDERS = [f"anygpu.{name}" for name in sorted(find_namespace_packages(include=ROOMS, exclude=["*__pycache__*"]))]

setup(
    script_name="setup.py",  # which setuptools then leaves out, whoever runs it
    package_dir={"anygpu": "."},
    packages=["anygpu", *FOLDERS],
    package_data={"anygpu": ["pyproject.toml", "requirements.txt"]} | {folder: ["*"] for folder in FOLDERS},
)
