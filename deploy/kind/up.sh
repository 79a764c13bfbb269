#!/usr/bin/env bash
# A whole cluster on this machine with kind: loads the image, installs the chart, measures it with `splice bench`, restarts every
# pool under load, and takes it down. The exit status is 0 when no request failed.
#   deploy/kind/up.sh [--keep] [--cluster NAME] [IMAGE]
#
#   --keep          leave the cluster running, and say how to reach it
#   --cluster NAME  default splice; a cluster of that name must not exist
#   IMAGE           default splice:VERSION, as deploy/images/make.sh or deploy/docker/Dockerfile made it
#
# Needs kind, kubectl and helm, and the image in buildah's store or in Docker's.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^project(splice VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
keep=0 cluster=splice
while [[ ${1:-} == --* ]]; do
  case "$1" in
    --keep) keep=1 ;;
    --cluster) cluster=$2; shift ;;
    *) echo "unknown option $1; see the head of $0" >&2; exit 2 ;;
  esac
  shift
done
image=${1:-splice:$version}
# Four requests a second for so long, while every pod is replaced.
restart_load_s=${SPLICE_KIND_LOAD_S:-480}
wait_s=600s

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
for tool in kind kubectl helm; do
  command -v "$tool" >/dev/null || { echo "$tool is not installed" >&2; exit 1; }
done

work=$(mktemp -d)
created=0
finish() {
  status=$?
  if [ "$created" -eq 1 ] && [ "$status" -ne 0 ]; then
    say "what the cluster looked like"
    kctl get pods -o wide >&2 || true
    kctl get events --sort-by=.lastTimestamp >&2 | tail -20 || true
  fi
  if [ "$created" -eq 1 ] && [ "$keep" -eq 0 ]; then kind delete cluster --name "$cluster" || true; fi
  rm -rf "$work"
}
trap finish EXIT
export KUBECONFIG=$work/kubeconfig
[ "$keep" -eq 0 ] || KUBECONFIG=$PWD/build/kind-$cluster.kubeconfig
mkdir -p "$(dirname "$KUBECONFIG")"
kctl() { kubectl --namespace splice "$@"; }

# An archive in Docker's form: its name is taken as it is, where kind would put a date in front of an OCI archive's.
say "saving $image"
if command -v buildah >/dev/null && buildah inspect --type image "$image" >/dev/null 2>&1; then
  buildah push --quiet "$image" "docker-archive:$work/image.tar:localhost/splice:kind"
elif command -v docker >/dev/null && docker image inspect "$image" >/dev/null 2>&1; then
  docker tag "$image" localhost/splice:kind
  docker save --output "$work/image.tar" localhost/splice:kind
else
  echo "no image $image in buildah's or Docker's store: ./dev images makes it" >&2
  exit 1
fi

say "making the cluster $cluster"
{
  printf 'kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nnodes:\n'
  for role in control-plane worker worker; do
    printf '  - role: %s\n    extraMounts:\n      - {hostPath: "%s", containerPath: /models/splice-tiny, readOnly: true}\n' \
      "$role" "$PWD/models/splice-tiny"
  done
} >"$work/cluster.yaml"
created=1
kind create cluster --name "$cluster" --config "$work/cluster.yaml" --wait 120s
kind load image-archive --name "$cluster" "$work/image.tar"

say "installing the chart"
key=$(od -An -N24 -tx1 /dev/urandom | tr -d ' \n')
kubectl create namespace splice
printf '%s bench\n' "$key" >"$work/api-keys"
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$work/namespace-secret"
kctl create secret generic splice-auth --from-file="$work/api-keys" --from-file="$work/namespace-secret"
kctl create secret generic splice-bench --from-literal="key=$key"
helm install splice deploy/helm/splice --namespace splice --values deploy/kind/values.yaml

pools=(statefulset/splice-store statefulset/splice-prefill statefulset/splice-decode deployment/splice-router)
wait_for_pools() { for pool in "${pools[@]}"; do kctl rollout status "$pool" --timeout="$wait_s"; done; }
wait_for_pools

start_bench() { # NAME LOAD REQUESTS
  sed "s/NAME/$1/; s/LOAD/$2/; s/REQUESTS/$3/" deploy/kind/bench.yaml | kctl apply -f -
}
finish_bench() { # NAME: prints its numbers; fails when a request failed
  for _ in $(seq 200); do
    kctl wait "job/$1" --for=condition=complete --timeout=5s >/dev/null 2>&1 && break
    kctl wait "job/$1" --for=condition=failed --timeout=1s >/dev/null 2>&1 && break
  done
  kctl logs "job/$1" --tail=-1 | tee "$work/$1.log"
  grep -q '"failed": 0\b' "$work/$1.log" || { echo "$1: requests failed" >&2; return 1; }
}

say "measuring"
start_bench bench concurrency=8 64
finish_bench bench

say "restarting every pool under load"
start_bench bench-restarts rate=4 $((4 * restart_load_s))
kctl wait pod --selector=job-name=bench-restarts --for=condition=ready --timeout=60s
for pool in "${pools[@]}"; do
  kctl rollout restart "$pool"
  kctl rollout status "$pool" --timeout="$wait_s"
done
running=$(kctl get job/bench-restarts -o 'jsonpath={.status.active}')
finish_bench bench-restarts
[ "${running:-0}" -gt 0 ] || { echo "the load ended before the restarts did: raise SPLICE_KIND_LOAD_S" >&2; exit 1; }

say "no request failed"
[ "$keep" -eq 0 ] || cat <<TEXT
export KUBECONFIG=$KUBECONFIG
kubectl -n splice port-forward service/splice-router 8000:8000 &
curl http://127.0.0.1:8000/v1/models -H 'Authorization: Bearer $key'
kind delete cluster --name $cluster
TEXT
