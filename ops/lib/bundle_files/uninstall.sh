#!/bin/sh
# Takes the agent away again and says what was removed: the same as `intertie-agent uninstall` with this prefix.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
prefix=$(cd "$here/../.." && pwd -P)
[ -f "$prefix/.intertie-agent" ] || { printf 'error: nothing is installed in %s\n' "$prefix" >&2; exit 1; }
exec "$prefix/bin/intertie-agent" uninstall --prefix "$prefix" "$@"
