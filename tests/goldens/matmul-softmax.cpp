// softmax:float32[256, 128]
#include "onchip/kernel.h"


extern "C" int kernel(void** pointers) {
  const float* __restrict const in0 = (const float*)pointers[0];
  const float* const panels0 = (const float*)pointers[1];
  float* const out0 = (float*)pointers[2];
  int status = 0;
  #pragma omp parallel reduction(|:status)
   {
    const int64_t work9_floats = onchip::round_up(onchip::workspace_floats(128l, 128l, 64l, onchip::choose_blocking(128l, 128l, 64l, 64l)), 16l);
    char* const scratch = onchip::thread_scratch(132096l + work9_floats * 4l);
    float* const tile_mul_1 = (float*)(scratch + 0);
    float* const tile_top_2 = (float*)(scratch + 65536);
    float* const tile_weights_3 = (float*)(scratch + 66048);
    float* const tile_inverse_4 = (float*)(scratch + 131584);
    float* const work9 = (float*)(scratch + 132096l);
    #pragma omp for schedule(dynamic) nowait
    for (int64_t tile5 = 0; tile5 < 2l; ++tile5) {
      const int64_t t6 = 0;
      const int64_t t7 = tile5 % 2l * 128l;
      const int64_t q8 = tile5 / 2l;
      const int64_t v10 = onchip::most(t7, 0l);
      const int64_t v11 = onchip::least(t7 + 128l, 256l);
      {
        const int64_t v23 = t7 * -128l;
        {
          {
            const int64_t v12 = onchip::most(v11 - v10, 0l);
            const int64_t rows13 = v12;
            auto left14 = [=](long m) {
              const int64_t m15 = v10 + m;
              return (const float*)in0 + (m15 * 64l);
            }
            ;
            auto epilogue16 = [=, &status](long m, int mcount, long n, int ncount, const float* tile, long ld) __attribute__((always_inline)) {
              const int64_t m19 = v10 + m;
              int64_t m20 = m19;
              for (int64_t i17 = 0; i17 < mcount; ++i17) {
                const int64_t v24 = v23 + m20 * 128l;
                #pragma omp simd
                for (int j18 = 0; j18 < ncount; ++j18) {
                  const int64_t n21 = n + j18;
                  const float v22 = (tile[i17 * ld + j18] * 0.3f);
                  tile_mul_1[v24 + n21] = float(v22);
                }
                ++m20;
              }
            }
            ;
            const onchip::Blocking rows13_blocking = onchip::choose_blocking(128l, 128l, 64l, 64l);
            onchip::contract(rows13, 128l, 64l, 0l, 128l, panels0, rows13_blocking, onchip::direct_rows(left14), epilogue16, work9);
          }
        }
        const int64_t v31 = t7 * -1l;
        {
          for (int64_t i25 = v10; i25 < v11; ++i25) {
            float total26 = float(-INFINITY);
            int32_t total26_nan = 0;
            const int64_t v28 = v23 + i25 * 128l;
            #pragma omp simd reduction(max:total26) reduction(|:total26_nan)
            for (int64_t r27 = 0; r27 < 128l; ++r27) {
              const float v29 = tile_mul_1[v28 + r27];
              total26 = v29 > total26 ? v29 : total26;
              total26_nan |= v29 != v29 ? -1 : 0;
            }
            const float v30 = total26_nan ? float(NAN) : total26;
            tile_top_2[v31 + i25] = float(v30);
          }
        }
        {
          for (int64_t i32 = v10; i32 < v11; ++i32) {
            double total33 = 0.0f;
            const int64_t v36 = v23 + i32 * 128l;
            const float v38 = tile_top_2[v31 + i32];
            {
              float part34 = 0.0f;
              const int64_t part34_end = 128l;
              #pragma omp simd reduction(+:part34)
              for (int64_t r35 = 0; r35 < part34_end; ++r35) {
                const float v37 = tile_mul_1[v36 + r35];
                const float v39 = (v37 - v38);
                const float v40 = float(onchip::exp(v39));
                tile_weights_3[v36 + r35] = v40;
                part34 = part34 + v40;
              }
              total33 = total33 + part34;
            }
            const float v41 = float(total33);
            const float v42 = (1.0f / v41);
            tile_inverse_4[v31 + i32] = float(v42);
          }
        }
        {
          for (int64_t i43 = v10; i43 < v11; ++i43) {
            const int64_t v47 = v23 + i43 * 128l;
            const float v49 = tile_inverse_4[v31 + i43];
            const int64_t v51 = i43 * 128l;
            {
              const int64_t c44 = 0l, end45 = 128l;
              #pragma omp simd
              for (int64_t v46 = c44; v46 < end45; ++v46) {
                const float v48 = tile_weights_3[v47 + v46];
                const float v50 = (v48 * v49);
                out0[v51 + v46] = float(v50);
              }
            }
          }
        }
      }
    }
  }
  return status;
}
