"""Builds the C++ kernels with CMake and Ninja; everything else is in pyproject.toml.

Without a C++ compiler the package installs without its ``cpu`` backend (and says so); with one, a failed build fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):  # type: ignore[misc]  # setuptools has no types
    """``build_ext`` whose only extension is the CMake project beside this file."""

    def run(self) -> None:
        if not any(map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))):
            print("no C++ compiler found: installing without the cpu backend", file=sys.stderr)
            self.extensions: list[Extension] = []
        super().run()

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / ext.name
        build.mkdir(parents=True, exist_ok=True)
        cmake = shutil.which("cmake") or "cmake"
        configure = [
            cmake,
            "-S", str(ROOT),
            "-B", str(build),
            "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run([cmake, "--build", str(build)], check=True)
        if not target.exists():
            raise FileNotFoundError(
                f"the build left no {target}; is sys.executable ({sys.executable}) the Python it was for?"
            )


setup(ext_modules=[Extension("specmemo_kernels.backends._cpu", sources=[])], cmdclass={"build_ext": CMakeBuild})
