"""Builds the functions in C++ for the rows of a pass on a CPU; all else about the package is in pyproject.toml."""

import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("kernels/cpu")
AVX512 = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# Levels of instructions, one of which is chosen when the library is loaded.
LEVELS = {"plain": []}
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS |= {"avx2": ["-mavx2", "-mfma"], "avx512": AVX512, "avx512_bf16": [*AVX512, "-mavx512bf16"]}
FLAGS = ["-std=c++17", "-O3", "-g0", "-DNDEBUG", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-ffp-contract=off", "-Wno-psabi", "-Wno-unknown-pragmas", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
# Apple's compiler has no OpenMP: there one thread runs.
THREADS = ["-fopenmp"] if sys.platform == "linux" else []


class BuildLevels(build_ext):
    """Compiles `rows.cpp` once for each level, and links all of them into one library."""

    def build_extension(self, extension: Extension) -> None:
        """As setuptools calls it; where it fails, the package is installed without the library."""
        sources = sorted(FOLDER.glob("*.h")) + sorted(FOLDER.glob("*.cpp"))
        output = sha256(b"".join(item.read_bytes() for item in sources)).hexdigest()
        builds = {level: ("rows.cpp", flags, [("LEVEL", level)]) for level, flags in LEVELS.items()}
        builds["levels"] = ("levels.cpp", [], [("SOURCES", f'"{output}"')])

        def compile_one(name: str) -> list[str]:
            source, flags, macros = builds[name]
            folder = str(Path(self.build_temp, name))
            options = {"output_dir": folder, "macros": macros, "extra_postargs": [*FLAGS, *THREADS, *flags]}
            return self.compiler.compile([str(FOLDER / source)], **options)

        with ThreadPoolExecutor() as pool:
            objects = [item for result in pool.map(compile_one, builds) for item in result]
        path = self.get_ext_fullpath(extension.name)
        self.compiler.link_shared_object(objects, path, extra_postargs=THREADS, target_lang="c++")

    def get_export_symbols(self, extension: Extension) -> list[str]:
        """No module of Python's: ctypes loads it."""
        return []


setup(
    ext_modules=[
        Extension(
            "sigma0.kernels.cpu.library",
            [str(FOLDER / "rows.cpp"), str(FOLDER / "levels.cpp")],
            depends=[str(path) for path in FOLDER.glob("*.h")],
            language="c++",
            optional=True,
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildLevels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
