#!/usr/bin/env bash
# Mistakes are planted in the sources, one after another, each where others have made it or where it would not be noticed soon: the
# units named beside it must fail.
#
#   test/scripts/check_mutations.sh [WORD]    only mistakes whose names hold the word
#   EVERY=yes                                 plants them; each compiles a unit
# devices: cpu
# soak: EVERY=yes
# limit: 5400
cd "$(dirname "$0")/../.." || exit 1
. test/support/checks.sh
only=$1
plan 27
[ -n "$EVERY" ] || { skip "make soak plants mistakes in the sources, which takes minutes" 27; exit; }

# In each of these trees one mistake is made at a time.
trees=$(nproc)
[ "$trees" -le 8 ] || trees=8
for ((i = 0; i < trees; i++)); do
    copy_sources "$work/$i" || exit 1
done
unset UNIT CASE BUILDS RESULTS SUITE LONG BUILT ALLOWED_SKIPS

# caught UNIT FILE FROM TO    replaces some text, and succeeds if the unit then builds and fails
caught() {
    FROM=$3 TO=$4 perl -0pi.before -e '$n = s/\Q$ENV{FROM}\E/$ENV{TO}/g; END { exit !$n }' "$2" || { echo "$2: has no '$3'"; return 1; }
    UNIT=$1 BUILDS=cpu-fp32 JOBS=1 test/run.sh test >log 2>&1
    local code=$?
    mv "$2.before" "$2" && touch "$2" # or make takes what was compiled with the mistake for current
    tail -n 30 log
    [ $code != 0 ] && grep -q '^FAILED' log && ! grep -qE 'does not build|could not be run' log
}
made=0
# mistake NAME UNIT FILE FROM TO
mistake() {
    [[ $1 == *"$only"* && $((made++ % trees)) == "$tree" ]] || return
    check "$1" caught "${@:2}"
}
all_mistakes() {
    # kernels
    mistake "LayerNorm's gradient without its last term" norm kernels/norm.cuh 'dxhat - average - xhat * average_xhat' 'dxhat - average'
    mistake "a window that is one key too long" attention kernels/attention_shape.h 'at - window + 1' 'at - window'
    mistake "SwiGLU's slope without the sigmoid's own" gelu kernels/swiglu.cuh '(1 + gate * (1 - s))' '(1 + gate)'
    mistake "weight decay for biases, too" adamw kernels/adamw.cuh 'part.decays ? part.weight_decay : 0' 'part.weight_decay'
    mistake "RoPE's long waves as they were" rope kernels/rope.cuh '(1 - kept) / scaling.factor' '(1 - kept)'
    mistake "a gradient that crosses the border of documents" causal_conv kernels/causal_conv.cuh \
        ' || begins_at(sequence(row), next)' ''
    mistake "a step with a norm that is not a number" adamw kernels/global_norm.cuh 'norm <= limits.most_norm' '!(norm > limits.most_norm)'
    mistake "fp8 that overflows instead of saturating" fp8 kernels/fp8.cuh 'std::min(std::fabs(x), fp8_largest(format))' 'std::fabs(x)'
    # comm
    mistake "keys of the forward pass, or of another layer, in the backward pass" contexts train_gpt.cu \
        $'const override {\n        if (is_cut) g.contexts.start_gather' $'const override {\n        if (false) g.contexts.start_gather'
    mistake "a convolution that sees its own rank's row before a piece" contexts comm/context_parallel.h \
        'all + cut_.owner_of(other) * part' 'all + cut_.rank * part'
    mistake "a convolution whose gradient ends at the piece" contexts kernels/causal_conv.cuh \
        'is_cut() && (row + 1) % T == 0 ? after' 'is_cut() && (row + 1) % T == 0 ? nullptr : is_cut() && false ? after'
    mistake "a convolution that does not know of documents where it is cut" contexts kernels/causal_conv.cuh \
        'if (!continues && begins_at' 'if (!continues && (!is_cut() || row % T != 0 || position(row) == 0) && begins_at'
    mistake "gathered weights of the step before" zero comm/zero.h 'place.unit = -1;  // gathered' ';  // gathered'
    mistake "tied embeddings whose gradients are not summed" contexts comm/zero.h 'if (has_tied_copy(unit))' 'if (false)'
    mistake "a backward pass through the chunks in the order of the forward pass" pipeline_schedule comm/pipeline_schedule.h \
        'shape.chunks - 1 - forward.chunk' 'forward.chunk'
    mistake "copies that are saved twice" checkpoints comm/checkpoint_places.h 'if (!part.counts) return;' ''
    mistake "windows that send one piece too few" contexts comm/context_parallel.h 'ceil_div(window - 1, cut_.piece())' '(window - 1) / cut_.piece()'
    # data
    mistake "targets that are the inputs" data data/tokens/token_loader.h 'at.token + 1' 'at.token'
    mistake "an order with one sample too many" sample_order data/tokens/permutation.h 'while (i >= n_)' 'while (i > n_)'
    mistake "merges of the highest rank first" bpe data/tokenizer/bpe.h 'std::min_element(merges' 'std::max_element(merges'
    mistake "a loss that a run which went back keeps" checkpoint_files data/checkpoint/retention.h 'other.first >= step' 'other.first > step'
    mistake "a schedule that ends one step late" model data/options/schedule.h '(step + 1 - o.warmup_steps)' '(step - o.warmup_steps)'
    mistake "an undo log whose damage is not seen" tables_on_disk data/tables/undo_log.h 'head.hash != head.right_hash()' 'false'
    mistake "a spike rule whose variance lags" spikes data/run/spike_rule.h '(1 - a) * (variance + a * d * d)' '(1 - a) * variance'
    mistake "a rank's death taken for the user's error" supervisor data/supervisor/policy.h 'code == exit_bad_input && program_said_why' \
        'code == exit_bad_input'
    # train_gpt.cu
    mistake "positions that every tensor rank adds" contexts train_gpt.cu 'g.rows.rank() == 0 ? w[wpe] : nullptr' 'w[wpe]'
}
# sound UNITS    they pass as they are; else a mistake would be caught by whatever else fails
sound() { (cd "$work/0" && UNIT=$1 BUILDS=cpu-fp32 test/run.sh test) 2>&1; }
[ -n "$only" ] || check "without mistakes the units pass" \
    sound "$(grep -oP '^    mistake "[^"]*" \K\S+' test/scripts/check_mutations.sh | sort -u | xargs)"
for ((tree = 0; tree < trees; tree++)); do
    (cd "$work/$tree" && all_mistakes) &
done
wait
