#!/bin/sh
# Installs intertie-agent @VERSION@ for @ARCH@ from this folder alone: no network, no root, nothing outside the prefix.
#   ./install.sh [--prefix DIR]     default: /opt/intertie-agent as root, else ~/.local/share/intertie-agent
# Run again it installs this version beside an older one and makes it the current one; then: intertie-agent upgrade
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd -P)
fail() { printf 'error: %s\n' "$1" >&2; [ -z "${2:-}" ] || printf 'next: %s\n' "$2" >&2; exit 1; }

if [ "$(id -u)" = 0 ]; then prefix=/opt/intertie-agent; else prefix="${HOME:-}/.local/share/intertie-agent"; fi
while [ $# -gt 0 ]; do
  case "$1" in
    --prefix) [ $# -ge 2 ] || fail "--prefix needs a folder"; prefix=$2; shift 2 ;;
    --prefix=*) prefix=${1#--prefix=}; shift ;;
    -h | --help) sed -n '2,4p' "$0" | sed 's/^# \{0,1\}//'; exit 0 ;;
    *) fail "$1 is no option" "./install.sh --help" ;;
  esac
done
case "$prefix" in /*) ;; *) prefix=$PWD/$prefix ;; esac
case "$prefix" in *[\"\'\$\`\\]*) fail "the prefix holds a character that a script cannot carry" "choose another --prefix" ;; esac

[ "$(uname -s)" = Linux ] && [ "$(uname -m)" = @ARCH@ ] || fail "this bundle is for Linux on @ARCH@; here is $(uname -s) on $(uname -m)" "take the bundle of this architecture"
libc=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed -n 's/^glibc //p')
[ -n "$libc" ] || fail "this machine has no glibc (musl?): the parts are made for glibc @GLIBC@ or newer" "choose another machine"
older=$(printf '%s\n' "$libc" @GLIBC@ | awk -F. 'NR==1 {a=$1*1000+$2} NR==2 {b=$1*1000+$2} END {print (a<b) ? "yes" : "no"}')
[ "$older" = no ] || fail "this machine has glibc $libc, and this bundle needs @GLIBC@: see newer_than_2.17 in MANIFEST.json" "make the bundle with an older Python (ops/bundle --python), or choose another machine"
if command -v sha256sum >/dev/null 2>&1; then
  (cd "$here" && sha256sum --quiet -c SHA256SUMS >/dev/null 2>&1) || fail "a file of the bundle is damaged or missing: sha256sum -c SHA256SUMS" "copy the archive again"
else
  printf 'warning: no sha256sum here; the files are not checked\n' >&2
fi
if [ -d "$prefix" ] && [ ! -f "$prefix/.intertie-agent" ] && [ -n "$(ls -A "$prefix")" ]; then
  fail "$prefix is there and is not ours" "choose another --prefix"
fi

mkdir -p "$prefix/versions" "$prefix/bin"
: > "$prefix/.intertie-agent"
new="$prefix/versions/@VERSION@"
rm -rf "$new.new"
mkdir "$new.new"
if [ -d "$here/python" ]; then
  cp -R "$here/python" "$new.new/python"
  parts="$new.new/python/lib/python@ABI@/site-packages"
  # Debian's Python looks into a folder of another name.
  [ -e "$new.new/python/lib/python@ABI@/dist-packages" ] || ln -s site-packages "$new.new/python/lib/python@ABI@/dist-packages"
  mkdir -p "$parts"
  cp -R "$here/parts/." "$parts/"
else
  found=$(command -v python@ABI@ || true)
  [ -n "$found" ] || { rm -rf "$new.new"; fail "this bundle has no Python of its own, and python@ABI@ is not here" "install it, or make the bundle with --python"; }
  "$found" -m venv --without-pip "$new.new/python" || { rm -rf "$new.new"; fail "$found cannot make an environment"; }
  cp -R "$here/parts/." "$new.new/python/lib/python@ABI@/site-packages/"
fi
cp "$here/MANIFEST.json" "$here/uninstall.sh" "$new.new/"
if [ -d "$new" ]; then rm -rf "$new.old"; mv "$new" "$new.old"; fi
mv "$new.new" "$new"
rm -rf "$new.old"
ln -s "versions/@VERSION@" "$prefix/.current.new"
mv -T "$prefix/.current.new" "$prefix/current" 2>/dev/null || { rm -f "$prefix/current"; mv "$prefix/.current.new" "$prefix/current"; }
launcher() {
  cat > "$prefix/bin/.$1.new" <<END
#!/bin/sh
# What vouches for a hub lies elsewhere on each kind of Linux.
for file in "\${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem; do
  if [ -r "\$file" ]; then export SSL_CERT_FILE="\$file"; break; fi
done
PYTHONNOUSERSITE=1 exec "$prefix/current/python/bin/python3" -P -m $2 "\$@"
END
  chmod 755 "$prefix/bin/.$1.new"
  mv "$prefix/bin/.$1.new" "$prefix/bin/$1"
}
launcher intertie-agent intertie.agent
launcher intertie intertie.cli
"$prefix/bin/intertie-agent" --version || fail "it is installed, and does not start" "send the text above to the hub's operator"
printf 'installed in %s\nnext: %s/bin/intertie-agent check\n' "$prefix" "$prefix"
