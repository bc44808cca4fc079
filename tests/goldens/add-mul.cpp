// mul:float32[64, 1000]
#include "onchip/kernel.h"


extern "C" int kernel(void** pointers) {
  const float* __restrict const in0 = (const float*)pointers[0];
  const float* __restrict const in1 = (const float*)pointers[1];
  float* const out0 = (float*)pointers[2];
  int status = 0;
  #pragma omp parallel reduction(|:status)
   {
    #pragma omp for schedule(dynamic) nowait
    for (int64_t tile1 = 0; tile1 < 8l; ++tile1) {
      const int64_t t2 = tile1 % 8l * 8000l;
      const int64_t q3 = tile1 / 8l;
      const int64_t v4 = onchip::most(t2, 0l);
      const int64_t v5 = onchip::least(t2 + 8000l, 64000l);
      {
        {
          for (int64_t c6 = v4; c6 < v5; c6 += 512l) {
            const int64_t end7 = onchip::least(c6 + 512l, v5);
            #pragma omp simd
            for (int64_t v8 = c6; v8 < end7; ++v8) {
              const float v9 = in0[v8];
              const float v10 = in1[v8];
              const float v11 = (v9 + v10);
              const float v12 = (v11 * 2.0f);
              out0[v8] = float(v12);
            }
          }
        }
      }
    }
  }
  return status;
}
