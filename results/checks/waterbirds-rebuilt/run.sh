#!/bin/sh
# Register the rebuilt set and run the tables of README.md beside this file.
#
#   PHOTOS   the unpacked set: metadata.csv and images/
#   WEIGHTS  tf_efficientnet_lite0.safetensors (SHA-256 64039413a093f7fe...)
#   RESULTS  where runs go
#   BENCH_DATA is where the registration goes, as for every command.
#
#   sh results/checks/waterbirds-rebuilt/run.sh features    ten methods, five seeds, frozen network
#   sh results/checks/waterbirds-rebuilt/run.sh finetuned   ten methods, two seeds, whole network
set -eu
: "${PHOTOS:?}" "${WEIGHTS:?}" "${RESULTS:?}" "${BENCH_DATA:?}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
name=waterbirds_rebuilt
methods=erm,groupdro,jtt,eiil,dfr,cnc,george,exmap,nct,nct_plus

if [ ! -d "$BENCH_DATA/own/$name" ]; then
    python -m bench data add "$name" "$PHOTOS" --groups place \
        --backbone tf_efficientnet_lite0 --resolution 112
fi
case "$1" in
features)
    python -m bench run --methods "$methods" --datasets "$name" --seeds 5 --features \
        --set backbone.weights="$WEIGHTS" --results "$RESULTS"
    ;;
finetuned)
    python -m bench run --methods "$methods" --datasets "$name" --seeds 2 --resolution 96 \
        --set backbone.weights="$WEIGHTS" --results "$RESULTS"
    ;;
*)
    echo "features or finetuned?" >&2
    exit 2
    ;;
esac
