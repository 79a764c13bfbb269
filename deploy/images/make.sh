#!/usr/bin/env bash
# Builds the container image of a bundle with buildah: no daemon, and no base image where none can be pulled.
#   deploy/images/make.sh [--base IMAGE] [--cuda-libs FOLDER] [--name NAME:TAG] [--archive FILE] [BUNDLE]
#
#   --base IMAGE        put the bundle on this image (debian:bookworm-slim, an nvidia/cuda runtime image, …). Without it a
#                       root of a few Debian packages is made by mmdebstrap.
#   --cuda-libs FOLDER  also copy libcublasLt, and libnccl where it is there, from this folder: the image of GPU workers
#   --name NAME:TAG     default splice:VERSION, with --cuda-libs splice-gpu:VERSION
#   --archive FILE      also write the image as an OCI archive, for podman load and kind load
#
# The image runs as user 10001 with no shell but busybox's, and writes to /var/lib/splice alone. What is in it stands in
# its /usr/share/splice/contents.txt. deploy/docker/Dockerfile builds the same image where there is Docker.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^project(splice VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
base="" cuda_libs="" name="" archive=""
while [[ ${1:-} == --* ]]; do
  case "$1" in
    --base) base=$2 ;;
    --cuda-libs) cuda_libs=$2 ;;
    --name) name=$2 ;;
    --archive) archive=$2 ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift 2
done
bundle=${1:-build/splice-$version-linux-x86_64.tar.xz}
[ -n "$name" ] || name=splice$([ -z "$cuda_libs" ] || echo -gpu):$version
[ -f "$bundle" ] || { echo "$bundle does not exist: ./dev bundle makes it" >&2; exit 1; }
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH=$epoch

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"

# The C and C++ run-time libraries, names of users and services, certificates, and busybox for `sleep` before a stop.
debian_root() {
  # The status file of dpkg stays empty, because nothing is installed: the archives say what was unpacked.
  local list='for p in "$1"/var/cache/apt/archives/*.deb; do dpkg-deb -W --showformat="\${Package} \${Version}\n" "$p"; done'
  mmdebstrap --quiet --variant=extract --format=tar --extract-hook="{ $list; } >'$work/packages.txt'" \
    --include=base-files,base-passwd,libc6,libstdc++6,libgcc-s1,netbase,busybox-static bookworm "$work/base.tar"
  tar -C "$root" -xf "$work/base.tar" --exclude='./dev/*'
  cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
  cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
  ln -sf busybox "$root/bin/sh"
  ln -sf busybox "$root/bin/sleep"
  mkdir -p "$root/etc/ssl/certs"
  (cd "$work" && apt-get download -qq ca-certificates && dpkg-deb -x ca-certificates_*.deb ca)
  cat "$work"/ca/usr/share/ca-certificates/mozilla/*.crt >"$root/etc/ssl/certs/ca-certificates.crt"
  {
    echo "# Debian packages"
    sort "$work/packages.txt"
    dpkg-deb -W --showformat='${Package} ${Version} (certificates only)\n' "$work"/ca-certificates_*.deb
  } >"$work/contents.txt"
  rm -rf "$root"/var/{lock,tmp,local,opt,mail} "$root"/usr/share/{doc,man,locale,info,lintian,base-passwd,bash-completion} \
    "$root"/var/{lib/{apt,dpkg,pam},cache,log,backups,spool,mail} "$root"/usr/lib/init
  mkdir -p "$root/tmp" && chmod 1777 "$root/tmp"
  # Nothing changes its user in there.
  find "$root" -xdev -type f -perm /6000 -exec chmod a-s {} +
}

container=$(buildah from "${base:-scratch}")
trap 'buildah rm "$container" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
[ -n "$base" ] || debian_root
[ -z "$base" ] || echo "# on top of $base" >"$work/contents.txt"

mkdir -p "$root/opt/splice" "$root/var/lib/splice" "$root/usr/share/splice" "$root/etc"
tar -C "$root/opt/splice" --strip-components=1 -xJf "$bundle"
if [ -n "$cuda_libs" ]; then
  for lib in "$cuda_libs"/libcublasLt.so.[0-9]* "$cuda_libs"/libnccl.so.[0-9]*; do
    [ -f "$lib" ] && [ ! -L "$lib" ] || continue
    soname=$(objdump -p "$lib" | awk '/SONAME/ {print $2}')
    cp "$lib" "$root/opt/splice/lib/$soname"
  done
  ls "$root"/opt/splice/lib/libcublasLt.so.* >/dev/null || { echo "no libcublasLt in $cuda_libs" >&2; exit 1; }
fi
{
  echo "# /opt/splice"
  (cd "$root/opt/splice" && find . -type f -printf '%P %s bytes\n' | sort)
} >>"$work/contents.txt"
cp "$work/contents.txt" "$root/usr/share/splice/contents.txt"
if [ -z "$base" ]; then
  echo 'splice:x:10001:10001::/var/lib/splice:/usr/sbin/nologin' >>"$root/etc/passwd"
  echo 'splice:x:10001:' >>"$root/etc/group"
fi
chown -R 0:0 "$root"
chown 10001:10001 "$root/var/lib/splice" && chmod 0750 "$root/var/lib/splice"
find "$root" -exec touch --no-dereference --date="@$epoch" {} +

tar -C "$root" --sort=name --numeric-owner -cf "$work/layer.tar" .
buildah add --quiet "$container" "$work/layer.tar" / >/dev/null
buildah config --user 10001:10001 --workingdir /var/lib/splice --env PATH=/opt/splice/bin:/usr/bin:/bin \
  --env SPLICE_CUDA_LIBS=/opt/splice/lib --stop-signal SIGTERM --entrypoint '[]' --cmd '["splice", "--help"]' \
  --label org.opencontainers.image.title=splice --label org.opencontainers.image.version="$version" \
  --label org.opencontainers.image.licenses=Apache-2.0 "$container"
buildah commit --quiet --timestamp "$epoch" "$container" "$name" >/dev/null
[ -z "$archive" ] || buildah push --quiet "$name" "oci-archive:$archive:$name"
buildah images --format '{{.Name}}:{{.Tag}}: {{.Size}}' "$name"
