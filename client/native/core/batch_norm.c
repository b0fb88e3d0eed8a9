/* Batch norm of a slice: the choice of the kernel, the split into parts, and the statistics. All values that must be
 * bit-identical on all ranks are computed here without contraction, in the order of the formulas in numpy and torch. */
#define _GNU_SOURCE
#include "internal.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

/* Vectors of at most 32 bytes, as AVX2 has: gcc keeps wider ones in memory. */
typedef double v4d __attribute__((vector_size(32)));
typedef double v4du __attribute__((vector_size(32), aligned(8)));
typedef int64_t v4l __attribute__((vector_size(32)));
typedef float v4f __attribute__((vector_size(16), aligned(4)));
typedef int32_t v4i __attribute__((vector_size(16)));
typedef uint16_t v4h __attribute__((vector_size(8), aligned(2)));
typedef float v8f __attribute__((vector_size(32)));
typedef float v8fu __attribute__((vector_size(32), aligned(4)));
typedef uint32_t v8u __attribute__((vector_size(32)));
#define AT8(p) (*(const v8fu *)(p))

/* Loops over eights of values, each from e on. The last eight may overlap the previous ones and recompute some. */
#define EIGHTS(k, e, l) for (int64_t e; (l) >= 8 && (k) < (l) && (e = smaller(k, (l) - 8), 1); (k) += 8)

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Samples (in the rows layout: rows) n0 to n1 and, in planes, channels c0 to c1. */
typedef struct {
  int64_t n0, n1, c0, c1;
} part;
/* dy may be NULL. sums: vectors has the means, out has 2c doubles. affine: set_at wrote vectors; out is like x. */
typedef void (*kernel)(const sbn_plan *, part, const void *dy, const void *x, const void *vectors, void *out);
typedef struct {
  kernel sums, affine;
} kernels;

INLINE double finite_or_0(double v) { return v - v == 0 ? v : 0; }

/* Names of the functions for a LEVEL of instructions, and for values of type T. */
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define L(f) JOIN(f, LEVEL)
#define NAME(f) L(JOIN(f, T))
#define A JOIN(map, T)
#define LOAD(v) JOIN(from, T)(v)
#define STORE(v) JOIN(to, T)(v)
#define LOAD4(p) NAME(load4)(p)
#define LOAD8(p) NAME(load8)(p)
#define STORE8(p, v) NAME(store8)(p, v)

#define LEVEL 0
#define TARGET
#include "level.inc"
#ifdef __x86_64__
#define LEVEL 1
#define TARGET __attribute__((target("avx2,f16c")))
#include "level.inc"
static const kernels *const LEVELS[] = {kernels_0, kernels_1};
#else
static const kernels *const LEVELS[] = {kernels_0}; /* includes NEON on aarch64 */
#endif

static int best, level;

/* Not __builtin_cpu_supports: zig's libraries lack its data. */
static int has_level_1(void) {
#ifdef __x86_64__
  unsigned a, b, c, d, saved;
  const unsigned needed = bit_OSXSAVE | bit_AVX | bit_F16C;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & needed) != needed) return 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
  if ((saved & 6) != 6) return 0; /* the system does not save AVX registers */
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2) != 0;
#else
  return 0;
#endif
}

__attribute__((constructor)) static void find_level(void) { level = best = has_level_1(); }

int sbn_version(void) { return SBN_VERSION; }

int sbn_level(int wanted) {
  if (wanted >= 0) level = wanted < best ? wanted : best;
  return level;
}

/* The minimum elements of a part, the maximum number of parts, and the minimum channels for a split by channels.
 * The split depends on the shape alone, never on the number of threads. */
enum { MIN_ELEMENTS = 1 << 15, MAX_PARTS = 256, FEW_CHANNELS = 8 };

/* Waking a thread takes as long as adding this number of elements. */
enum { LARGE = 1 << 17 };

static int64_t size_of(const sbn_plan *p) { return p->n * p->c * p->l; }
static int64_t parts_of(int64_t number, int64_t each) { return (number + each - 1) / each; }

/* Planes with many channels or one sample are split by channels, without partial sums; other slices by samples. */
static int is_by_channels(const sbn_plan *p) { return !p->is_rows && (p->c >= FEW_CHANNELS || p->n == 1); }

/* A kernel over a slice, in parts of `size` channels, samples or rows; their outputs are `stride` doubles apart. */
typedef struct {
  kernel run;
  const sbn_plan *plan;
  const void *dy, *x, *vectors;
  void *out;
  int64_t size, parts, stride;
} job;

static job job_of(kernel run, const sbn_plan *p, const void *dy, const void *x, const void *vectors, void *out) {
  const int channels = is_by_channels(p);
  const int64_t number = channels ? p->c : p->n, elements = channels ? p->n * p->l : p->c * p->l;
  const int64_t least = larger(MIN_ELEMENTS / larger(elements, 1), parts_of(number, MAX_PARTS));
  const int64_t size = (least + 3) & ~(int64_t)3; /* rows are added four at a time */
  return (job){run, p, dy, x, vectors, out, size, parts_of(number, size), 0};
}

