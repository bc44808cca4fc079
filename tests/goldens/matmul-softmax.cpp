// softmax:float32[256, 128]
#include "onchip/kernel.h"


extern "C" int kernel(void** pointers) {
  const float* __restrict const in0 = (const float*)pointers[0];
  const float* const panels0 = (const float*)pointers[1];
  float* const out0 = (float*)pointers[2];
  int status = 0;
  #pragma omp parallel reduction(|:status)
   {
    const int64_t work8_floats = onchip::round_up(onchip::workspace_floats(128l, 128l, 64l, onchip::choose_blocking(128l, 128l, 64l, 64l)), 16l);
    char* const scratch = onchip::thread_scratch(66560l + work8_floats * 4l);
    float* const tile_mul_1 = (float*)(scratch + 0);
    float* const tile_top_2 = (float*)(scratch + 65536);
    float* const tile_total_3 = (float*)(scratch + 66048);
    float* const work8 = (float*)(scratch + 66560l);
    #pragma omp for schedule(dynamic) nowait
    for (int64_t tile4 = 0; tile4 < 2l; ++tile4) {
      const int64_t t5 = 0;
      const int64_t t6 = tile4 % 2l * 128l;
      const int64_t q7 = tile4 / 2l;
      const int64_t v9 = onchip::most(t6, 0l);
      const int64_t v10 = onchip::least(t6 + 128l, 256l);
      {
        const int64_t v22 = t6 * -128l;
        {
          {
            const int64_t v11 = onchip::most(v10 - v9, 0l);
            const int64_t rows12 = v11;
            auto left13 = [=](long m) {
              const int64_t m14 = v9 + m;
              return (const float*)in0 + (m14 * 64l);
            }
            ;
            auto epilogue15 = [=, &status](long m, int mcount, long n, int ncount, const float* tile, long ld) __attribute__((always_inline)) {
              const int64_t m18 = v9 + m;
              int64_t m19 = m18;
              for (int64_t i16 = 0; i16 < mcount; ++i16) {
                const int64_t v23 = v22 + m19 * 128l;
                #pragma omp simd
                for (int j17 = 0; j17 < ncount; ++j17) {
                  const int64_t n20 = n + j17;
                  const float v21 = (tile[i16 * ld + j17] * 0.3f);
                  tile_mul_1[v23 + n20] = float(v21);
                }
                ++m19;
              }
            }
            ;
            const onchip::Blocking rows12_blocking = onchip::choose_blocking(128l, 128l, 64l, 64l);
            onchip::contract(rows12, 128l, 64l, 0l, 128l, panels0, rows12_blocking, onchip::direct_rows(left13), epilogue15, work8);
          }
        }
        const int64_t v31 = t6 * -1l;
        {
          for (int64_t i24 = v9; i24 < v10; ++i24) {
            float total25 = float(-INFINITY);
            float lane26[32];
            for (int j28 = 0; j28 < 32; ++j28) lane26[j28] = float(-INFINITY);
            const int64_t v29 = v22 + i24 * 128l;
            for (int64_t r27b = 0; r27b < 128l; r27b += 32) {
              #pragma omp simd
              for (int64_t j28 = 0; j28 < 32; ++j28) {
                const int64_t r27 = r27b + j28;
                const float v30 = tile_mul_1[v29 + r27];
                lane26[j28] = onchip::maximum(lane26[j28], v30);
              }
            }
            for (int j28 = 0; j28 < 32; ++j28) total25 = onchip::maximum(total25, lane26[j28]);
            tile_top_2[v31 + i24] = float(total25);
          }
        }
        {
          for (int64_t i32 = v9; i32 < v10; ++i32) {
            double total33 = 0.0f;
            const int64_t v36 = v22 + i32 * 128l;
            const float v38 = tile_top_2[v31 + i32];
            {
              float part34 = 0.0f;
              const int64_t part34_end = 128l;
              #pragma omp simd reduction(+:part34)
              for (int64_t r35 = 0; r35 < part34_end; ++r35) {
                const float v37 = tile_mul_1[v36 + r35];
                const float v39 = (v37 - v38);
                const float v40 = float(onchip::exp(v39));
                part34 = part34 + v40;
              }
              total33 = total33 + part34;
            }
            const float v41 = float(total33);
            tile_total_3[v31 + i32] = float(v41);
          }
        }
        {
          for (int64_t i42 = v9; i42 < v10; ++i42) {
            const int64_t v46 = v22 + i42 * 128l;
            const float v48 = tile_top_2[v31 + i42];
            const float v51 = tile_total_3[v31 + i42];
            const int64_t v53 = i42 * 128l;
            {
              const int64_t c43 = 0l, end44 = 128l;
              #pragma omp simd
              for (int64_t v45 = c43; v45 < end44; ++v45) {
                const float v47 = tile_mul_1[v46 + v45];
                const float v49 = (v47 - v48);
                const float v50 = float(onchip::exp(v49));
                const float v52 = (v50 / v51);
                out0[v53 + v45] = float(v52);
              }
            }
          }
        }
      }
    }
  }
  return status;
}
