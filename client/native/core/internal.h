/* Shared by the sources: the thread pool, and conversions between storage types and float. The conversions are free of
 * branches, so that compilers vectorise them. */
#ifndef SBN_INTERNAL_H
#define SBN_INTERNAL_H
#include "sbn.h"
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* Leaves a processor's resources to its other hardware threads while this one spins. */
INLINE void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

typedef void (*sbn_work)(const void *job, int64_t part);

/* Runs work(job, 0) to work(job, parts - 1), in any order, in the caller and up to threads - 1 helpers; returns when
 * all are done. The helpers serve one caller at a time; a concurrent caller does not wait for them but works alone. */
void sbn_share(int threads, int64_t parts, sbn_work work, const void *job);

/* The storage types, and the types in which the affine map of a slice is computed. */
typedef float f32, map_f32, map_bf16, map_f16;
typedef uint16_t bf16, f16;
typedef double f64, map_f64;

INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE float from_f32(f32 v) { return v; }
INLINE f32 to_f32(float v) { return v; }
INLINE double from_f64(f64 v) { return v; }
INLINE f64 to_f64(double v) { return v; }

INLINE float from_bf16(bf16 v) { return float_of((uint32_t)v << 16); }
INLINE bf16 to_bf16(float v) { /* to nearest even; NaN stays NaN */
  uint32_t u = bits_of(v);
  return v != v ? 0x7fc0 : (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE float from_f16(f16 v) {
  int32_t magnitude = v & 0x7fff;
  uint32_t normal = ((uint32_t)magnitude << 13) + (112u << 23), special = ((uint32_t)magnitude << 13) | 0x7f800000;
  uint32_t subnormal = bits_of((float)magnitude * 0x1p-24f);
  uint32_t u = magnitude < 0x400 ? subnormal : magnitude > 0x7bff ? special : normal;
  return float_of(u | (uint32_t)(v & 0x8000) << 16);
}
INLINE f16 to_f16(float v) { /* to nearest even; NaN stays NaN */
  uint32_t u = bits_of(v), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff, shifted = magnitude - (112u << 23);
  uint32_t normal = (shifted + 0xfff + ((shifted >> 13) & 1)) >> 13;
  /* the last bit of 0.5f has the value of the smallest float16, so the addition rounds */
  uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  uint32_t infinite = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  return (f16)(sign | (magnitude < 0x47800000 ? finite : infinite));
}

/* Element i of a vector whose type is known at run time. */
INLINE double read_at(const void *vector, int dtype, int64_t i) {
  switch (dtype) {
  case SBN_F32: return ((const float *)vector)[i];
  case SBN_BF16: return from_bf16(((const bf16 *)vector)[i]);
  case SBN_F16: return from_f16(((const f16 *)vector)[i]);
  default: return ((const double *)vector)[i];
  }
}
INLINE void write_at(void *vector, int dtype, int64_t i, double value) {
  switch (dtype) {
  case SBN_F32: ((float *)vector)[i] = (float)value; break;
  case SBN_BF16: ((bf16 *)vector)[i] = to_bf16((float)value); break;
  case SBN_F16: ((f16 *)vector)[i] = to_f16((float)value); break;
  default: ((double *)vector)[i] = value;
  }
}
#endif
