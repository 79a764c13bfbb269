#!/usr/bin/env bash
# Packs programs, plug-ins and the shared libraries they need into one archive that runs on another x86-64 Linux.
#   deploy/bundle/make.sh [--gpu-only] [BUILD_DIR] [OUT_DIR]
# Left out: glibc, libstdc++ and libgcc (the machine's own are as new), the driver, cuBLASLt and NCCL (installed with
# CUDA or from PyPI; see SPLICE_CUDA_LIBS). --gpu-only also leaves oneDNN out, which only the CPU backend needs.
set -euo pipefail
cd "$(dirname "$0")/../.."

gpu_only=0
[ "${1:-}" = "--gpu-only" ] && { gpu_only=1; shift; }
build=${1:-build}
out=${2:-$build}
version=$(sed -n 's/^project(splice VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
name=splice-$version-linux-x86_64
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/$name/bin" "$root/$name/lib/ucx"

plugins=()
for p in "$build"/bin/libsplice_*.so; do
  [ "$gpu_only" -eq 1 ] && [[ $p == *onednn* ]] && continue
  plugins+=("$p")
done
programs=("$build"/bin/splice "$build"/bin/splice-router "$build"/bin/splice-prefill "$build"/bin/splice-decode
  "$build"/bin/splice-kvstore)
ucx_folder=$(dirname "$(ldd "$build/bin/splice-prefill" | awk '/libuct.so/ {print $3}')")/ucx
modules=("$ucx_folder"/libuct_*.so.0)

cp "${programs[@]}" "$root/$name/bin/"
cp "${plugins[@]}" "$root/$name/lib/"
for m in "${modules[@]}"; do cp -L "$m" "$root/$name/lib/ucx/"; done

# Everything that these need, but what must be the machine's own.
ldd "${programs[@]}" "${plugins[@]}" "${modules[@]}" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $1, $3}' | sort -u |
  while read -r soname path; do
    case "$soname" in
      ld-linux*|libc.so*|libm.so*|libdl.so*|librt.so*|libpthread.so*|libresolv.so*|libutil.so*|libnsl.so*) ;;
      libstdc++.so*|libgcc_s.so*|libcuda.so*|libcudart.so*|libcublas*.so*|libnccl.so*|libsplice_*.so) ;;
      *) cp -L "$path" "$root/$name/lib/$soname" ;;
    esac
  done
find "$root/$name" -type f -exec strip --strip-unneeded {} +
cp README.md LICENSE NOTICE "$root/$name/"
cat >"$root/$name/INSTALL" <<'TEXT'
Unpack anywhere; no root is needed:
  bin/splice serve --model FOLDER            # auto: the first GPU, or the CPU where oneDNN is part of the bundle
  bin/splice serve --model FOLDER --backend cuda
A GPU needs an NVIDIA driver and cuBLASLt of the CUDA version the bundle was built with. Where that is not on the
loader's path: SPLICE_CUDA_LIBS=/folder/of/libcublasLt bin/splice … (with PyTorch installed from PyPI, that is the
folder nvidia/cu13/lib, or nvidia/cublas/lib, of its site-packages).
TEXT
# The same bytes for the same programs: order, times, owners and blocks do not depend on the machine.
archive=$out/$name.tar.xz
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
chmod -R u=rwX,go=rX "$root/$name"
tar -C "$root" --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner -c "$name" |
  xz -T2 --block-size=32MiB -6 >"$archive"
du -h --apparent-size "$archive" | awk '{print $2 ": " $1}'
