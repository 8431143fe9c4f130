// What the machine itself can do, for limits.py: reading memory, and integer multiply-adds in registers.
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

// Reads `bytes` (a multiple of 512) once, strictly forward.
uint64_t read_memory(const char* p, size_t bytes) {
  __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                    _mm256_setzero_si256()};
  for (size_t i = 0; i < bytes; i += 128) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256((const __m256i*)(p + i + 32 * j)));
    }
    _mm_prefetch(p + i + 1024, _MM_HINT_T0);
    _mm_prefetch(p + i + 1088, _MM_HINT_T0);
  }
  sum[0] = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
  return (uint64_t)_mm256_extract_epi64(sum[0], 0);
}

// Bytes by bytes, `rounds` times; returns multiply-adds done per round, `*sink` keeps the work alive.
#define CHAINS 12
#if defined(__AVX512VNNI__)
int int8_rounds(int64_t rounds, int* sink) {
  __m512i a = _mm512_set1_epi8(1), acc[CHAINS];
  for (int j = 0; j < CHAINS; ++j) acc[j] = _mm512_setzero_si512();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < CHAINS; ++j) acc[j] = _mm512_dpbusd_epi32(acc[j], a, a);
  }
  for (int j = 1; j < CHAINS; ++j) acc[0] = _mm512_add_epi32(acc[0], acc[j]);
  *sink = _mm512_reduce_add_epi32(acc[0]);
  return 64 * CHAINS;
}
#else
// vpmaddubsw and the addition of its 16-bit sums: what AVX2 has. In assembly, with three products under way:
// compilers move registers between them, and measure that.
#define PAIR(product, sum)                      \
  "vpmaddubsw %%ymm14, %%ymm14, %%ymm" #product \
  "\n\t"                                        \
  "vpaddw %%ymm" #product ", %%ymm" #sum ", %%ymm" #sum "\n\t"
int int8_rounds(int64_t rounds, int* sink) {
  __asm__ volatile(
      "vpxor %%ymm14, %%ymm14, %%ymm14\n"
      "1:\n\t" PAIR(11, 0) PAIR(12, 1) PAIR(13, 2) PAIR(11, 3) PAIR(12, 4) PAIR(13, 5) PAIR(11, 6) PAIR(12, 7)
          PAIR(13, 8) PAIR(11, 9) PAIR(12, 10) PAIR(13, 0)
      "decq %0\n\t"
      "jnz 1b"
      : "+r"(rounds)
      :
      : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12",
        "ymm13", "ymm14", "cc");
  *sink = 0;
  return 32 * CHAINS;
}
#endif

// Pairs of bfloat16 into float32, where the machine has an instruction for that; returns 0 where it has none.
#if defined(__AVX512BF16__)
int bf16_rounds(int64_t rounds, int* sink) {
  __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512 acc[CHAINS];
  for (int j = 0; j < CHAINS; ++j) acc[j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < CHAINS; ++j) acc[j] = _mm512_dpbf16_ps(acc[j], a, a);
  }
  for (int j = 1; j < CHAINS; ++j) acc[0] = _mm512_add_ps(acc[0], acc[j]);
  *sink = (int)_mm512_reduce_add_ps(acc[0]);
  return 32 * CHAINS;
}
#else
int bf16_rounds(int64_t rounds, int* sink) {
  (void)rounds;
  (void)sink;
  return 0;
}
#endif
