// max_pool:float32[1, 32, 16, 16]
#include "onchip/kernel.h"

static float padding0[512];
template <class T> static void onchip_fill(T* row, T value) {
  if (row[511] != value) for (int i = 0; i < 512; ++i) row[i] = value;
}

extern "C" int kernel(void** pointers) {
  const float* __restrict const in0 = (const float*)pointers[0];
  const float* __restrict const in2 = (const float*)pointers[1];
  const float* __restrict const in3 = (const float*)pointers[2];
  const float* __restrict const in4 = (const float*)pointers[3];
  const float* __restrict const in5 = (const float*)pointers[4];
  const float* __restrict const in6 = (const float*)pointers[5];
  const float* const panels0 = (const float*)pointers[6];
  float* const out0 = (float*)pointers[7];
  int status = 0;
  onchip_fill(padding0, 0.0f);
  #pragma omp parallel reduction(|:status)
   {
    const int64_t work8_floats = onchip::round_up(onchip::workspace_floats(512l, 32l, 144l, onchip::choose_blocking(512l, 32l, 144l, 0l)), 16l);
    char* const scratch = onchip::thread_scratch(65536l + work8_floats * 4l);
    float* const tile_batch_norm_1 = (float*)(scratch + 0);
    float* const work8 = (float*)(scratch + 65536l);
    #pragma omp for schedule(dynamic) nowait
    for (int64_t tile2 = 0; tile2 < 2l; ++tile2) {
      const int64_t t3 = 0;
      const int64_t t4 = 0;
      const int64_t t5 = tile2 % 2l * 8l;
      const int64_t q6 = tile2 / 2l;
      const int64_t t7 = 0;
      const int64_t v9 = (t5 * 2l);
      const int64_t v10 = onchip::most(v9, 0l);
      const int64_t v11 = onchip::least(v9 + 16l, 32l);
      const int64_t v96 = onchip::most(t5, 0l);
      const int64_t v97 = onchip::least(t5 + 8l, 16l);
      {
        const int64_t v94 = t5 * -64l;
        {
          {
            const int64_t v12 = onchip::most(v11 - v10, 0l);
            const int64_t rows13 = 1l * v12 * 32l;
            auto left14 = [=, &status](long m0, long mcount, long k0, long kc, float* to, long ld) {
              const int64_t m16 = int32_t(m0) % int32_t(32l);
              const int64_t q17 = int32_t(m0) / int32_t(32l);
              const int64_t m18 = v10 + int32_t(q17) % int32_t(v12);
              const int64_t q19 = int32_t(q17) / int32_t(v12);
              const int64_t m20 = q19;
              int64_t m21 = m16;
              int64_t m22 = m18;
              int64_t m23 = m20;
              for (int64_t i15 = 0; i15 < mcount; ++i15) {
                float* const line = to + i15 * ld;
                const int64_t v40 = m23 * 16384l + m22 * 512l + m21 * 16l;
                if (k0 == 0 && kc == 144l) {
                  for (int64_t k24 = 0; k24 < 3l; ++k24) {
                    const int64_t v29 = (m22 + k24);
                    const int64_t v30 = (v29 + -1l);
                    const bool v31 = bool(onchip::ge(v30, 0l));
                    const bool v32 = bool(onchip::lt(v30, 32l));
                    const bool v37 = v31 && v32;
                    const int64_t v41 = v40 + k24 * 512l;
                    for (int64_t k25 = 0; k25 < 3l; ++k25) {
                      const int64_t v33 = (m21 + k25);
                      const int64_t v34 = (v33 + -1l);
                      const bool v35 = bool(onchip::ge(v34, 0l));
                      const bool v36 = bool(onchip::lt(v34, 32l));
                      const bool v38 = v37 && v35;
                      const bool v39 = v38 && v36;
                      const int64_t v42 = v41 + k25 * 16l;
                      {
                        const int64_t c27 = 0l, end28 = 16l;
                        const float* v43 = v39 ? in0 + (v42 + c27 + -528l) : padding0;
                        #pragma omp simd
                        for (int64_t k26 = c27; k26 < end28; ++k26) {
                          const float v44 = v43[k26 - c27];
                          line[((k24) * 3l + k25) * 16l + k26] = v44;
                        }
                      }
                    }
                  }
                }
                else {
                  for (long k45 = k0, run47; k45 < k0 + kc; k45 += run47) {
                    const int64_t first46 = int32_t(k45) % 16;
                    run47 = onchip::least(16l - first46, k0 + kc - k45);
                    const int64_t k48 = (int32_t(k45) / 16) % 3;
                    const int32_t q49 = (int32_t(k45) / 16) / 3;
                    const int64_t k50 = q49;
                    const int64_t v54 = (m22 + k50);
                    const int64_t v55 = (v54 + -1l);
                    const bool v56 = bool(onchip::ge(v55, 0l));
                    const bool v57 = bool(onchip::lt(v55, 32l));
                    const int64_t v58 = (m21 + k48);
                    const int64_t v59 = (v58 + -1l);
                    const bool v60 = bool(onchip::ge(v59, 0l));
                    const bool v61 = bool(onchip::lt(v59, 32l));
                    const bool v62 = v56 && v57;
                    const bool v63 = v62 && v60;
                    const bool v64 = v63 && v61;
                    const int64_t v65 = v40 + k50 * 512l + k48 * 16l;
                    {
                      const int64_t c52 = first46, end53 = first46 + run47;
                      const float* v66 = v64 ? in0 + (v65 + c52 + -528l) : padding0;
                      #pragma omp simd
                      for (int64_t k51 = c52; k51 < end53; ++k51) {
                        const float v67 = v66[k51 - c52];
                        line[k45 - k0 - first46 + k51] = v67;
                      }
                    }
                  }
                }
                if (++m21 == 32l) { m21 = 0l; ++m22; }
              }
            }
            ;
            auto epilogue68 = [=, &status](long m, int mcount, long n, int ncount, const float* tile, long ld) __attribute__((always_inline)) {
              const int64_t m71 = int32_t(m) % int32_t(32l);
              const int64_t q72 = int32_t(m) / int32_t(32l);
              const int64_t m73 = v10 + int32_t(q72) % int32_t(v12);
              const int64_t q74 = int32_t(q72) / int32_t(v12);
              const int64_t m75 = q74;
              int64_t m76 = m71;
              int64_t m77 = m73;
              int64_t m78 = m75;
              for (int64_t i69 = 0; i69 < mcount; ++i69) {
                const int64_t v95 = v94 + m78 * 16384l + m77 * 32l + m76;
                #pragma omp simd
                for (int j70 = 0; j70 < ncount; ++j70) {
                  const int64_t n79 = n + j70;
                  const float v80 = in2[n79];
                  const float v81 = (tile[i69 * ld + j70] + v80);
                  const float v82 = float(onchip::at_least(v81, 0.0f));
                  const float v83 = in3[n79];
                  const float v84 = in4[n79];
                  const float v85 = (v84 + 1e-05f);
                  const float v86 = float(onchip::rsqrt(v85));
                  const float v87 = (v83 * v86);
                  const float v88 = (v82 * v87);
                  const float v89 = in5[n79];
                  const float v90 = in6[n79];
                  const float v91 = (v90 * v87);
                  const float v92 = (v89 - v91);
                  const float v93 = (v88 + v92);
                  tile_batch_norm_1[v95 + n79 * 512l] = float(v93);
                }
                if (++m76 == 32l) { m76 = 0l; ++m77; }
              }
            }
            ;
            const onchip::Blocking rows13_blocking = onchip::choose_blocking(512l, 32l, 144l, 0l);
            onchip::contract(rows13, 32l, 144l, 0l, 32l, panels0, rows13_blocking, onchip::packed_rows(left14), epilogue68, work8);
          }
        }
        {
          for (int64_t i98 = 0l; i98 < 1l; ++i98) {
            const int64_t v102 = v94 + i98 * 16384l;
            const int64_t v112 = i98 * 8192l;
            for (int64_t i99 = v96; i99 < v97; ++i99) {
              const int64_t v103 = v102 + i99 * 64l;
              const int64_t v113 = v112 + i99 * 512l;
              for (int64_t i100 = 0l; i100 < 16l; ++i100) {
                const int64_t v104 = v103 + i100 * 2l;
                const int64_t v114 = v113 + i100 * 32l;
                for (int64_t i101 = 0l; i101 < 32l; ++i101) {
                  const float v105 = tile_batch_norm_1[v104 + i101 * 512l];
                  const float v106 = tile_batch_norm_1[v104 + i101 * 512l + 1l];
                  const float v107 = float(onchip::maximum(v105, v106));
                  const float v108 = tile_batch_norm_1[v104 + i101 * 512l + 32l];
                  const float v109 = float(onchip::maximum(v107, v108));
                  const float v110 = tile_batch_norm_1[v104 + i101 * 512l + 33l];
                  const float v111 = float(onchip::maximum(v109, v110));
                  out0[v114 + i101] = float(v111);
                }
              }
            }
          }
        }
      }
    }
  }
  return status;
}
