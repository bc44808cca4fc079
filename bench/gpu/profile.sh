#!/usr/bin/env bash
# Nsight Compute's figures of one variant of a kernel, on a machine with a GPU, from the repository's
# root:
#
#   bench/gpu/profile.sh CASE PATTERN [N [OPTION...]]
#
# the N-th launch (default 3) of a function whose name matches PATTERN, of the first variant of
# kernels.py's CASE under kernels.py's options ("--generator triton", "--set patch=8x14x1"). Figures that
# ncu does not know here are named and left out.
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
# of kernels that the copy engine feeds and the tensor cores multiply: instructions and clocks of those
# cores, bytes to and from the last cache, conflicts in shared memory, clocks, warps that wait for products
wanted="sm__inst_executed_pipe_tensor_op_gmma.sum
sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active
sm__inst_executed_pipe_tensor_op_hmma.sum
sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active
sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active
sm__inst_executed_pipe_tma.sum
sm__inst_executed_pipe_uniform.avg.pct_of_peak_sustained_active
sm__cycles_elapsed.max
sm__cycles_active.avg
lts__t_bytes.sum
lts__t_bytes.avg.pct_of_peak_sustained_elapsed
l1tex__m_xbar2l1tex_read_bytes.sum
l1tex__m_l1tex2xbar_write_bytes.sum
l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum
l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum
l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum
l1tex__data_pipe_lsu_wavefronts_mem_shared.sum
smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio
smsp__average_warps_issue_stalled_warpgroup_arrive_per_issue_active.ratio
smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio"
known=$(ncu --query-metrics 2> /dev/null | cut -d ' ' -f 1)
[ -n "$known" ] || echo "ncu lists no figures here: those of the tensor cores are left out"
for name in $wanted; do
  if grep -qxF "${name%%.*}" <<< "$known"; then metrics+=,$name; else echo "not known here: $name"; fi
done
# what the tool sees is one process that runs one variant
ncu --clock-control none --target-processes all -k "regex:$2" --launch-skip "${3:-3}" \
  --launch-count 1 --metrics "$metrics" "${PYTHON:-python3}" bench/gpu/kernels.py "$1" --limit 1 \
  --peers none "${@:4}" 2>&1 | grep -E '^ *[a-z_0-9]+__|^  [A-Za-z].*\(|No kernels|==ERROR' | sed 's/  */ /g'