static void run_part(const void *of, int64_t number) {
  const job *its = of;
  const sbn_plan *p = its->plan;
  const int64_t from = number * its->size, to = from + its->size;
  const part at = is_by_channels(p) ? (part){0, p->n, from, smaller(to, p->c)} : (part){from, smaller(to, p->n), 0, p->c};
  its->run(p, at, its->dy, its->x, its->vectors, (double *)its->out + number * its->stride);
}

static void run(const job *its) {
  sbn_share(size_of(its->plan) < LARGE ? 1 : its->plan->threads, its->parts, run_part, its);
}

/* Converts Σ(x - shift) and Σ(x - shift)² of float64 to Σx and Σx²; shift: a channel's first value, 0 if not finite. */
static void unshift(const sbn_plan *p, const double *x, double *row) {
  const double n = row[2 * p->c];
  for (int64_t i = 0; i < p->c && n > 0; i++) {
    double *sum = row + i, *square = row + p->c + i;
    const double mean = finite_or_0(x[i * p->l]) + *sum / n;
    *square = (*square - *sum * *sum / n) + n * mean * mean;
    *sum = n * mean;
  }
}

/* Writes this replica's row: with a gradient Σdy and Σdy·(x - mean), else Σx and Σx². */
static int measure(const sbn_plan *p, const void *dy, const void *x, const double *mean, double *row) {
  const int64_t c = p->c;
  memset(row, 0, 2 * (size_t)c * sizeof *row);
  row[2 * c] = (double)(p->n * p->l);
  if (size_of(p) == 0) return SBN_DONE;
  job its = job_of(LEVELS[level][p->dtype].sums, p, dy, x, mean, row);
  double *partial = NULL;
  if (!is_by_channels(p) && its.parts > 1) {
    its.out = partial = calloc((size_t)(2 * c * its.parts), sizeof *partial);
    its.stride = 2 * c;
    if (!partial) return SBN_NO_MEMORY;
  }
  run(&its);
  for (int64_t i = 0; partial && i < its.parts; i++)
    for (int64_t k = 0; k < 2 * c; k++) row[k] += partial[2 * c * i + k];
  free(partial);
  if (!dy && p->dtype == SBN_F64) unshift(p, x, row);
  return SBN_DONE;
}

/* New memory of many megabytes takes longer to map in 4 KiB pages than to fill. */
static void use_huge_pages(const sbn_plan *p, void *y) {
#ifdef MADV_HUGEPAGE
  static const int64_t WIDTH[] = {[SBN_F32] = 4, [SBN_BF16] = 2, [SBN_F16] = 2, [SBN_F64] = 8};
  const uintptr_t bytes = (uintptr_t)(size_of(p) * WIDTH[p->dtype]), page = 4095;
  if (bytes < 1 << 22) return;
  const uintptr_t start = ((uintptr_t)y + page) & ~page, end = ((uintptr_t)y + bytes) & ~page;
  const int before = errno;
  madvise((void *)start, end - start, MADV_HUGEPAGE);
  errno = before;
#else
  (void)p, (void)y;
#endif
}

/* The vectors of an affine map, in the compute type: high, factor, addend, by_grad. They are allocated before the
 * round: a failure after it would leave the ranks out of step. */
static void *new_vectors(const sbn_plan *p) { return malloc(4 * (size_t)p->c * sizeof(double)); }

/* Sets the map (x - mean) * factor + addend; in float as (x - high) * factor + rest, where high is the rounded mean:
 * x - high is nearly exact, so that a mean far from zero costs no digits. */
static void set_at(const sbn_plan *p, void *vectors, int64_t i, double mean, double factor, double addend,
                   double by_grad) {
  const int64_t c = p->c;
  if (p->dtype == SBN_F64) {
    double *v = vectors;
    v[i] = mean, v[c + i] = factor, v[2 * c + i] = addend, v[3 * c + i] = by_grad;
  } else {
    float *v = vectors;
    v[i] = (float)mean, v[c + i] = (float)factor, v[3 * c + i] = (float)by_grad;
    v[2 * c + i] = (float)(addend - (mean - v[i]) * factor);
  }
}

/* Writes y, or with a gradient dx; total is the sum of all backward rows. */
static void apply(const sbn_plan *p, const void *dy, const void *x, void *out, const double *saved, const double *total,
                  const void *weight, const void *bias, void *vectors) {
  const int64_t c = p->c;
  const double *invstd = saved + c, *slope = invstd + c, n = dy && total[2 * c] > 0 ? total[2 * c] : 1;
  for (int64_t i = 0; i < c; i++) {
    const double scale = invstd[i] * (weight ? read_at(weight, p->weight_dtype, i) : 1);
    if (dy) {
      const double through_variance = invstd[i] * invstd[i] * (total[c + i] / n * slope[i]);
      set_at(p, vectors, i, saved[i], -scale * through_variance, -scale * (total[i] / n), scale);
    } else {
      set_at(p, vectors, i, saved[i], scale, bias ? read_at(bias, p->bias_dtype, i) : 0, 0);
    }
  }
  if (size_of(p) == 0) return;
  use_huge_pages(p, out);
  const job its = job_of(LEVELS[level][p->dtype].affine, p, dy, x, vectors, out);
  run(&its);
}

