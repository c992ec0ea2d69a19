# shellcheck shell=bash
# Checks against other programs: sets $python to a Python with PyTorch and transformers. If there is none, skips N checks and
# ends the script, which sources this with N as its argument. PYTHON names a Python to try first.
for python in $PYTHON python3 /opt/*/bin/python3; do
    "$python" -c 'import torch, transformers' 2>/dev/null && break
    python=
done
if [ -z "$python" ]; then
    skip "no Python with torch and transformers here" "$1"
    exit
fi
