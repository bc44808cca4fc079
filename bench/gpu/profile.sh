#!/usr/bin/env bash
# Nsight Compute's figures of one variant of a kernel, on a machine with a GPU, from the repository's
# root:
#
#   bench/gpu/profile.sh CASE PATTERN [N]    the N-th launch (default 3) of a function whose name
#                                            matches PATTERN, of the first variant of kernels.py's CASE
set -u -o pipefail
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
export ONCHIP_CACHE="${ONCHIP_CACHE:-/tmp/onchip-cache}"
metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum
metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,lts__t_sector_hit_rate.pct,l1tex__t_sector_hit_rate.pct
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
metrics+=,sm__inst_issued.avg.pct_of_peak_sustained_active
metrics+=,sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active
metrics+=,sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active
metrics+=,sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active
for stall in barrier long_scoreboard membar math_pipe_throttle lg_throttle mio_throttle wait not_selected; do
  metrics+=,smsp__average_warps_issue_stalled_${stall}_per_issue_active.ratio
done
# what the tool sees is one process that runs one variant
ncu --clock-control none --target-processes all -k "regex:$2" --launch-skip "${3:-3}" \
  --launch-count 1 --metrics "$metrics" "${PYTHON:-python3}" bench/gpu/kernels.py "$1" --limit 1 \
  --peers none 2>&1 | grep -E '^ *[a-z_0-9]+__|^  [A-Za-z].*\(|No kernels|==ERROR' | sed 's/  */ /g'
