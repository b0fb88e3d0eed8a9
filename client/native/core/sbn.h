/* The native core: batch norm's arithmetic on a CPU. Plain C11 with GNU vectors; no Python.h, no torch.
 *
 * All vectors are float64 and have c values per part; tensors are dense. Sums are float64 from the first addition on,
 * in an order that depends on the shape alone, and nothing is contracted: the same slice gives the same sums on every
 * processor and with any number of threads. Functions that return int return SBN_OK, or SBN_NO_MEMORY and have done
 * nothing. */
#ifndef SBN_H
#define SBN_H
#include <stdint.h>

/* Raised when a function here changes its arguments or what it returns. */
#define SBN_VERSION 2

enum { SBN_F32 = 0, SBN_BF16 = 1, SBN_F16 = 2, SBN_F64 = 3 };
enum { SBN_OK = 0, SBN_NO_MEMORY = 1 };

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
SBN_API void sbn_finish(int64_t c, const double *total, double eps, int clamp, double *kept, void *running_mean,
                        void *running_var, int running_dtype, int64_t *tracked, double momentum);

/* y = (x - mean) * invstd * weight + bias; weight and bias may be NULL. */
SBN_API int sbn_normalize(const sbn_slice *slice, const void *x, void *y, const double *kept, const void *weight,
                          int weight_dtype, const void *bias, int bias_dtype);

/* sbn_finish and sbn_normalize. */
SBN_API int sbn_forward(const sbn_slice *slice, const void *x, void *y, const double *total, double eps, int clamp,
                        double *kept, const void *weight, int weight_dtype, const void *bias, int bias_dtype,
                        void *running_mean, void *running_var, int running_dtype, int64_t *tracked, double momentum);

/* row: 2c + 1 doubles: Σdy, Σdy·(x - mean), and the count n*l. */
SBN_API int sbn_backward_sums(const sbn_slice *slice, const void *dy, const void *x, const double *kept, double *row);

/* dx = invstd * weight * (dy - Σdy/n - (x - mean) * invstd² * slope * Σdy·(x - mean)/n), where total has the sums and n. */
SBN_API int sbn_input_grad(const sbn_slice *slice, const void *dy, const void *x, void *dx, const double *kept,
                           const double *total, const void *weight, int weight_dtype);

/* The gradients of weight and bias, each maybe NULL, from this slice's own row. */
SBN_API void sbn_param_grads(int64_t c, const double *row, const double *kept, void *dweight, int weight_dtype,
                             void *dbias, int bias_dtype);

/* sbn_input_grad and sbn_param_grads; weight and its gradient have one dtype. */
SBN_API int sbn_backward(const sbn_slice *slice, const void *dy, const void *x, void *dx, const double *kept,
                         const double *total, const double *row, const void *weight, int weight_dtype, void *dweight,
                         void *dbias, int bias_dtype);
#endif
