#!/usr/bin/env bash
# The report of runs as a browser shows it: the pages of a healthy run, a sick one, both together, one that is still running and
# an earlier one, drawn by headless Chromium, with the pointer moved over them and every control used; and event files as
# TensorBoard reads them. The logs of the runs are written here, line by line.
# suite: test
# needs: cpu-fp32/train_gpt
# seconds: 10
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
program=$PWD/build/cpu-fp32/train_gpt earlier=$PWD/test/golden/earlier_run/run
plan 37
cd "$work" || exit 1

# ----------------------------------------------------------------------------------------------------------
# runs

# make_run FOLDER RANKS SLOW    writes the logs of 120 steps on this number of ranks, two machines and two pipeline
# stages; SLOW: the rank whose forward passes take 1.31 times as long, or -1
make_run() {
    mkdir -p "$1"
    cat >"$1/options.json" <<JSON
{"record_form": 2, "model": "tiny", "layers": 4, "channels": 128, "steps": 120, "global_batch": 4096, "sequence_length": 256,
 "learning_rate": $([ "$3" = -1 ] && echo 0.0006 || echo 0.001), "save_every": 50}
JSON
    awk -v ranks="$2" -v slow="$3" -v log_file="$1/log.jsonl" -v ranks_file="$1/ranks.jsonl" '
        function time(step) { return sprintf("\"time\":\"2026-01-31T12:%02d:%02d.000Z\"", step / 60, step % 60) }
        function list(name, base, phase_slow,   i, s) {
            for (i = 0; i < ranks; i++)
                s = s (i ? "," : "") sprintf("%.3f", base * (i == slow ? phase_slow : 1) * (1 + 0.004 * ((i * 7) % 5)))
            return "\"" name "\":[" s "]"
        }
        function passes(stage, gap,   i, at, s) {
            at = stage * 10
            for (i = 0; i < 4; i++) { s = s (i ? "," : "") sprintf("[\"forward\",%d,0,%g,%g]", i, at, at + 10); at += 10 + gap }
            for (i = 0; i < 4; i++) { s = s sprintf(",[\"backward\",%d,0,%g,%g]", i, at, at + 20); at += 20 + gap }
            return sprintf("{\"stage\":%d,\"actions\":[%s]}", stage, s)
        }
        BEGIN {
            for (i = 0; i < ranks; i++) {
                hosts = hosts (i ? "," : "") (i < ranks / 2 ? "\"alpha\"" : "\"beta\"")
                places = places (i ? "," : "") sprintf("[0,%d,0,%d]", i % (ranks / 2), i >= ranks / 2)
            }
            printf "{\"step\":0,\"start\":{%s,\"host\":\"alpha\",\"device\":\"a card\",\"version\":\"train_gpt\",\"processes\":%d,\"layout\":{\"dp\":%d,\"tp\":1,\"pp\":2,\"zero\":1},\"from\":null,\"changes\":[],\"memory\":[{\"class\":\"parameters\",\"bytes\":1073741824,\"host\":false},{\"class\":\"activations\",\"bytes\":2147483648,\"host\":false},{\"class\":\"staging\",\"bytes\":536870912,\"host\":true}],\"pipeline\":{\"schedule\":\"1f1b\",\"stages\":2,\"chunks\":1,\"micro_batches\":4,\"idle\":0.2}}}\n", time(0), ranks, ranks / 2 >log_file
            printf "{\"start\":{\"step\":0,%s,\"hosts\":[%s],\"places\":[%s]}}\n", time(0), hosts, places >ranks_file
            for (step = 1; step <= 120; step++) {
                if (slow >= 0 && step == 70) { printf "{\"step\":70,\"skipped\":true,\"reason\":\"the gradient is 40 times as large as usual\",%s}\n", time(70) >log_file; continue }
                printf "{\"step\":%d,\"loss\":%.5f,\"grad_norm\":%.4f,\"lr\":%.6f,\"tokens\":%d,\"tokens_per_s\":%.1f,\"mfu\":0.41,\"gemm_share\":0.62,\"ms\":%.1f,%s}\n", step, 2 + 5 * exp(-step / 40) + 0.05 * sin(step * 7), 1 + 0.2 * sin(step * 3) + (slow >= 0 && step == 69 ? 40 : 0), 0.001 * (step < 10 ? step / 10 : 1), step * 4096, 40000 + 300 * sin(step), 100 + sin(step), time(step) >log_file
                if (step % 40 == 0) printf "{\"step\":%d,\"val_loss\":%.5f}\n{\"step\":%d,\"sample\":\"A sample at %d </script> & <b>\"}\n", step, 2.1 + 5 * exp(-step / 40), step, step >log_file
                if (step % 50 == 0) printf "{\"step\":%d,\"checkpoint\":\"run/checkpoints/step_%08d\",\"bytes\":1181030,\"stall_ms\":2.5,\"write_ms\":80}\n", step, step >log_file
                if (step % 20 == 0) {
                    named = ""
                    if (slow >= 0) named = sprintf("{\"rank\":%d,\"host\":\"%s\",\"phase\":\"forward\",\"ratio\":1.31}", slow, (slow < ranks / 2) ? "alpha" : "beta")
                    printf "{\"step\":%d,\"steps\":20,\"ms\":{%s,%s,%s,%s},\"step_ms\":[],\"slow\":[%s]}\n", step, list("data", 1, 1), list("forward", 30, 1.31), list("backward", 60, 1), list("wait_pipeline", 20, 0.4), named >ranks_file
                    printf "{\"step\":%d,\"timings\":{\"ms\":{\"forward\":[29,30,%g,%d],\"backward\":[59,60,61,1]},\"waited\":[0.1,0.2,0.25,3]}}\n", step, (slow >= 0 ? 39.3 : 31), (slow >= 0 ? slow : 2) >log_file
                    if (named) printf "{\"step\":%d,\"slow\":[%s]}\n", step, named >log_file
                }
            }
            printf "{\"step\":120,\"pipeline\":{\"measured\":[%s,%s],\"ideal\":[%s,%s],\"measured_idle\":0.31,\"ideal_idle\":0.2}}\n", passes(0, 2), passes(1, 2), passes(0, 0), passes(1, 0) >ranks_file
        }'
}

