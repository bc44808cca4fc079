#!/usr/bin/env bash
# compute-sanitizer over small kernels of each kind: bad addresses (memcheck), races between threads of
# a program (racecheck) and misuse of barriers (synccheck). Run from the repository's root on a machine
# with a GPU; prints failing lines and the summaries:
#
#   [TOOLS="memcheck racecheck"] bench/gpu/sanitize.sh [REGEX]     of kinds: "^engine", "softmax", ...
#
# A kind whose result is right, but which racecheck reports, is run alone by its name, with
# TOOLS=racecheck: what the copy engine writes is ordered by barriers in shared memory that the tool
# may not know. Exit code 1: something was found, or a tool can't run here.
set -u -o pipefail
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
export ONCHIP_CACHE="${ONCHIP_CACHE:-/tmp/onchip-cache}"
# freed blocks of PyTorch's allocator would hide bad addresses
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
python="${PYTHON:-python3}"
logs=$(mktemp -d)
failed=0

# once without the tool: builds everything, and must be right
"$python" bench/gpu/sanitize.py "$@" > "$logs/sanitize-plain.log" 2>&1 || failed=1
grep -v ': [0-9]* right$' "$logs/sanitize-plain.log" | tail -n 20

for tool in ${TOOLS:-memcheck racecheck synccheck}; do
  log="$logs/sanitize-$tool.log"
  start=$SECONDS
  # children only compile; 86 says that the tool found errors
  timeout "${SANITIZE_S:-240}" compute-sanitizer --tool "$tool" --target-processes application-only --launch-timeout 120 \
    --error-exitcode 86 "$python" bench/gpu/sanitize.py "$@" > "$log" 2>&1
  code=$?
  echo "$tool: exit code $code; $(grep -c ': [0-9]* right$' "$log") kinds right, $((SECONDS - start)) s"
  grep -E 'ERROR SUMMARY|RACECHECK SUMMARY|Device not supported|Invalid|Race reported|Error:' "$log" \
    | sort | uniq -c | sort -rn | head -n 8
  [ "$code" -eq 0 ] || failed=1
done
exit $failed
