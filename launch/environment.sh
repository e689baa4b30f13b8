# Sourced by the launchers: leaves a complete virtual environment in $root/.venv and changes to $root. If $environment is
# "none", it only defines functions.
#
# PYTHON chooses the interpreter. An environment is reused only when its stamp, written last, matches everything
# it was made from; a half-made one has no stamp and is made again from nothing. One that was made otherwise is kept.

# The ends of the supported range. Python 3.11 has the oldest torch and megatron-core of it (pip offers it no newer
# megatron-core); later Pythons have the newest that pip offers when the environment is made.
torch_version="2.13.0"
newest_torch="torch>=2.14,<2.16"
newest_version="3.13"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
extras="test,dev"

say() { printf '[%s] %s\n' "${launcher:-launch}" "$*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

python_version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Prints the interpreter behind one, which may be that of a virtual environment: perhaps of ours, about to be made again.
interpreter_of() { "$1" -c 'import sys; print(sys._base_executable)'; }

# Prints a Python from 3.11 to 3.13. A name on the PATH may be a stub of a version manager, so each one is tried.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        case "$(python_version_of "$PYTHON")" in
            3.11 | 3.12 | 3.13) interpreter_of "$PYTHON" && return ;;
            "") fail "PYTHON=$PYTHON does not run" ;;
            *) fail "PYTHON=$PYTHON is Python $(python_version_of "$PYTHON"); 3.11, 3.12 or 3.13 is needed" ;;
        esac
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        case "$(python_version_of "$candidate")" in
            3.11 | 3.12 | 3.13) interpreter_of "$candidate" && return ;;
        esac
    done
    fail "no Python 3.11, 3.12 or 3.13 found (python3 is $(python_version_of python3 || echo absent));" \
        "install one (Debian: apt-get install python3.11 python3.11-venv) or name it: PYTHON=/path/to/python3.11 $0"
}

# Prints a Python of the newest end, on the PATH or among the versions of pyenv; fails if there is none.
find_newest_python() {
    local candidate versions
    versions="$(pyenv root 2>/dev/null || echo "${PYENV_ROOT:-$HOME/.pyenv}")/versions"
    for candidate in "python$newest_version" "$versions/$newest_version".*/bin/python python3; do
        [ "$(python_version_of "$candidate")" != "$newest_version" ] || { interpreter_of "$candidate" && return; }
    done
    return 1
}

# Debian ships venv without ensurepip, in a package of its own.
need_venv_module() {
    local python="$1" package
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    package="python$(python_version_of "$python")-venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $package: this Python cannot make virtual environments without it"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package"; } \
            >&2 || fail "apt-get install $package failed"
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments; install the missing part: sudo apt-get install $package"
}

torch_build() {
    if [ -e /proc/driver/nvidia/version ]; then echo default; else echo cpu; fi
}

# Everything that an environment with this interpreter is made from, but the place of the checkout.
made_from() {
    printf '%s\n' "$(torch_build)"
    "$1" -c 'import sys; print(sys.executable, sys.version)'
    cat "$root/pyproject.toml" "$root/launch/environment.sh" "$root/launch/cuda_stand_ins.py"
}

wanted_stamp() { { printf '%s\n' "$root" && made_from "$1"; } | sha256sum | cut -d ' ' -f 1; }

# Without a driver a build for CPUs, or one for CUDA with stand-ins for the libraries of CUDA.
install_torch() {
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile)
    local stand_ins=("$venv/bin/python" "$root/launch/cuda_stand_ins.py") wanted="$newest_torch" obstacle
    [ "$(python_version_of "$venv/bin/python")" != 3.11 ] || wanted="torch==$torch_version"
    if [ "$(torch_build)" = default ]; then
        say "installing $wanted (NVIDIA driver found)"
        "${pip[@]}" "$wanted" || fail "pip could not install $wanted; its message is above"
        return
    fi
    say "installing $wanted for CPUs (no NVIDIA driver found)"
    if [ "$wanted" != "$newest_torch" ]; then
        "${pip[@]}" "$wanted+cpu" 2>/dev/null && return
        say "no index that pip knows offers $wanted+cpu: taking the default build, 0.5 GB larger;" \
            "point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at torch's CPU wheels to avoid that"
    fi
    if obstacle="$("${stand_ins[@]}" --check 2>&1)"; then
        "${pip[@]}" --no-deps "$wanted" || fail "pip could not install $wanted; its message is above"
        "${stand_ins[@]}" >&2 || fail "no stand-ins for the libraries of CUDA; the reason is above"
        return
    fi
    say "taking the libraries of CUDA too, several GB, as there can be no stand-ins for them: $obstacle"
    "${pip[@]}" "$wanted" || fail "pip could not install $wanted; its message is above"
}

