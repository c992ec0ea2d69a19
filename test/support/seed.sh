# shellcheck shell=bash
# Random moments and places that can be had again; sourced by the scripts here. SEED=N is what an earlier run printed.
seed=${SEED:-$((RANDOM * 32768 + RANDOM))}
echo "seed $seed"
RANDOM=$seed