/* Σ(x - mean)², never below 0; NaN stays NaN. */
INLINE double centred_at(const double *total, int64_t c, int64_t i) {
  const double centred = total[c + i] - total[i] * total[i] / total[2 * c];
  return centred < 0 ? 0 : centred;
}

/* torch's lerp: one fused multiply-add from the nearer end; in float32 for all types but float64. */
static void move(void *running, int dtype, int64_t i, double newest, double share) {
  if (dtype == SBN_F64) {
    double *old = (double *)running + i;
    *old = fabs(share) < 0.5 ? fma(share, newest - *old, *old) : fma(share - 1, newest - *old, newest);
    return;
  }
  const float old = (float)read_at(running, dtype, i), to = (float)newest, by = (float)share;
  write_at(running, dtype, i, fabsf(by) < 0.5f ? fmaf(by, to - old, old) : fmaf(by - 1, to - old, to));
}

static void finish(const sbn_plan *p, const double *restrict total, double *saved, void *running_mean,
                   void *running_var, int64_t *tracked) {
  const int64_t c = p->c;
  const int clamp = p->clamp;
  const double n = total[2 * c], eps = p->eps;
  double *restrict mean = saved, *restrict invstd = saved + c, *restrict slope = saved + 2 * c, share = p->momentum;
  if (tracked) ++*tracked;
  if (n == 0) {
    memset(saved, 0, 3 * (size_t)c * sizeof *saved);
    return;
  }
  for (int64_t i = 0; i < c; i++) {
    const double variance = centred_at(total, c, i) / n, bounded = variance < eps ? eps : variance;
    mean[i] = total[i] / n;
    invstd[i] = 1 / sqrt(clamp ? bounded : variance + eps);
    slope[i] = !clamp || variance >= eps;
  }
  if (!running_mean || !running_var) return;
  if (share != share) share = !tracked ? 0 : 1 / (double)(*tracked > 1 ? *tracked : 1);
  for (int64_t i = 0; i < c; i++) {
    move(running_mean, p->running_dtype, i, mean[i], share);
    move(running_var, p->running_dtype, i, centred_at(total, c, i) / (n - 1), share);
  }
}

int sbn_forward(const sbn_plan *p, double *rows, double *saved, const void *x, void *y, const void *weight,
                const void *bias, void *running_mean, void *running_var, int64_t *tracked, int stage,
                sbn_group *group, uint64_t digest, int64_t wait_ns) {
  const double *total = rows ? rows + 2 * p->c + 1 : NULL;
  void *vectors = new_vectors(p);
  int code = vectors ? SBN_DONE : SBN_NO_MEMORY;
  if (code == SBN_DONE && stage != SBN_FINISH) code = measure(p, NULL, x, NULL, rows);
  if (code == SBN_DONE && stage == SBN_EXCHANGE) code = sbn_exchange(group, digest, p->c, rows, wait_ns);
  if (code == SBN_DONE && (stage == SBN_FINISH || (stage == SBN_EXCHANGE && total[2 * p->c] != 1))) {
    if (rows) finish(p, total, saved, running_mean, running_var, tracked);
    apply(p, NULL, x, y, saved, NULL, weight, bias, vectors);
  }
  free(vectors);
  return code;
}

int sbn_backward(const sbn_plan *p, double *rows, const double *saved, const void *dy, const void *x, void *dx,
                 const void *weight, void *dweight, void *dbias, int stage, sbn_group *group, uint64_t digest,
                 int64_t wait_ns) {
  void *vectors = new_vectors(p);
  int code = vectors ? SBN_DONE : SBN_NO_MEMORY;
  if (code == SBN_DONE && stage != SBN_FINISH) code = measure(p, dy, x, saved, rows);
  if (code == SBN_DONE && stage == SBN_EXCHANGE && dx) code = sbn_exchange(group, digest, p->c, rows, wait_ns);
  if (code == SBN_DONE && stage != SBN_MEASURE) {
    if (dx) apply(p, dy, x, dx, saved, rows + 2 * p->c + 1, weight, NULL, vectors);
    for (int64_t i = 0, c = p->c; i < c; i++) {
      if (dweight) write_at(dweight, p->weight_dtype, i, rows[c + i] * saved[c + i]);
      if (dbias) write_at(dbias, p->bias_dtype, i, rows[i]);
    }
  }
  free(vectors);
  return code;
}
