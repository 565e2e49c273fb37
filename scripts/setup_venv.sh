#!/usr/bin/env bash
# Make .venv and install the project into it. Called by make; reads PYTHON, TORCH and VENV_ARGS as the Makefile says.
# VENV names another folder. ANY_TORCH=1 ignores the versions of torch in pyproject.toml, to try a new TORCH.
# torch comes from wherever pip is set up to look: to take a CPU build, point PIP_INDEX_URL or PIP_FIND_LINKS at one.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
say() { printf '[%3d s] %s\n' "$SECONDS" "$*"; }

# A command may exist but not run (a version manager's shim), or lack venv: try it.
usable() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# Where a Python of that name may be: on PATH, or where pyenv keeps those that it does not put there.
places() {
  local name
  for name in "$@"; do
    echo "$name"
    [ "$name" = python3 ] || compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/${name#python}.*/bin/python3" || true
  done
}

find_python() {
  local names=(python3 python3.13 python3.12 python3.11) candidate
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")
  while read -r candidate; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done < <(places "${names[@]}")
  echo "no working Python 3.11, 3.12 or 3.13 with venv among: ${names[*]}; install one or name it: make PYTHON=/path/to/python3.13" >&2
  return 1
}

if ! [ -x "$venv/bin/python" ]; then
  python=$(find_python)
  say "making $venv with $("$python" --version) ($python)"
  # shellcheck disable=SC2086  # VENV_ARGS is a list of words
  "$python" -m venv ${VENV_ARGS:-} "$venv"
fi

pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
if [ -n "${ANY_TORCH:-}" ]; then
  say "installing ${TORCH:?say which, e.g. TORCH=torch==2.15.0}"
  "${pip[@]}" "$TORCH"
elif "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  say "torch is there: $("$venv/bin/python" -c 'import torch; print(torch.__version__)')"
else
  say "installing ${TORCH:=torch==2.13.0} (the longest part)"
  "${pip[@]}" "$TORCH"
fi
say "installing fp8_megatron and its dependencies"
if [ -n "${ANY_TORCH:-}" ]; then
  # Dependencies one by one, all but torch, so that pip does not put back a version that the project allows.
  readarray -t needs < <("$venv/bin/python" - <<'END'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
needs = [*project["dependencies"], *(need for name in ("dev", "corpora", "docs", "tokenizers") for need in extras[name])]
print(*(need for need in needs if not need.startswith(("torch>", "fp8_megatron["))), sep="\n")
END
  )
  "${pip[@]}" "${needs[@]}"
  "${pip[@]}" --no-deps --editable .
else
  "${pip[@]}" --editable '.[dev]'
fi
say "ready: $venv ($("$venv/bin/python" --version), torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)'))"
