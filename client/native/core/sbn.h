/* The native core: batch norm's arithmetic on a CPU. Plain C11 with GNU vectors; no Python.h, no torch.
 *
 * All vectors are float64 and have c values per part; tensors are dense. Sums are float64 from the first addition on,
 * in an order that depends on the shape alone, and nothing is contracted: the same slice gives the same sums on every
 * processor and with any number of threads. Functions that return int return SBN_DONE, or SBN_NO_MEMORY and have done
 * nothing; those that take part in a round may also return how it stands. */
#ifndef SBN_H
#define SBN_H
#include <stdint.h>

/* Raised when a function here changes its arguments or what it returns. */
#define SBN_VERSION 3

enum { SBN_F32 = 0, SBN_BF16 = 1, SBN_F16 = 2, SBN_F64 = 3 };

/* How a round stands. From SBN_DIFFERS to SBN_NOT_FINITE all have come, and all find the same: only the server can end
 * this round. */
enum { SBN_DONE, SBN_WAITS, SBN_CLOSED, SBN_DIFFERS, SBN_TOO_MANY, SBN_NOT_FINITE, SBN_NO_MEMORY };

/* How far a pass of a layer goes: to its own row; through the round; or from the sum of all rows, which is given. */
enum { SBN_MEASURE, SBN_EXCHANGE, SBN_FINISH };

#ifdef _WIN32
#define SBN_API __declspec(dllexport)
#else
#define SBN_API __attribute__((visibility("default")))
#endif

/* Planes (n, c, l); or n rows of c values where channels lie last, then l is 1. threads: how many may compute. */
typedef struct {
  int64_t n, c, l;
  int32_t dtype, rows, threads, reserved;
} sbn_slice;

/* A layer's call, as far as it stays the same from one to the next. */
typedef struct {
  sbn_slice slice;
  int32_t weight_dtype, bias_dtype, running_dtype, clamp;
  double eps, momentum;
} sbn_plan;

/* The ranks that share memory, see round.h. */
typedef struct sbn_group sbn_group;

SBN_API int sbn_version(void);

/* Returns the instructions in use: 0 what every processor of this kind has, 1 AVX2 and F16C. With wanted >= 0 they are
 * at most these from now on; for tests. */
SBN_API int sbn_level(int wanted);

/* row: 2c + 1 doubles: Σx, Σx², and the count n*l. */
SBN_API int sbn_moments(const sbn_slice *slice, const void *x, double *row);

/* From the sum of all rows to kept: 3c doubles: mean; invstd, (var + eps)^-1/2, or max(var, eps)^-1/2 with clamp; and
 * slope, 1 where invstd follows the variance, else 0. A count of 0 gives zeros.
 *
 * Running statistics move by momentum, or by 1 / *tracked if it is NaN; each of the three may be NULL, the first two only
 * together. Their bits are those of torch's lerp. */
SBN_API void sbn_finish(const sbn_plan *plan, const double *total, double *kept, void *running_mean, void *running_var,
                        int64_t *tracked);

/* y = (x - mean) * invstd * weight + bias; weight and bias may be NULL. */
SBN_API int sbn_normalize(const sbn_slice *slice, const void *x, void *y, const double *kept, const void *weight,
                          int weight_dtype, const void *bias, int bias_dtype);

/* A layer's forward pass: sbn_moments; the round of a group, or none where it is NULL; sbn_finish and sbn_normalize, but
 * not where the round finds that all rows together have one value per channel. room: 7c + 2 doubles: own row, sum of all rows, kept. It
 * returns how the round stands, and has gone no further unless that is SBN_DONE. */
SBN_API int sbn_forward(const sbn_plan *plan, double *room, const void *x, void *y, const void *weight, const void *bias,
                        void *running_mean, void *running_var, int64_t *tracked, int stage, sbn_group *group,
                        uint64_t digest, int64_t wait_ns);

/* row: 2c + 1 doubles: Σdy, Σdy·(x - mean), and the count n*l. */
SBN_API int sbn_backward_sums(const sbn_slice *slice, const void *dy, const void *x, const double *kept, double *row);

/* dx = invstd * weight * (dy - Σdy/n - (x - mean) * invstd² * slope * Σdy·(x - mean)/n), where total has the sums and n. */
SBN_API int sbn_input_grad(const sbn_slice *slice, const void *dy, const void *x, void *dx, const double *kept,
                           const double *total, const void *weight, int weight_dtype);

/* The gradients of weight and bias, each maybe NULL, from this slice's own row. */
SBN_API void sbn_param_grads(const sbn_plan *plan, const double *row, const double *kept, void *dweight, void *dbias);

/* A layer's backward pass likewise: sbn_backward_sums, the round, sbn_input_grad and sbn_param_grads; without dx there
 * is no round. room: 4c + 2 doubles: own row, sum of all rows. Weight and its gradient have one dtype. */
SBN_API int sbn_backward(const sbn_plan *plan, double *room, const double *kept, const void *dy, const void *x, void *dx,
                         const void *weight, void *dweight, void *dbias, int stage, sbn_group *group, uint64_t digest,
                         int64_t wait_ns);
#endif