make_run healthy 8 -1
make_run sick 8 5
{
    echo '{"step":121,"loss":null,"grad_norm":null}'
    echo '{"step":122,"loss":NaN,"grad_norm":Infinity}'
    echo 'what is this'
    echo '{"step":120,"checkpoint":null,"trouble":"sick/checkpoints: No space left on device"}'
    printf '{"step":123,"lo'
} >>sick/log.jsonl
sed -i 's/"steps": 120/"steps": 500/' sick/options.json
echo '{"step":120,"health":[{"rank":0,"sm_clock_mhz":1980},{"rank":5,"sm_clock_mhz":1410,"throttled":"power","xid":79}]}' >>sick/ranks.jsonl
echo '{"time":"2026-01-31T12:01:00.000Z","what":"rank 5 did not answer","who":"beta","lost_steps":12,"seconds":93.5}' >sick/incidents.jsonl
mkdir going
head -n 30 healthy/log.jsonl >going/log.jsonl
cp healthy/options.json going
cp -r "$earlier" earlier

check "a page of a healthy run" "$program" report healthy
"$program" report sick >sick.out 2>&1
check "a page of a sick run, and the terminal says what could not be read" grep -q 'log.jsonl: 1 line of .* could not be read' sick.out
check "a page of two" "$program" report healthy sick --output two.html
check "a page of an earlier run" "$program" report earlier
exec {lock}<>going/log.jsonl
flock -x "$lock"
"$program" report going >going.out 2>&1
check "a run whose log is locked goes on" grep -q '^going: running: step' going.out
exec {lock}>&-
check "no page looks anything up" eval '! grep -hoE "(src|href)=\"[^d#][^\"]*\"|url\(|@import|https?://[a-z.0-9/]*" healthy/report.html two.html | grep -v http://www.w3.org/2000/svg'
check "a table" "$program" report healthy --format csv
check "has a row for each step" test "$(grep -c ^healthy, healthy/report.csv)" = 120

