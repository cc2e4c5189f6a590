# Sourced by the scripts of this directory: a virtual environment in .venv, made once.

npusim_root="$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
npusim_venv="$npusim_root/.venv"

_npusim_find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    echo "npusim needs Python 3.11 or newer; found: $(python3 --version 2>&1 || true)" >&2
    return 1
}

# prepare_venv EXTRAS: install npusim, editable, with the extras ("" for none) into .venv.
# Nothing is done where an earlier call with the same pyproject.toml, place and Python has done it.
prepare_venv() {
    local extras="$1" python key stamp
    python="$(_npusim_find_python)"
    key="$("$python" --version) $npusim_root $(cksum <"$npusim_root/pyproject.toml")"
    stamp="$npusim_venv/npusim-installed${extras:+-$extras}"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$key" ]]; then
        return
    fi
    echo "installing npusim${extras:+ with [$extras]} into $npusim_venv ..." >&2
    if ! "$npusim_venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        "$python" -m venv --clear "$npusim_venv" || {
            echo "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
            return 1
        }
    fi
    "$npusim_venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --editable "$npusim_root${extras:+[$extras]}"
    printf '%s' "$key" >"$stamp"
}
