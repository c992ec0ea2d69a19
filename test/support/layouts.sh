# shellcheck shell=bash disable=SC2034
# Models and layouts that runs are compared on: check_layouts.sh, and same_as.sh beside it in test/tools.

# Steps of 24 sequences: divisible by 1, 2, 3, 4 and 8 ranks, and by micro-batches of 1, 2 and 3; in some rows 3 data ranks
# share 8 micro-batches of 3 unevenly. Every step is clipped.
# --adam-eps: some gradients are zero except for rounding (those of key biases, which cancel in the softmax), and with a
# small epsilon AdamW would scale that noise up to full updates.
common=(--context 24 --steps 10 --global-batch 576 --gradient-clip 0.5 --warmup-steps 2 --adam-eps 1e-5
    --val-every 5 --val-batches 2 --sample-every 10 --sample-tokens 4 --train-data 'text_train_*.bin' --val-data 'text_val_*.bin' --model tiny)
# Sizes with few divisors: cutting into shards, stages or vocabulary parts leaves remainders.
declare -A shapes=(
    [gpt2]="--vocab-size 257 --layers 5 --channels 60 --heads 4 --norm layernorm --position learned --mlp gelu
        --bias on --tie-embeddings on"
    [llama]="--vocab-size 259 --layers 6 --channels 56 --heads 4 --kv-heads 2 --mlp-width 52 --norm rmsnorm
        --position rope --mlp swiglu --bias off --tie-embeddings off"
    [parallel]="--vocab-size 263 --layers 4 --channels 28 --heads 2 --kv-heads 1 --mlp-width 38 --norm layernorm
        --position rope --mlp gelu --bias on --tie-embeddings off --block parallel --qk-norm on --window 7 --window-pattern 2:1"
)
shapes[filter]="--vocab-size 261 --layers 4 --channels 48 --heads 4 --mlp-width 52 --norm rmsnorm --position rope --mlp swiglu
    --bias off --tie-embeddings on --local-filter on"
shapes[tables]="${shapes[llama]} --ngram 2,3 --ngram-rows 300 --ngram-width 8 --ngram-heads 2 --ngram-layers 1,4"
# Sequences that 2 and 4 context ranks can divide; --document-end: packed documents
shapes[long]="--vocab-size 257 --layers 3 --channels 48 --heads 4 --kv-heads 2 --mlp-width 52 --norm rmsnorm --position rope
    --mlp swiglu --bias on --qk-norm on --window 100 --window-pattern 2:1 --context 512 --global-batch 3072 --micro-batch 6
    --document-end 32"
shapes[long-filter]="--vocab-size 261 --layers 3 --channels 48 --heads 4 --mlp-width 52 --position learned --bias on
    --local-filter on --context 512 --global-batch 3072 --micro-batch 6 --document-end 32"
shapes[parallel-filter]="${shapes[parallel]} --local-filter on"

