# shellcheck shell=bash
# Checks against other programs: sets $python to one that has PyTorch and transformers, or skips so many checks and ends the
# script, which sources this with their number. PYTHON names one.
for python in $PYTHON python3 /opt/*/bin/python3; do
    "$python" -c 'import torch, transformers' 2>/dev/null && break
    python=
done
if [ -z "$python" ]; then
    skip "no Python with torch and transformers here" "$1"
    exit
fi
