# shellcheck shell=bash
# Checks against other programs: sets $python to one that has PyTorch and transformers, or ends the script with a
# message; sourced by it. PYTHON names one. $against is what the check is called.
for python in $PYTHON python3 /opt/*/bin/python3; do
    "$python" -c 'import torch, transformers' 2>/dev/null && break
    python=
done
if [ -z "$python" ]; then
    # shellcheck disable=SC2154  # the script sets it
    echo "skipped: $against (no Python with torch and transformers; name one in PYTHON)"
    exit 0
fi