# SHAPE RANKS OPTIONS; more_layouts run only in `make soak`
layouts='
gpt2      1 --micro-batch 2 --recompute block --zero 3 --offload optimizer
llama     1 --micro-batch 4 --pp-schedule interleaved --pp-chunks 3
gpt2      2 --micro-batch 6 --zero 2 --offload optimizer
gpt2      2 --micro-batch 4 --zero 3
llama     2 --micro-batch 6 --zero 1 --recompute mlp --optimizer lamb
llama     2 --micro-batch 2 --zero 3 --recompute block --optimizer muon
gpt2      3 --micro-batch 2 --zero 3 --prefetch 3 --optimizer lamb
parallel  3 --micro-batch 1 --zero 3 --offload optimizer
gpt2      4 --micro-batch 2 --zero 1 --shard-group 2
llama     4 --micro-batch 2 --zero 3 --shard-group 2 --recompute block --offload optimizer --optimizer muon
gpt2      2 --tp 2 --micro-batch 3 --tp-overlap 1 --recompute block
parallel  2 --tp 2 --micro-batch 6 --recompute block --offload optimizer
gpt2      4 --tp 2 --micro-batch 2 --zero 3 --optimizer muon
gpt2      2 --pp 2 --micro-batch 2 --pp-schedule zero-bubble
llama     2 --pp 2 --micro-batch 6 --pp-schedule interleaved --pp-chunks 3
gpt2      3 --pp 3 --micro-batch 4 --pp-layers 1,3,1
gpt2      4 --pp 2 --micro-batch 3 --zero 3 --pp-schedule zero-bubble
gpt2      4 --tp 2 --pp 2 --micro-batch 3 --pp-schedule zero-bubble --recompute mlp --optimizer muon
llama     6 --tp 2 --pp 3 --micro-batch 3 --pp-layers 3,1,2
llama     8 --tp 2 --pp 2 --zero 2 --micro-batch 2 --pp-layers memory --optimizer muon
parallel  8 --tp 2 --pp 2 --zero 1 --offload optimizer --pp-schedule zero-bubble --micro-batch 2 --optimizer muon
filter    2 --tp 2 --micro-batch 4 --recompute block
filter    3 --micro-batch 2 --zero 3 --offload optimizer --optimizer muon
filter    4 --tp 2 --pp 2 --micro-batch 6 --pp-schedule zero-bubble --optimizer muon
parallel-filter 2 --tp 2 --micro-batch 6 --recompute block
tables    1 --micro-batch 2 --ngram-place host --recompute block
tables    4 --pp 2 --micro-batch 2 --zero 2 --pp-schedule zero-bubble --recompute elementwise
tables    4 --tp 2 --pp 2 --micro-batch 3 --pp-schedule zero-bubble --ngram-place host
parallel-filter 4 --tp 2 --pp 2 --micro-batch 3 --pp-schedule zero-bubble --zero 1
long      2 --cp 2 --micro-batch 2 --zero 3
long      4 --cp 2 --tp 2 --micro-batch 3 --zero 1 --recompute block --optimizer muon
long-filter 4 --cp 4 --micro-batch 1 --zero 2 --recompute elementwise
long-filter 4 --cp 2 --pp 2 --micro-batch 2 --pp-schedule zero-bubble --offload optimizer
'
more_layouts='
gpt2      8 --micro-batch 3 --zero 3
llama     2 --tp 2 --micro-batch 6 --recompute elementwise
llama     2 --pp 2 --micro-batch 3 --pp-schedule gpipe
parallel  2 --pp 2 --micro-batch 2 --pp-schedule zero-bubble --recompute block
llama     4 --pp 2 --micro-batch 2 --zero 2 --pp-schedule interleaved
llama     3 --micro-batch 3 --zero 3 --offload optimizer
gpt2      1 --micro-batch 4 --pp-schedule zero-bubble
llama     1 --micro-batch 1 --zero 2
llama     2 --micro-batch 3
llama     3 --micro-batch 4 --zero 2 --overlap off
llama     4 --micro-batch 3 --zero 3 --prefetch 0
llama     8 --micro-batch 1 --zero 3 --shard-group 4 --recompute mlp
parallel  8 --micro-batch 3 --zero 3 --shard-group 2
gpt2      2 --tp 2 --micro-batch 8
parallel  2 --tp 2 --micro-batch 4
llama     4 --tp 4 --micro-batch 8 --optimizer lamb
llama     4 --tp 2 --micro-batch 3 --zero 2
gpt2      2 --pp 2 --micro-batch 4 --optimizer lamb
gpt2      4 --pp 4 --micro-batch 2
gpt2      4 --pp 2 --micro-batch 2 --zero 1
gpt2      4 --tp 2 --pp 2 --micro-batch 4
llama     4 --tp 2 --pp 2 --micro-batch 2 --pp-schedule interleaved
parallel  4 --tp 2 --pp 2 --micro-batch 6 --pp-schedule zero-bubble
gpt2      8 --tp 2 --pp 2 --zero 1 --micro-batch 2 --optimizer lamb
gpt2      8 --tp 2 --pp 2 --zero 3 --micro-batch 1 --pp-schedule interleaved --recompute block
gpt2      8 --pp 4 --zero 1 --micro-batch 2 --pp-schedule gpipe --offload optimizer --optimizer lamb
llama     8 --tp 4 --pp 2 --micro-batch 4 --pp-schedule zero-bubble
llama     8 --tp 2 --zero 3 --shard-group 2 --micro-batch 1
parallel  8 --tp 2 --pp 4 --micro-batch 3
filter    4 --tp 4 --micro-batch 8 --recompute mlp --optimizer lamb
filter    8 --tp 2 --pp 2 --zero 2 --micro-batch 2 --pp-layers 3,1
gpt2      6 --pp 2 --micro-batch 3 --zero 2 --pp-schedule interleaved
tables    2 --tp 2 --micro-batch 6 --optimizer muon
tables    2 --micro-batch 1 --zero 2 --pp-schedule zero-bubble
tables    2 --pp 2 --micro-batch 2 --pp-schedule interleaved --pp-chunks 3
tables    3 --zero 3 --micro-batch 4 --overlap off --ngram-place host --optimizer muon
tables    8 --tp 4 --micro-batch 2 --zero 1 --optimizer lamb
long      8 --cp 4 --tp 2 --micro-batch 2 --optimizer lamb
long      8 --cp 2 --tp 2 --pp 2 --micro-batch 2 --zero 2 --pp-schedule zero-bubble --optimizer muon
long-filter 8 --cp 2 --micro-batch 1 --zero 3 --shard-group 2 --optimizer muon
'
