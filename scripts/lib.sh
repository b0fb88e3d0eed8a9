# Sourced by the other scripts. `use_venv EXTRA [FOLDER CONSTRAINTS]` makes the virtual environment FOLDER (.venv) with
# an extra of pyproject.toml, in the versions of CONSTRAINTS (constraints.txt), and puts its programs on the PATH.
# A file in FOLDER has the checksum of the requirements, so that a second call installs nothing.

# Interpreters to try, in this order.
PYTHONS="${PYTHONS:-python3.11 python3.12 python3.13 python3.14 python3 python}"

use_venv() {
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
  local venv="${2:-.venv}" constraints="${3:-constraints.txt}" stamp wanted
  stamp="$venv/installed-$1"
  wanted=$(cat pyproject.toml "$constraints" | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing statsd-bn[$1] into $venv (once; torch is large, so this takes a minute or two)..."
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv" || exit 2
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --quiet --constraint "$constraints" \
      --editable ".[$1]" || exit 2
    echo "$wanted" >"$stamp"
  fi
  PATH="$PWD/$venv/bin:$PATH"
  build_core
}

# Compiles the native core if a source is newer than the library, or there is none.
build_core() {
  local native=client/native
  if [ ! -e $native/libsbn.so ] || [ -n "$(find $native/core $native/build.py -newer $native/libsbn.so)" ]; then
    python $native/build.py >/dev/null || echo "The native core cannot be compiled: run python $native/build.py" >&2
  fi
}

find_python() {
  local name
  for name in $PYTHONS; do
    if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  echo "statsd_bn needs Python 3.11 or later (with venv); looked for $PYTHONS and found none." >&2
  exit 2
}
