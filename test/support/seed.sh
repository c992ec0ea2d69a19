# shellcheck shell=bash
# Random times and places that can be reproduced; sourced by the scripts here. SEED=N repeats the run that printed N.
seed=${SEED:-$((RANDOM * 32768 + RANDOM))}
echo "seed $seed"
RANDOM=$seed
