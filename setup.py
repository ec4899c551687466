"""Builds the allspark package: the Python files, and the extension module that CMake makes.

The CMake build directory is kept between runs (build/pip-TAG), so installing again compiles only
what changed. Environment variables, all optional:

ALLSPARK_BUILD_DIR   another build directory, e.g. that of a CMake preset;
ALLSPARK_CMAKE_ARGS  further arguments of the configure step, split as a shell would.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CMAKE_MINIMUM = (3, 25)
# Import name -> folder; subfolders become subpackages of the same names.
PACKAGE_ROOTS = {"allspark": "allspark_py", "allspark.model_loader": "model_loaders"}


def find_packages() -> dict[str, str]:
    """Maps every package's import name to its folder, relative to the root."""
    packages = {}
    for name, folder in PACKAGE_ROOTS.items():
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            relative = init.parent.relative_to(ROOT / folder)
            packages[".".join((name, *relative.parts))] = (folder / relative).as_posix()
    return packages


def cmake_version() -> tuple[int, ...] | None:
    """The version of the cmake on the path; None if there is none."""
    if shutil.which("cmake") is None:
        return None
    text = subprocess.run(["cmake", "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", text)
    return tuple(int(part) for part in found.groups()) if found else None


def build_tools() -> list[str]:
    """The build tools that pip must install because the system lacks them."""
    version = cmake_version()
    tools = []
    if version is None or version < CMAKE_MINIMUM:
        tools.append(f"cmake>={'.'.join(map(str, CMAKE_MINIMUM))}")
    if shutil.which("ninja") is None:
        tools.append("ninja")
    return tools


class CMakeBuild(build_ext):
    """Configures, builds and installs the CMake component "python" into the package."""

    def build_extension(self, ext: Extension) -> None:
        package_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        tag = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        build_dir = Path(os.environ.get("ALLSPARK_BUILD_DIR", ROOT / "build" / f"pip-{tag}"))
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build_dir), "-DALLSPARK_PYTHON=ON",
            f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={self._pybind11_dir()}",
        ]
        if not (build_dir / "CMakeCache.txt").exists():
            # A warning of an unknown compiler must not stop an installation.
            configure += ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DALLSPARK_WERROR=OFF",
                          "-DCMAKE_UNITY_BUILD=ON"]
        if "ALLSPARK_BUILD_DIR" not in os.environ:
            configure.append("-DALLSPARK_TESTS=OFF")
        configure += shlex.split(os.environ.get("ALLSPARK_CMAKE_ARGS", ""))
        self._run(configure)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
        self._run(["cmake", "--build", str(build_dir), "--parallel", jobs,
                   "--target", "_allspark", "as_descriptor_set"])
        self._run(["cmake", "--install", str(build_dir), "--component", "python",
                   "--prefix", str(package_dir)])

    @staticmethod
    def _pybind11_dir() -> str:
        import pybind11  # A build requirement: installed only for builds.

        return pybind11.get_cmake_dir()

    @staticmethod
    def _run(command: list[str]) -> None:
        print("+", shlex.join(command), flush=True)
        try:
            subprocess.run(command, check=True)
        except FileNotFoundError:
            raise SystemExit(f"{command[0]} was not found; scripts/setup.sh installs it") from None
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"{shlex.join(command)} failed: {error.returncode}") from None


class CleanBuild(build):
    """Starts from an empty build_lib, so that modules deleted since the last build are not
    packed."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


packages = find_packages()
setup(
    packages=list(packages),
    package_dir=packages,
    package_data={
        "": ["py.typed", "*.pyi"],
        "allspark.serve": [f"ui/*.{kind}" for kind in ("html", "css", "js", "svg")],
    },
    ext_modules=[Extension("allspark._allspark", sources=[])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
    setup_requires=build_tools(),
    zip_safe=False,
)
