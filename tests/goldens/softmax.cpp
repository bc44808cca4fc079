// softmax:float32[64, 1000]
#include "onchip/kernel.h"


extern "C" int kernel(void** pointers) {
  const float* __restrict const in0 = (const float*)pointers[0];
  float* const out0 = (float*)pointers[1];
  int status = 0;
  #pragma omp parallel reduction(|:status)
   {
    char* const scratch = onchip::thread_scratch(4160l);
    float* const tile_top_1 = (float*)(scratch + 0);
    float* const tile_weights_2 = (float*)(scratch + 64);
    float* const tile_inverse_3 = (float*)(scratch + 4096);
    #pragma omp for schedule(dynamic) nowait
    for (int64_t tile4 = 0; tile4 < 64l; ++tile4) {
      const int64_t t5 = 0;
      const int64_t t6 = tile4 % 64l * 1l;
      const int64_t q7 = tile4 / 64l;
      const int64_t v8 = onchip::most(t6, 0l);
      const int64_t v9 = onchip::least(t6 + 1l, 64l);
      {
        const int64_t v16 = t6 * -1l;
        {
          for (int64_t i10 = v8; i10 < v9; ++i10) {
            float total11 = float(-INFINITY);
            int32_t total11_nan = 0;
            const int64_t v13 = i10 * 1000l;
            #pragma omp simd reduction(max:total11) reduction(|:total11_nan)
            for (int64_t r12 = 0; r12 < 1000l; ++r12) {
              const float v14 = in0[v13 + r12];
              total11 = v14 > total11 ? v14 : total11;
              total11_nan |= v14 != v14 ? -1 : 0;
            }
            const float v15 = total11_nan ? float(NAN) : total11;
            tile_top_1[v16 + i10] = float(v15);
          }
        }
        const int64_t v26 = t6 * -1000l;
        {
          for (int64_t i17 = v8; i17 < v9; ++i17) {
            double total18 = 0.0f;
            const int64_t v21 = i17 * 1000l;
            const float v23 = tile_top_1[v16 + i17];
            const int64_t v27 = v26 + i17 * 1000l;
            {
              float part19 = 0.0f;
              const int64_t part19_end = 1000l;
              #pragma omp simd reduction(+:part19)
              for (int64_t r20 = 0; r20 < part19_end; ++r20) {
                const float v22 = in0[v21 + r20];
                const float v24 = (v22 - v23);
                const float v25 = float(onchip::exp(v24));
                tile_weights_2[v27 + r20] = v25;
                part19 = part19 + v25;
              }
              total18 = total18 + part19;
            }
            const float v28 = float(total18);
            const float v29 = (1.0f / v28);
            tile_inverse_3[v16 + i17] = float(v29);
          }
        }
        {
          for (int64_t i30 = v8; i30 < v9; ++i30) {
            const int64_t v34 = v26 + i30 * 1000l;
            const float v36 = tile_inverse_3[v16 + i30];
            const int64_t v38 = i30 * 1000l;
            for (int64_t c31 = 0l; c31 < 1000l; c31 += 512l) {
              const int64_t end32 = onchip::least(c31 + 512l, 1000l);
              #pragma omp simd
              for (int64_t v33 = c31; v33 < end32; ++v33) {
                const float v35 = tile_weights_2[v34 + v33];
                const float v37 = (v35 * v36);
                out0[v38 + v33] = float(v37);
              }
            }
          }
        }
      }
    }
  }
  return status;
}
