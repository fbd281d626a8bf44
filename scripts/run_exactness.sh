#!/usr/bin/env bash
# Exact mode measured on a GPU: SmolLM2-135M inflated to 1.25 billion parameters, in parts of a few minutes each.
#   scripts/run_exactness.sh MODEL OUT PART...
# MODEL  a model folder, a GGUF file, or a folder with that file or its pieces: files over 10 MB, joined by name
# OUT    a folder for exactness-PART.json; results are written after every group of runs
# PART   batch-1 | batch-8 | contrast | sampling | float16; none = all
# PYTHON=python3         the interpreter; reading a GGUF file needs the package gguf
# TIME_LIMIT=480         seconds after which a call starts no more runs, for all parts together
# SPECDEC_COMMIT=...     the commit, where the files are no checkout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -ge 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
model=$1 out=$2
shift 2
python=${PYTHON:-python3}
limit=${TIME_LIMIT:-480}
[ $# -gt 0 ] || set -- batch-1 batch-8 contrast sampling float16
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
mkdir -p "$out"
begin=$SECONDS

model=$("$python" -m specdec.research.smollm2 "$model")
echo "model read after $((SECONDS - begin)) s"

run_part() {
    local left=$((limit - SECONDS + begin)) status=0
    [ "$left" -gt 0 ] || { echo "no time left for $1" >&2; return 1; }
    "$python" -m specdec bench --exactness --config configs/exactness.yaml --target "$model" --part "$1" \
        --time-limit "$left" --out "$out/exactness-$1.json" || status=$?
    echo "$1 done after $((SECONDS - begin)) s"
    return "$status"
}

status=0
for part in "$@"; do
    run_part "$part" || status=$?
done
exit "$status"
