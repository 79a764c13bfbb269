#!/usr/bin/env bash
# Packs a bundle as a Debian package: programs and their libraries under /usr/lib/splice, a service, its settings, a man page.
#   deploy/deb/make.sh [--compression TYPE] [BUNDLE] [OUT_DIR]
#
#   --compression TYPE  what dpkg-deb -Z takes; default xz (gzip is ten times as fast and a third larger)
#   BUNDLE              default build/splice-VERSION-linux-x86_64.tar.xz, which ./dev bundle makes
#
# Run it where the bundle was made: the versions that the package depends on, and the licenses of the libraries in it,
# are those of this machine's packages. The same bundle and commit give the same bytes.
set -euo pipefail
cd "$(dirname "$0")/../.."

compression=xz
[ "${1:-}" = "--compression" ] && { compression=$2; shift 2; }
version=$(sed -n 's/^project(splice VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
bundle=${1:-build/splice-$version-linux-x86_64.tar.xz}
out=${2:-$(dirname "$bundle")}
[ -f "$bundle" ] || { echo "$bundle does not exist: ./dev bundle makes it" >&2; exit 1; }
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export LC_ALL=C
here=deploy/deb

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
home=$root/usr/lib/splice
doc=$root/usr/share/doc/splice
mkdir -p "$home" "$doc/libraries" "$root"/{DEBIAN,etc/splice,usr/bin,usr/lib/systemd/system,usr/share/man/man1}
tar -C "$home" --strip-components=1 --no-same-owner -xJf "$bundle"
rm -f "$home"/{INSTALL,README.md,LICENSE,NOTICE}
for program in "$home"/bin/*; do
  name=$(basename "$program")
  ln -s "../lib/splice/bin/$name" "$root/usr/bin/$name"
done

cp "$here/splice.service" "$root/usr/lib/systemd/system/"
cp "$here/splice.env" "$root/etc/splice/"
sed "s/@VERSION@/$version/" "$here/splice.1" | gzip -9n >"$root/usr/share/man/man1/splice.1.gz"
for name in router prefill decode kvstore; do ln -s splice.1.gz "$root/usr/share/man/man1/splice-$name.1.gz"; done
gzip -9n <CHANGELOG.md >"$doc/changelog.gz"
cp README.md NOTICE "$doc/"

triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH)
package_of() { dpkg-query -S "*/$triplet/*$1" | sed -n '1s/[:,].*//p'; } # SONAME

# Libraries of this distribution that are inside, by package: their licenses go with them.
{
  cat "$here/copyright"
  sed 's/^$/./; s/^/ /' NOTICE
} >"$doc/copyright"
find "$home/lib" -name '*.so*' ! -name 'libsplice_*' -printf '%f\n' | sort | while read -r soname; do
  package=$(package_of "$soname")
  cp "/usr/share/doc/$package/copyright" "$doc/libraries/$package"
done

# Packages of the libraries that are not inside, at the versions that the programs need. The GPU plug-in is left out: it loads where the driver and
# cuBLASLt are, which are no packages of the distribution.
mapfile -t binaries < <(find "$home" -type f \( -perm -100 -o -name '*.so*' \) ! -name libsplice_cuda.so | sort)
outside=$(for file in "${binaries[@]}"; do objdump -p "$file" | awk '$1 == "NEEDED" {print $2}'; done | sort -u |
  while read -r soname; do
    [ -e "$home/lib/$soname" ] || package_of "$soname"
  done | sort -u)
mkdir "$work/debian"
printf 'Source: splice\n\nPackage: splice\nArchitecture: any\n' >"$work/debian/control"
depends=$(cd "$work" && dpkg-shlibdeps -O --ignore-missing-info "-l$home/lib" "${binaries[@]}" 2>"$work/shlibdeps.log" |
  sed -n 's/^shlibs:Depends=//p' | tr ',' '\n' | sed 's/^ *//' |
  while read -r package constraint; do
    if grep -qx "$package" <<<"$outside"; then echo "$package${constraint:+ $constraint}"; fi
  done | sort | paste -sd, | sed 's/,/, /g')
for package in $outside; do
  grep -q "\b$package\b" <<<"$depends" || { cat "$work/shlibdeps.log" >&2; echo "no version found for $package" >&2; exit 1; }
done

chmod -R u=rwX,go=rX "$root"
install -m 755 "$here"/{postinst,prerm,postrm} "$root/DEBIAN/"
echo /etc/splice/splice.env >"$root/DEBIAN/conffiles"
(cd "$root" && find etc usr -type f | sort | xargs md5sum) >"$root/DEBIAN/md5sums"
size=$(find "$root" -path "$root/DEBIAN" -prune -o -type f -printf '%s\n' | awk '{n += int(($1 + 1023) / 1024)} END {print n}')
cat >"$root/DEBIAN/control" <<TEXT
Package: splice
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: The Splice authors <splice@localhost>
Section: net
Priority: optional
Installed-Size: $size
Depends: adduser, $depends
Description: LLM inference cluster that reuses KV cache at any position
 A router, prefill workers, decode workers and a chunk store for KV cache, as
 four programs or as one service on one machine. This package has the programs
 with the libraries that they need; a GPU needs the driver and cuBLASLt beside
 it. The service is not started before a model has been named in
 /etc/splice/splice.env.
TEXT
find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
package=$out/splice_${version}_$(dpkg --print-architecture).deb
# One thread: with several, where the blocks of the compression end depends on their number.
dpkg-deb --root-owner-group --threads-max=1 "-Z$compression" --build "$root" "$package" >/dev/null
du -h --apparent-size "$package" | awk '{print $2 ": " $1}'
