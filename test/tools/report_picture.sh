#!/usr/bin/env bash
# Makes the picture of a report that the README shows: the page of some runs, rendered by headless Chromium, in 64 colors.
#
#   test/tools/report_picture.sh PROGRAM [RUN...]    PROGRAM: train_gpt; without runs, two small ones are trained on the source
#   OUTPUT=data/report/report.png                    the output file
#   WIDTH=1280 HEIGHT=1000                           the size of the visible part of the page, in pixels
#
# Needs chromium, and Python with Pillow (PYTHON=path) for reducing the colors.
set -e
cd "$(dirname "$0")/../.."
program=$(realpath "${1:?the program is missing}")
shift
python=${PYTHON:-python3}
browser=$(command -v chromium chromium-browser google-chrome | head -n 1)
[ -n "$browser" ] || { echo "report_picture: no chromium here; install it" >&2; exit 1; }
"$python" -c 'import PIL' || { echo "report_picture: $python has no Pillow; install it, or name another with PYTHON" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

output=$(realpath "${OUTPUT:-data/report/report.png}")
if [ $# = 0 ]; then
    "$program" tokenize kernels comm data --output "$work/source" --train-tokenizer 1024 --val-fraction 0.05 >/dev/null
    cd "$work" # so that the runs have short names
    for rate in 2e-3 6e-4; do
        "$program" train --model tiny --tokenizer source_tokenizer.json --train-data 'source_train_*.bin' \
            --val-data 'source_val_*.bin' --run-dir "rate-$rate" --steps 400 --learning-rate "$rate" \
            --val-every 40 --val-batches 8 --sample-every 200 --sample-tokens 80 --save-every 100 --log-every 100
        set -- "$@" "rate-$rate"
    done
fi
"$program" report "$@" --output "$work/report.html"
"$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/browser" --force-device-scale-factor=1 \
    --blink-settings=preferredColorScheme=1 --window-size="${WIDTH:-1280},${HEIGHT:-1000}" --virtual-time-budget=3000 \
    --screenshot="$work/page.png" "file://$work/report.html" 2>/dev/null
"$python" - "$work/page.png" "$output" <<'PYTHON'
import sys
from PIL import Image

Image.open(sys.argv[1]).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(sys.argv[2], optimize=True)
PYTHON
ls -l "$output"