# ----------------------------------------------------------------------------------------------------------
# TensorBoard

check "event files" "$program" report healthy --format tensorboard
for python in $PYTHON python3 /opt/*/bin/python3; do
    "$python" -c 'import tensorboard' 2>/dev/null && break
    python=
done
if [ -n "$python" ]; then
    check "TensorBoard reads them" "$python" - healthy <<'PYTHON'
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

events = EventAccumulator(sys.argv[1] + "/tensorboard", size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
lines = [json.loads(line) for line in open(sys.argv[1] + "/log.jsonl")]
for tag in ["loss", "val_loss", "grad_norm", "tokens"]:
    read = [(e.step, e.value) for e in events.Scalars(tag)]
    written = [(line["step"], line[tag]) for line in lines if tag in line]
    assert len(read) == len(written), (tag, len(read), len(written))
    for (a, x), (b, y) in zip(read, written):
        assert a == b and abs(x - y) <= 1e-6 * abs(y), (tag, a, x, b, y)
assert events.Scalars("timings/forward_ms_median")[0].step == 20
text = make_ndarray(events.Tensors("sample")[0].tensor_proto).reshape(-1)[0].decode()
assert text == "    A sample at 40 </script> & <b>", text
assert events.FirstEventTimestamp() > 1.7e9
PYTHON
else
    skip "no Python with tensorboard here" 1
fi

# ----------------------------------------------------------------------------------------------------------
# the pages in a browser

browser=$(command -v chromium chromium-browser google-chrome chrome | head -n 1)
if [ -z "$browser" ]; then
    skip "no chromium here" 27 "pages in a browser"
    exit
fi

# dump PAGE NAME [SCRIPT]    writes the document as drawn to NAME.dom, and the console's messages to NAME.console. The
# script is added at the end of the page.
dump() {
    sed '/^<\/html>$/d' "$1" >"$2.html"
    # On a busy machine the virtual time may end without a frame, so callbacks for a frame wait for a timer instead.
    { echo "<script>window.requestAnimationFrame = callback => setTimeout(callback, 16);${3-}</script>"; echo '</html>'; } >>"$2.html"
    timeout 120 "$browser" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$work/browser" \
        --window-size=1200,900 --virtual-time-budget=4000 --enable-logging=stderr --log-level=0 --dump-dom \
        "file://$PWD/$2.html" >"$2.dom" 2>"$2.log"
    grep CONSOLE "$2.log" >"$2.console"
    # .drawn: without the data, which contains every text too; .text: without tags, too
    sed -e 's/<script.*<\/script>//' -e '/<script/,/<\/script>/d' "$2.dom" >"$2.drawn"
    sed -e 's/<[^>]*>//g' "$2.drawn" >"$2.text"
}

# Uses every control: moves the pointer over each plot, selects a part of one, and tries every button, choice and input.
use='
const send = (on, kind, x, y) => { const box = on.getBoundingClientRect(); on.dispatchEvent(new PointerEvent(kind, { clientX: box.left + x, clientY: box.top + y, bubbles: true, pointerType: "mouse" })); };
const over = () => document.querySelectorAll(".plot").forEach(plot => { for (let x = 0; x < plot.clientWidth; x += 61) for (let y = 4; y < plot.clientHeight; y += 21) { send(plot, "pointermove", x, y); seen.add(plot.querySelector(".tip").textContent); } });
const seen = new Set();
setTimeout(() => {
    over();
    const loss = document.querySelector("#loss");
    send(loss, "pointerdown", 150, 50); send(loss, "pointermove", 260, 60); send(loss, "pointerup", 260, 60);
    document.querySelectorAll("button").forEach(button => { button.click(); button.click(); button.click(); });
    document.querySelectorAll("select").forEach(choice => [...choice.options].forEach(option => { choice.value = option.value; choice.dispatchEvent(new Event("change")); }));
    document.querySelectorAll("input").forEach(input => { input.value = 0.9; input.dispatchEvent(new Event("input")); });
    setTimeout(() => { over(); loss.dispatchEvent(new Event("dblclick", { bubbles: true })); }, 200);
    setTimeout(() => { document.body.append(Object.assign(document.createElement("ul"), { id: "seen", textContent: [...seen].join("\n") })); document.documentElement.dataset.used = "yes"; }, 600);
}, 300);'

# says NAME WORDS    the page shows the words, in one line
says() { grep -qF -- "$2" "$1.text"; }
draws() { grep -qE -- "$2" "$1.drawn"; }
quiet() { if grep . "$1.console"; then return 1; fi; }

dump healthy/report.html healthy 'setTimeout(() => document.body.append("drawn: " +
    [...document.querySelectorAll(".plot")].filter(plot => plot.querySelector("path")).map(plot => plot.id).join(" ") + "."), 1000);'
check "healthy: drawn to the end" draws healthy 'data-ready="yes"'
check "healthy: the console is quiet" quiet healthy
check "healthy: its state" says healthy 'complete: step 120 of 120'
check "healthy: every drawing has something in it" says healthy \
    "drawn: loss grad_norm lr tokens_per_s share ms heat measured ideal phases waited."
check "healthy: nobody is named" says healthy 'No rank was slower than its peers.'
check "healthy: nobody is named anywhere" eval '! grep -q "times as long" healthy.text'
check "healthy: nothing is to be told" eval '! grep -q "class=\"note\"" healthy.drawn'
check "healthy: idle shares" eval 'says healthy "31% idle" && says healthy "20% idle"'
check "healthy: memory" eval 'says healthy "parameters 1 GiB" && says healthy "device: 3 GiB" && says healthy "staging 512 MiB"'
check "healthy: samples, as texts" says healthy 'A sample at 120 &lt;/script&gt; &amp; &lt;b&gt;'
check "healthy: checkpoints" says healthy 'run/checkpoints/step_00000100'
check "healthy: options" says healthy '--save-every'

dump sick/report.html sick "$use"
check "sick: drawn to the end and used" draws sick 'data-ready="yes" data-used="yes"'
check "sick: the console is quiet" quiet sick
check "sick: its state" says sick 'stopped after step 122 of 500'
check "sick: the slow rank in words" says sick 'rank 5 on beta computes 1.31 times as long as its peers in forward'
check "sick: a device that is throttled" says sick 'rank 5 on beta: throttled by power, 1410 MHz where others run at 1980, XID 79'
check "sick: what could not be read" eval 'says sick "could not be read" && says sick "is cut short after 15 bytes" && says sick "a NaN or an infinity in 1 line"'
check "sick: a loss that is no number" says sick 'loss is not a finite number at 2 steps, first at step 121'
check "sick: a step that was skipped" says sick 'the gradient is 40 times as large as usual'
check "sick: an incident" says sick 'rank 5 did not answer'
check "sick: a checkpoint that failed" says sick 'NOT saved: sick/checkpoints: No space left on device'
check "sick: numbers under the pointer" eval 'grep -qE "rank 5 on beta.*forward: 39\.3 ms, 1\.29 of the median" sick.text && grep -qE "stage 1, (forward|backward) of micro-batch [0-3], part 0" sick.text && grep -qE "training [0-9.]+" sick.text'

dump two.html both "$use"
check "two runs: the console is quiet after use" eval 'quiet both && draws both "data-used=\"yes\""'
check "two runs: the option that differs" eval 'says both "--learning-rate" && says both "Options that differ between the runs"'
dump going/report.html going
check "a run that goes on: its state, and that the page can be made again" eval 'says going "running: step" && says going "make it again" && quiet going'
dump earlier/report.html earlier
check "an earlier run: drawn quietly" eval 'draws earlier "data-ready=\"yes\"" && quiet earlier'
