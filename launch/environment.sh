# Sourced by the launchers: leaves a complete virtual environment in $root/.venv and changes to $root.
#
# PYTHON chooses the interpreter. An environment is reused only when its stamp, written last, matches everything
# it was made from; a half-made one has no stamp and is made again from nothing. One that was made otherwise is kept.

torch_version="2.13.0"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"

say() { printf '[%s] %s\n' "${launcher:-launch}" "$*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

python_version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# Prints the interpreter behind one, which may be that of a virtual environment: perhaps of ours, about to be made again.
interpreter_of() { "$1" -c 'import sys; print(sys._base_executable)'; }

# Prints a Python 3.11 or 3.12. A name on the PATH may be a stub of a version manager, so each one is tried.
find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        case "$(python_version_of "$PYTHON")" in
            3.11 | 3.12) interpreter_of "$PYTHON" && return ;;
            "") fail "PYTHON=$PYTHON does not run" ;;
            *) fail "PYTHON=$PYTHON is Python $(python_version_of "$PYTHON"); 3.11 or 3.12 is needed" ;;
        esac
    fi
    for candidate in python3.11 python3.12 python3 python; do
        case "$(python_version_of "$candidate")" in
            3.11 | 3.12) interpreter_of "$candidate" && return ;;
        esac
    done
    fail "no Python 3.11 or 3.12 found (python3 is $(python_version_of python3 || echo absent));" \
        "install one (Debian: apt-get install python3.11 python3.11-venv) or name it: PYTHON=/path/to/python3.11 $0"
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

wanted_stamp() {
    {
        printf '%s\n' "$root" "$(torch_build)"
        "$1" -c 'import sys; print(sys.executable, sys.version)'
        cat "$root/pyproject.toml" "$root/launch/environment.sh"
    } | sha256sum | cut -d ' ' -f 1
}

install_torch() {
    local pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile)
    if [ "$(torch_build)" = cpu ]; then
        say "installing torch $torch_version for CPUs (no NVIDIA driver found)"
        "${pip[@]}" "torch==$torch_version+cpu" 2>/dev/null && return
        say "no index that pip knows offers torch $torch_version+cpu: taking the default build, several GB larger;" \
            "point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at torch's CPU wheels to avoid that"
    else
        say "installing torch $torch_version (NVIDIA driver found)"
    fi
    "${pip[@]}" "torch==$torch_version" || fail "pip could not install torch $torch_version; its message is above"
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
    mkdir "$venv"
    : >"$venv/of-launchers"
    "$python" -m venv "$venv" || fail "$python -m venv failed"
    install_torch
    say "installing spare_megatron and its dependencies"
    compile_modules 1 & # torch, while pip keeps one processor busy
    compiling=$!
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile --editable \
        "$root[test,dev]" || failed=1
    wait "$compiling"
    [ "$failed" = 0 ] || fail "pip could not install spare_megatron; its message is above"
    [ "$(torch_build)" = cpu ] || install_gpu_extra
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
        exec 9>"$root/.venv.lock"
        flock -n 9 || { say "another launch is making the environment: waiting" && flock 9; }
        "$@" 9>&-
        exec 9>&-
        return
    fi
    until mkdir "$root/.venv.lock.d" 2>/dev/null; do
        [ "$waited" -lt 1800 ] || fail "waited 30 minutes for another launch; if there is none: rmdir '$root/.venv.lock.d'"
        [ "$waited" -gt 0 ] || say "another launch is making the environment: waiting"
        sleep 1
        waited=$((waited + 1))
    done
    trap 'rmdir "$root/.venv.lock.d" 2>/dev/null' EXIT
    "$@"
    rmdir "$root/.venv.lock.d"
    trap - EXIT
}

ensure_environment() {
    has_stamp "$2" || make_environment "$@"
}

python="$(find_python)" || exit 1
stamp="$(wanted_stamp "$python")"
has_stamp "$stamp" || with_lock ensure_environment "$python" "$stamp"
cd "$root" || exit 1
