// What every generated kernel includes: scalar functions, scratch memory, streaming stores, and
// the adapters that turn lambdas into the operands of contract.h.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <limits>

#include "onchip/contract.h"
#include "onchip/scalar.h"
#include "onchip/window.h"

namespace onchip {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Scratch memory of the calling thread, 64-byte aligned; it only grows, and lives as long as the
// thread does.
struct Scratch {
    char* memory = nullptr;
    size_t size = 0;
    ~Scratch() { free(memory); }
    char* at_least(size_t bytes) {
        if (bytes > size) {
            free(memory);
            size = (bytes + 4095) / 4096 * 4096;
            memory = (char*)aligned_alloc(4096, size);
        }
        return memory;
    }
};

inline char* thread_scratch(size_t bytes) {
    static thread_local Scratch scratch;
    return scratch.at_least(bytes);
}

// Memory of a kernel's partial results, of the thread that calls the kernel: all threads of the
// kernel use it, which is why it is not that thread's scratch.
inline char* workspace(size_t bytes) {
    static thread_local Scratch shared;
    return shared.at_least(bytes);
}

// Stores that bypass the caches, for results far larger than they are: the line is not read
// before it is written, and nothing useful is evicted.
template <class T>
inline void stream(T* to, const T* from, int64_t count) {
#if defined(__AVX__)
    constexpr int64_t step = 32 / sizeof(T);
    typedef char Bytes __attribute__((vector_size(32), may_alias));
    typedef char BytesAnywhere __attribute__((vector_size(32), aligned(1), may_alias));
    int64_t i = 0;
    while (i < count && ((uintptr_t)(to + i) & 31)) {
        to[i] = from[i];
        ++i;
    }
    // Assembler instead of <immintrin.h>, which takes a second to compile.
    for (; i + step <= count; i += step)
        asm volatile("vmovntdq %1, %0"
                     : "=m"(*(Bytes*)(to + i)) : "x"(*(const BytesAnywhere*)(from + i)));
    for (; i < count; ++i) to[i] = from[i];
#else
    memcpy(to, from, count * sizeof(T));
#endif
}
inline void stream_fence() {
#if defined(__SSE2__)
    asm volatile("sfence" ::: "memory");
#endif
}

template <class F>
struct DirectRows {
    F at;
    const float* row(long m) const { return at(m); }
};
template <class F>
DirectRows<F> direct_rows(F at) { return {at}; }

template <class F>
struct PackedRows {
    F fill;
    void pack(long m0, long mcount, long k0, long kc, float* to, long ld) const {
        fill(m0, mcount, k0, kc, to, ld);
    }
};
template <class F>
PackedRows<F> packed_rows(F fill) { return {fill}; }

// An epilogue that fetches the lines it will touch while the products before it are computed.
template <class F, class G>
struct Prefetching {
    F finish;
    G fetch;
    __attribute__((always_inline)) void operator()(long m, int mcount, long n, int ncount,
                                                   const float* tile, long ld) const {
        finish(m, mcount, n, ncount, tile, ld);
    }
    __attribute__((always_inline)) void prefetch(long m, int mcount, long n, int) const {
        fetch(m, mcount, n);
    }
};
template <class F, class G>
Prefetching<F, G> prefetching(F finish, G fetch) { return {finish, fetch}; }

}  // namespace onchip
