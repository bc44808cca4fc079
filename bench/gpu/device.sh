#!/usr/bin/env bash
# What is measured on a machine with a GPU, from the repository's root:
#
#   bench/gpu/device.sh STEP...     steps: facts launcher conformance kernels planner runtime
#                                    memory gpu engine resnet50 kernelbench sanitize
#
# Every step has a time limit in seconds (STEP_S=120 sets another for all) and prints the last lines
# of its output; all of it goes to $OUT/log.txt, results as JSON beside it (OUT is /tmp if not set).
# KERNELS chooses kernels.py's cases, CASES (a regular expression) those of a suite, WITHOUT peers
# that a suite leaves out (WITHOUT="inductor cudnn"), KERNELBENCH is a clone of KernelBench with what
# chooses its problems (KERNELBENCH="/path --every 3"). The steps resnet50 and kernelbench run only
# if they are named. Exit code: how many steps failed.
set -u -o pipefail
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export ONCHIP_CACHE="${ONCHIP_CACHE:-/tmp/onchip-cache}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor-cache}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-cache}"
export OUT="${OUT:-/tmp}"
python="${PYTHON:-python3}"
mkdir -p "$OUT" "$ONCHIP_CACHE"
logs=$(mktemp -d)
failed=0

# step NAME SECONDS LINES COMMAND...
step() {
  local name=$1 seconds=${STEP_S:-$2} lines=$3 start=$SECONDS code
  shift 3
  timeout -k 15 "$seconds" "$@" > "$logs/$name" 2>&1
  code=$?
  [ "$code" -eq 0 ] || failed=$((failed + 1))
  { echo "==== $name"; cat "$logs/$name"; } >> "$OUT/log.txt"
  echo "==== $name: exit code $code after $((SECONDS - start)) s"
  tail -n "$lines" "$logs/$name" | cut -c 1-180
}

[ $# -gt 0 ] || set -- facts launcher conformance kernels planner runtime memory gpu engine sanitize
for wanted in "$@"; do
  case $wanted in
    facts) step facts 60 8 "$python" bench/gpu/facts.py ;;
    launcher) step launcher 120 20 "$python" bench/gpu/launcher_check.py ;;
    planner) step planner 300 40 "$python" bench/gpu/planner_check.py ;;
    conformance) step conformance 300 12 "$python" -m pytest -m gpu tests/gpu -q --tb=short \
      -p no:cacheprovider ;;
    kernels) step kernels 400 90 "$python" bench/gpu/kernels.py ${KERNELS:-.} ;;
    sanitize) step sanitize 500 24 bench/gpu/sanitize.sh "${CASES:-}" ;;
    runtime) step runtime 240 30 "$python" bench/gpu/runtime_check.py ;;
    memory | gpu | engine) step "$wanted" 500 40 "$python" bench/gpu/suite.py "$wanted" \
      "${CASES:-}" --without ${WITHOUT:-} ;;
    resnet50) step resnet50 590 20 "$python" bench/gpu/suite.py gpu-resnet50 \
      "${CASES:-}" --without ${WITHOUT:-} ;;
    kernelbench) step kernelbench 590 60 "$python" bench/gpu/suite.py kernelbench \
      ${KERNELBENCH:?a clone of KernelBench} --without ${WITHOUT:-} ;;
    *) echo "no step $wanted" >&2; exit 2 ;;
  esac
done

exit $failed
