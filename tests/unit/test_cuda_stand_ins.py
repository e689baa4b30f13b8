"""Stand-ins for the libraries of CUDA, against libraries that a compiler linked and the loader that loads them."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "launch/cuda_stand_ins.py"
TIMEOUT_S = 60.0
LIBRARIES = {
    "libcudart.so.13": "int cudaGetDeviceCount(int *n) { return 0; } char *cudaGetErrorString(int e) { return 0; }",
    "libcupti.so.13": "int cuptiGetResultString(int e, const char **text) { return 0; }",
    "libnccl.so.2": "const char *ncclGetErrorString(int e) { return 0; } long ncclGetVersion(int *v) { return 0; }",
}
TORCH = """
int cudaGetDeviceCount(int *); const char *cudaGetErrorString(int); int cuptiGetResultString(int, const char **);
const char *ncclGetErrorString(int); long ncclGetVersion(int *);
int devices(void) { int n; return cudaGetDeviceCount(&n); }
const char *of_cuda(void) { return cudaGetErrorString(1); }
const char *of_nccl(void) { return ncclGetErrorString(1); }
const char *of_cupti(void) { const char *text = 0; cuptiGetResultString(1, &text); return text; }
long version(void) { int v; return ncclGetVersion(&v); }
"""
PROGRAM = """
import ctypes, sys
torch = ctypes.CDLL(sys.argv[1])
print(torch.devices(), torch.version())
for name in ("of_cuda", "of_nccl", "of_cupti"):
    function = getattr(torch, name)
    function.restype = ctypes.c_char_p
    print(function().decode())
"""
METADATA = "Name: torch\nRequires-Dist: sympy\nRequires-Dist: nvidia-nccl-cu13==2; a\nRequires-Dist: triton~=3.8.0; b\n"

needs_compiler = pytest.mark.skipif(
    not all(map(shutil.which, ("cc", "readelf", "nm"))), reason="needs cc, readelf and nm"
)


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_stand_ins", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def link(name: str, source: str, folder: Path, *options: str | Path) -> None:
    (folder / "source.c").write_text(source)
    done = run("cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, folder / "source.c", *options)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A package whose library links CUDA's, two with versions of symbols and one without; they are gone."""
    lib = tmp_path / "torch/lib"
    lib.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch-2.14.1.dist-info").mkdir()
    (tmp_path / "torch-2.14.1.dist-info/METADATA").write_text(METADATA)
    for name, source in LIBRARIES.items():
        (lib / "map").write_text(f"{name} {{ global: *; }};\n")
        link(name, source, lib, *([f"-Wl,--version-script={lib / 'map'}"] if "nccl" not in name else []))
    link("libtorch_cuda.so", TORCH, lib, *[lib / name for name in LIBRARIES], "-Wl,-rpath,$ORIGIN", "-Wl,-z,now")
    for name in LIBRARIES:
        (lib / name).unlink()
    assert "cannot open shared object file" in run(sys.executable, "-c", PROGRAM, lib / "libtorch_cuda.so").stderr, (
        "it does not load"
    )
    return tmp_path / "torch"


@needs_compiler
def test_a_library_that_links_cuda_loads_and_finds_no_device(
    torch: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions that return text returned a number, and whoever read it crashed."""
    monkeypatch.syspath_prepend(torch.parent)
    monkeypatch.setattr(script, "DRIVER", ())
    monkeypatch.setattr(sys, "argv", ["cuda_stand_ins.py"])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert script.main() == ""
    done = run(sys.executable, "-c", PROGRAM, torch / "lib/libtorch_cuda.so")
    assert done.returncode == 0, done.stderr
    numbers, *texts = done.stdout.splitlines()
    assert numbers == "100 100"
    assert texts == ["a stand-in of launch/cuda_stand_ins.py: no CUDA is installed"] * 3
    (metadata,) = torch.parent.glob("torch-*/METADATA")
    assert metadata.read_text() == "Name: torch\nRequires-Dist: sympy\n"
    assert {path.name for path in (torch / "lib").iterdir()} == {*LIBRARIES, "libtorch_cuda.so", "map", "source.c"}


def test_a_machine_with_a_driver_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "DRIVER", (tmp_path / "version",))
    monkeypatch.setattr(script.shutil, "which", lambda name: name)
    assert script.obstacle() == ""
    (tmp_path / "version").touch()
    monkeypatch.setattr(sys, "argv", ["cuda_stand_ins.py"])
    assert "a machine with an NVIDIA driver needs the real libraries" in script.main()


def test_missing_tools_are_named_with_their_packages(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "DRIVER", ())
    monkeypatch.setattr(script.shutil, "which", lambda name: None if name == "nm" else name)
    assert script.obstacle().startswith("nm not found: install a C compiler and binutils (Debian: apt-get install gcc")
