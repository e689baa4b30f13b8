"""Lets a CUDA build of torch compute on CPUs without CUDA: `ENVIRONMENT/bin/python launch/cuda_stand_ins.py`.

torch links a dozen CUDA libraries (2 GB to download) and does not import without them, even where there is no GPU for
them to use. For Pythons that no index has a CPU build of torch for, this compiles a library of the same name, symbols
and versions for each of them, 0.4 MB together, into the folder of torch. Every function reports "no device", so that
`torch.cuda.is_available()` is False. The requirements that they replace are taken out of torch's metadata, so that pip
does not install them with the next package. Needs cc, readelf and nm; is refused on a machine with an NVIDIA driver.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

TOOLS = ("cc", "readelf", "nm")
DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))
TIMEOUT_S = 300.0
CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)\w*\.so\.\d+")
OF_THE_DRIVER = "libcuda.so.1"
"""torch opens the library that links it only when it compiles for a GPU."""
REPLACED = re.compile(r"Requires-Dist: (nvidia-|cuda-|triton\b)")

NO_DEVICE = "long {}(void) {{ return 100; }}"
"""100 is cudaErrorNoDevice, and an error to every other library. A long, as some functions return a size_t."""
TEXT = re.compile(r"Get(Error|Status)(String|Name)|ncclGetLastError")
"""Functions that return a `const char *`: their callers read what it points to."""
RETURNS_TEXT = "const char *{}(void) {{ return text; }}"
WRITES_TEXT = {
    "cuptiGetResultString": "int {}(int result, const char **found) {{ *found = text; return 100; }}",
    "cuptiGetCallbackName": "int {}(int domain, int id, const char **found) {{ *found = text; return 100; }}",
    "cudnnGetLastErrorString": "void {}(char *found, unsigned long size) {{ if (size) *found = 0; }}",
}
"""Functions that have an argument for the text."""
PREAMBLE = 'static const char text[] = "a stand-in of launch/cuda_stand_ins.py: no CUDA is installed";'


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def cuda_libraries(file: Path) -> set[str]:
    """Names of the CUDA libraries that a library links."""
    linked = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-dW", file))
    return {name for name in linked if CUDA_LIBRARY.fullmatch(name)}


def versions_needed(file: Path) -> dict[str, str]:
    """Version of symbols -> the CUDA library that a library expects it in."""
    found, library = {}, ""
    for line in run("readelf", "-VW", file).splitlines():
        if file_name := re.search(r"File: (\S+)", line):
            library = file_name[1]
        elif (name := re.search(r"Name: (\S+) .*Version:", line)) and CUDA_LIBRARY.fullmatch(library):
            found[name[1]] = library
    return found


def symbols(file: Path, *options: str) -> Iterator[tuple[str, str]]:
    """Name and version, which is empty where it has none."""
    for line in run("nm", "-D", "--with-symbol-versions", *options, file).splitlines():
        name, _, version = line.split()[-1].partition("@")
        yield name, version.lstrip("@")


def library_by_name(symbol: str, libraries: Iterable[str]) -> str | None:
    """The library that a symbol without a version is named for: the longest name that it begins with."""
    stems = {library: library.removeprefix("lib").partition(".")[0].partition("_")[0] for library in libraries}
    named = [library for library, stem in stems.items() if symbol.lower().startswith(stem.lower())]
    return max(named, key=lambda library: len(stems[library]), default=None)


def wanted_symbols(folder: Path) -> dict[str, dict[str, set[str]]]:
    """CUDA library -> version -> symbols that the libraries in `folder` expect there."""
    files = sorted(file for file in folder.glob("*.so") if file.is_file())
    libraries = {name for file in files for name in cuda_libraries(file)} - {OF_THE_DRIVER}
    defined = {name for file in files for name, _ in symbols(file, "--defined-only")}
    wanted: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in sorted(libraries)}
    for file in files:
        libraries_of = versions_needed(file)
        for name, version in symbols(file, "--undefined-only"):
            library = libraries_of.get(version)
            if not version and name not in defined:
                library = library_by_name(name, libraries)
            if library in wanted:
                wanted[library][version].add(name)
    return wanted


def definition(name: str) -> str:
    return WRITES_TEXT.get(name, RETURNS_TEXT if TEXT.search(name) else NO_DEVICE).format(name)


def compile_library(name: str, symbols_by_version: dict[str, set[str]], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, versions, built = (Path(scratch, part) for part in ("all.c", "all.map", name))
        names = sorted(set().union(*symbols_by_version.values()))
        source.write_text("\n".join([PREAMBLE, *map(definition, names)]) + "\n")
        blocks = [
            f"{version} {{ global: {' '.join(f'{one};' for one in sorted(found))} }};"
            for version, found in symbols_by_version.items()
            if version
        ]
        versions.write_text("\n".join(blocks) + "\n")
        script = [f"-Wl,--version-script={versions}"] if blocks else []
        options = ["-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{name}", *script]
        run("cc", *options, "-o", built, source)
        shutil.move(built, folder / name)


def drop_requirements(metadata: Path) -> None:
    lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
    metadata.write_text("".join(line for line in lines if not REPLACED.match(line)), encoding="utf-8")


def obstacle() -> str:
    """Why no stand-ins may or can be made here; empty if they can."""
    if found := [str(path) for path in DRIVER if path.exists()]:
        return f"{found[0]} is here: a machine with an NVIDIA driver needs the real libraries (pip install torch)"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return (
            f"{', '.join(missing)} not found: install a C compiler and binutils (Debian: apt-get install gcc binutils)"
            ", or point PIP_EXTRA_INDEX_URL at an index with CPU builds of torch"
        )
    return ""


def main() -> str:
    """What prevents it, for `sys.exit`; empty if torch imports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether stand-ins can be made on this machine")
    is_check = parser.parse_args().check
    if (reason := obstacle()) or is_check:
        return reason
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return f"{sys.executable} has no torch: pip install --no-deps torch"
    torch = Path(spec.origin).parent
    wanted = wanted_symbols(torch / "lib")
    if not wanted:
        return ""  # a build for CPUs
    for name, symbols_by_version in wanted.items():
        compile_library(name, symbols_by_version, torch / "lib")
    (metadata,) = torch.parent.glob("torch-*.dist-info/METADATA")
    drop_requirements(metadata)
    print(f"{len(wanted)} stand-ins in {torch / 'lib'}")
    return ""


if __name__ == "__main__":
    try:
        sys.exit(main() or 0)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(map(str, error.cmd))} failed:\n{error.stderr}")
