# Sourced by the commands of this folder: finds or makes the virtual environment from the hashed lock. Sets VENV.
# INTERTIE_VENV names another place; INTERTIE_PYTHON another interpreter.
VENV="${INTERTIE_VENV:-.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
export PYTHONDONTWRITEBYTECODE="${PYTHONDONTWRITEBYTECODE:-}"

say() { printf '%s\n' "$*" >&2; }

find_python() {
  for candidate in "${INTERTIE_PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"; return 0
    fi
  done
  return 1
}

# Seconds instead of minutes. It trusts what the machine trusts: behind a proxy with a certificate of its own, nothing else works.
install_by_uv() (
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9 2>/dev/null || exit 1
  # A bar for people, one line for logs.
  if [ -t 2 ]; then quiet=; else quiet=--quiet; fi
  export VIRTUAL_ENV="$VENV" UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"
  "$VENV/bin/uv" pip install $quiet --require-hashes -r requirements.lock >&2 &&
    "$VENV/bin/uv" pip install --quiet --no-deps -e . >&2
)

make_venv() {
  stamp="$VENV/.locked"
  now="$(cat requirements.lock pyproject.toml | cksum)"
  [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$now" ] && return 0
  python="$(find_python)" || {
    say "Intertie needs Python 3.11 or newer; this machine has $(python3 --version 2>/dev/null || echo none). / 需要 Python 3.11 或更新版本。"
    exit 1
  }
  if [ ! -x "$VENV/bin/python" ]; then
    say "· making $VENV with $("$python" --version)"
    if ! mkdir -p "$VENV" 2>/dev/null; then
      say "$VENV cannot be written by $(id -un); clone for yourself, or name another place with INTERTIE_VENV"; exit 1
    fi
    "$python" -m venv "$VENV" 2>/dev/null || {
      rm -rf "$VENV"; say "Python's venv module is missing; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
  fi
  say "· installing from requirements.lock (hashes checked)"
  if ! install_by_uv; then
    say "· uv is not to be had here, or cannot fetch; pip does it, slower"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --require-hashes -r requirements.lock >&2
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e . >&2
  fi
  printf '%s' "$now" > "$stamp"
}

make_venv