# The gpu extra: built against the torch that is there. Without it, layers are slower, and the rest works.
install_gpu_extra() {
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile) wanted
    wanted="$("$venv/bin/python" -c 'import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]["gpu"])' "$root/pyproject.toml")"
    say "installing $wanted (NVIDIA driver found); where it has no wheel for this torch, it compiles for minutes"
    "${pip[@]}" setuptools wheel packaging ninja && "${pip[@]}" --no-build-isolation "$wanted" && return
    say "warning: pip could not install $wanted; its message is above. Runs take the slower layers of megatron-core," \
        "without fp8 and context parallelism. To build it, install the CUDA toolkit (nvcc) of torch's version, then:" \
        "${pip[*]} --no-build-isolation '$wanted'"
}

# What pip would do on one processor; argument: on how many, 0 for all. Some packages have templates, which do not
# compile. A third of all source is tests of packages and single models of transformers: an import compiles them.
compile_modules() {
    # A shell has its background ignore Ctrl-C.
    "$venv/bin/python" -c 'import compileall, signal; signal.signal(signal.SIGINT, signal.SIG_DFL); compileall.main()' \
        -q -j "$1" -x '/(tests|testing/_internal|transformers/models)/' "$venv/lib" >/dev/null 2>&1 || true
}

make_environment() {
    local python="$1" stamp="$2" compiling failed=0
    need_venv_module "$python"
    if [ -e "$venv" ] && [ ! -e "$venv/of-launchers" ] && [ ! -e "$venv/stamp" ]; then
        fail "$venv was made by somebody else, and a launcher would replace it: move it away, or rm -rf '$venv'"
    fi
    say "making $venv with $python (a few minutes the first time)"
    rm -rf "$venv"
    mkdir -p "$venv"
    : >"$venv/of-launchers"
    "$python" -m venv "$venv" || fail "$python -m venv failed"
    install_torch
    say "installing the dependencies of spare_megatron"
    compile_modules 1 & # torch, while pip keeps one processor busy
    compiling=$!
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile --editable \
        "${root}[$extras]" || failed=1
    wait "$compiling"
    [ "$failed" = 0 ] || fail "pip could not install spare_megatron; its message is above"
    if [ "$venv" != "$root/.venv" ]; then # shared by checkouts, which come in by PYTHONPATH
        "$venv/bin/python" -m pip uninstall --quiet --yes spare_megatron || fail "pip could not leave the package out"
    elif [ "$(torch_build)" != cpu ]; then
        install_gpu_extra
    fi
    compile_modules 0
    printf '%s\n' "$stamp" >"$venv/stamp.new"
    mv "$venv/stamp.new" "$venv/stamp"
    say "environment ready"
}

has_stamp() { [ "$(cat "$venv/stamp" 2>/dev/null)" = "$1" ]; }

# Two launches at once: the second waits for the first one's environment. Runs the rest of its arguments locked.
with_lock() {
    local waited=0
    if command -v flock >/dev/null; then
        exec 9>"$venv.lock"
        flock -n 9 || { say "another launch is making the environment: waiting" && flock 9; }
        "$@" 9>&-
        exec 9>&-
        return
    fi
    until mkdir "$venv.lock.d" 2>/dev/null; do
        [ "$waited" -lt 1800 ] || fail "waited 30 minutes for another launch; if there is none: rmdir '$venv.lock.d'"
        [ "$waited" -gt 0 ] || say "another launch is making the environment: waiting"
        sleep 1
        waited=$((waited + 1))
    done
    trap 'rmdir "$venv.lock.d" 2>/dev/null' EXIT
    "$@"
    rmdir "$venv.lock.d"
    trap - EXIT
}

ensure_environment() {
    has_stamp "$2" || make_environment "$@"
}

# Prints the interpreter of an environment for the newest end, which all checkouts with equal dependencies share. It lies
# in the user's cache; those that no test has used for three days are removed when another one is made.
newest_environment() {
    local python="$1" cache="${XDG_CACHE_HOME:-$HOME/.cache}/spare-megatron" stamp extras="test" venv
    stamp="$(made_from "$python" | sha256sum | cut -d ' ' -f 1)"
    venv="$cache/newest-${stamp:0:16}"
    if ! has_stamp "$stamp"; then
        mkdir -p "$cache"
        find "$cache" -mindepth 1 -maxdepth 1 -type d -name 'newest-*' -mtime +2 -exec rm -rf {} +
        with_lock ensure_environment "$python" "$stamp" >&2
    fi
    touch "$venv" # used
    printf '%s\n' "$venv/bin/python"
}

cd "$root" || exit 1
if [ "${environment:-}" != none ]; then
    python="$(find_python)" || exit 1
    stamp="$(wanted_stamp "$python")"
    has_stamp "$stamp" || with_lock ensure_environment "$python" "$stamp"
fi
