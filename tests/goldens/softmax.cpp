// softmax:float32[64, 1000]
#include "onchip/kernel.h"


extern "C" int kernel(void** pointers) {
  const float* __restrict const in0 = (const float*)pointers[0];
  float* const out0 = (float*)pointers[1];
  int status = 0;
  #pragma omp parallel reduction(|:status)
   {
    char* const scratch = onchip::thread_scratch(128l);
    float* const tile_top_1 = (float*)(scratch + 0);
    float* const tile_total_2 = (float*)(scratch + 64);
    #pragma omp for schedule(dynamic) nowait
    for (int64_t tile3 = 0; tile3 < 64l; ++tile3) {
      const int64_t t4 = 0;
      const int64_t t5 = tile3 % 64l * 1l;
      const int64_t q6 = tile3 / 64l;
      const int64_t v7 = onchip::most(t5, 0l);
      const int64_t v8 = onchip::least(t5 + 1l, 64l);
      {
        const int64_t v18 = t5 * -1l;
        {
          for (int64_t i9 = v7; i9 < v8; ++i9) {
            float total10 = float(-INFINITY);
            float lane11[32];
            for (int j13 = 0; j13 < 32; ++j13) lane11[j13] = float(-INFINITY);
            const int64_t v14 = i9 * 1000l;
            for (int64_t r12b = 0; r12b < 992l; r12b += 32) {
              #pragma omp simd
              for (int64_t j13 = 0; j13 < 32; ++j13) {
                const int64_t r12 = r12b + j13;
                const float v15 = in0[v14 + r12];
                lane11[j13] = onchip::maximum(lane11[j13], v15);
              }
            }
            for (int j13 = 0; j13 < 32; ++j13) total10 = onchip::maximum(total10, lane11[j13]);
            for (int64_t r16 = 992l; r16 < 1000l; ++r16) {
              const float v17 = in0[v14 + r16];
              total10 = onchip::maximum(total10, v17);
            }
            tile_top_1[v18 + i9] = float(total10);
          }
        }
        {
          for (int64_t i19 = v7; i19 < v8; ++i19) {
            double total20 = 0.0f;
            const int64_t v23 = i19 * 1000l;
            const float v25 = tile_top_1[v18 + i19];
            {
              float part21 = 0.0f;
              const int64_t part21_end = 1000l;
              #pragma omp simd reduction(+:part21)
              for (int64_t r22 = 0; r22 < part21_end; ++r22) {
                const float v24 = in0[v23 + r22];
                const float v26 = (v24 - v25);
                const float v27 = float(onchip::exp(v26));
                part21 = part21 + v27;
              }
              total20 = total20 + part21;
            }
            const float v28 = float(total20);
            tile_total_2[v18 + i19] = float(v28);
          }
        }
        {
          for (int64_t i29 = v7; i29 < v8; ++i29) {
            const int64_t v33 = i29 * 1000l;
            const float v35 = tile_top_1[v18 + i29];
            const float v38 = tile_total_2[v18 + i29];
            for (int64_t c30 = 0l; c30 < 1000l; c30 += 512l) {
              const int64_t end31 = onchip::least(c30 + 512l, 1000l);
              #pragma omp simd
              for (int64_t v32 = c30; v32 < end31; ++v32) {
                const float v34 = in0[v33 + v32];
                const float v36 = (v34 - v35);
                const float v37 = float(onchip::exp(v36));
                const float v39 = (v37 / v38);
                out0[v33 + v32] = float(v39);
              }
            }
          }
        }
      }
    }
  }
  return status;
}
