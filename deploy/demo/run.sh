#!/usr/bin/env bash
# Shows on this machine what Splice is for: deploy/demo/demo.py. Run by ./dev demo; needs build/bin.
exec python3 "$(dirname "$0")/demo.py" "$@"
