// mul:float32[64, 1000]
#include "onchip/kernel.h"


extern "C" int kernel(void** pointers) {
  const float* __restrict const in0 = (const float*)pointers[0];
  const float* __restrict const in1 = (const float*)pointers[1];
  float* const out0 = (float*)pointers[2];
  int status = 0;
  {
    for (int64_t tile1 = 0; tile1 < 1l; ++tile1) {
      const int64_t t2 = 0;
      {
        {
          for (int64_t c3 = 0l; c3 < 64000l; c3 += 512l) {
            const int64_t end4 = onchip::least(c3 + 512l, 64000l);
            #pragma omp simd
            for (int64_t v5 = c3; v5 < end4; ++v5) {
              const float v6 = in0[v5];
              const float v7 = in1[v5];
              const float v8 = (v6 + v7);
              const float v9 = (v8 * 2.0f);
              out0[v5] = float(v9);
            }
          }
        }
      }
    }
  }
  return status;
}
