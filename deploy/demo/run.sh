#!/usr/bin/env bash
# The main job on real input: four programs on this machine answer questions about several documents, over HTTP and gRPC.
# Run by ./dev demo; needs build/bin.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=build/bin
model=models/splice-tiny
run=$(mktemp -d)
pids=()
cleanup() {
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  wait 2>/dev/null || true
  rm -rf "$run"
}
trap cleanup EXIT
bold() { printf '\033[1m%s\033[0m\n' "$*"; }

# start NAME PROGRAM FLAGS…: waits for its "ready key=value …" line and leaves it in $run/NAME.ready
start() {
  local name=$1
  shift
  "$bin/$1" "${@:2}" >"$run/$name.ready" 2>"$run/$name.log" &
  local pid=$!
  pids+=("$pid")
  for _ in $(seq 300); do
    grep -qs '^ready' "$run/$name.ready" && { printf '  %-16s %s\n' "$1" "$(cut -d' ' -f2- "$run/$name.ready")"; return; }
    kill -0 "$pid" 2>/dev/null || { cat "$run/$name.log" >&2; exit 1; }
    sleep 0.1
  done
  echo "$1 did not become ready" >&2
  exit 1
}
# address NAME KEY
address() { tr ' ' '\n' <"$run/$1.ready" | sed -n "s/^$2=//p"; }

bold "Starting the cluster (every port is free and on loopback)"
start store splice-kvstore --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 --data-dir "$run/chunks"
start decode splice-decode --model "$model" --worker-id decode-0
start prefill splice-prefill --model "$model" --worker-id prefill-0 --store "$(address store grpc)"
# The model was trained with <|seg|> in front of each document, and the questions write it into a user's message.
start router splice-router --model "$model" --http 127.0.0.1:0 --grpc 127.0.0.1:0 --special-tokens-in-text \
  --prefill "$(address prefill grpc)" --decode "$(address decode grpc)"
http=http://$(address router http)
grpc=grpc://$(address router grpc)
for _ in $(seq 100); do
  curl -fsS "$http/readyz" >/dev/null 2>&1 && break
  sleep 0.1
done

# ask TITLE ENDPOINT QUESTION-FILE EXPECTED
ask() {
  echo
  bold "$1"
  "$bin/splice" generate --endpoint "$2" --messages "deploy/demo/$3.json" --max-tokens 16 --json >"$run/answer.json"
  python3 - "$run/answer.json" "deploy/demo/$3.json" "$4" <<'PY'
import json, sys
answer, messages, expected = json.load(open(sys.argv[1])), json.load(open(sys.argv[2])), sys.argv[3]
s, t = answer["splice"], answer["splice"]["tokens"]
print("  question   ", messages[-1]["content"].rsplit("\n", 1)[-1])
print("  answer     ", answer["text"], "(as the documents say)" if answer["text"] == expected else f"(expected {expected})")
print(f"  prompt      {t['prompt']} tokens: {t['cached']} from cache, {t['computed']} computed by {s['workers']['prefill']}")
print(f"  KV moved    {s['bytes']['moved'] / 1e6:.1f} MB over {s['transport']} to {s['workers']['decode']}")
print(f"  first token {answer['ttft_ms']:.0f} ms, whole answer {answer['total_ms']:.0f} ms")
sys.exit(answer["text"] != expected)
PY
}
ask "1. A question about 20 documents, over HTTP: everything is computed" "$http" question-1 Tallshondford
ask "2. Another question about the same documents, over gRPC: their KV is reused" "$grpc" question-2 Troostheford

echo
bold "Try it yourself"
echo "  $bin/splice serve --model $model          # the same cluster in one process"
echo "  $bin/splice chat --endpoint http://127.0.0.1:8000"
