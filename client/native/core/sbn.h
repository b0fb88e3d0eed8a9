/* The native core: batch norm's arithmetic on a CPU, and rounds in shared memory. Plain C11 with GNU vectors; it needs no
 * headers of Python or torch.
 *
 * Vectors are float64 and have c values each; tensors are dense. Sums are float64 from the first addition on, in an
 * order that depends on the shape alone, without contraction: the same slice gives the same sums on every processor and
 * with any number of threads. Functions that return int return SBN_DONE, or SBN_NO_MEMORY without any effect; functions
 * with a round may also return its state. */
#ifndef SBN_H
#define SBN_H
#include <stdint.h>

/* Incremented when a signature here changes. */
#define SBN_VERSION 5

enum { SBN_F32 = 0, SBN_BF16 = 1, SBN_F16 = 2, SBN_F64 = 3 };

/* The state of a round. From SBN_DIFFERS to SBN_NOT_FINITE all members have arrived, and all get the same state: only the
 * server can end this round. */
enum { SBN_DONE, SBN_WAITS, SBN_CLOSED, SBN_DIFFERS, SBN_TOO_MANY, SBN_NOT_FINITE, SBN_NO_MEMORY };

/* The stages of a pass: compute the own row; also run the round and finish; or finish with a given sum of all rows. */
enum { SBN_MEASURE, SBN_EXCHANGE, SBN_FINISH };

#ifdef _WIN32
#define SBN_API __declspec(dllexport)
#else
#define SBN_API __attribute__((visibility("default")))
#endif

/* A dense slice: planes (n, c, l); or for channels_last n rows of c values, with l = 1. threads: the maximum. */
typedef struct {
  int64_t n, c, l;
  int32_t dtype, rows, threads, reserved;
} sbn_slice;

/* The constant part of a layer's calls. */
typedef struct {
  sbn_slice slice;
  int32_t weight_dtype, bias_dtype, running_dtype, clamp;
  double eps, momentum;
} sbn_plan;

/* The ranks that share memory, see below. */
typedef struct sbn_group sbn_group;

SBN_API int sbn_version(void);

/* Returns the instruction set in use: 0 the baseline, 1 AVX2 and F16C. wanted >= 0 limits it from now on; for tests. */
SBN_API int sbn_level(int wanted);

/* row: 2c + 1 doubles: Σx, Σx², and the count n*l. */
SBN_API int sbn_moments(const sbn_slice *slice, const void *x, double *row);

/* y = (x - mean) * invstd * weight + bias; weight and bias may be NULL. */
SBN_API int sbn_normalize(const sbn_plan *plan, const void *x, void *y, const double *saved, const void *weight,
                          const void *bias);

/* A layer's forward pass: sbn_moments; the round of a group, unless it is NULL; then the statistics, the running statistics
 * and sbn_normalize, unless the round's state is not SBN_DONE, which is returned, or all rows have one value per channel.
 *
 * buffer: 7c + 2 doubles: own row, sum of all rows, saved: mean; invstd, (var + eps)^-1/2, or max(var, eps)^-1/2 with
 * clamp; slope, 1 where invstd depends on the variance, else 0. A count of 0 gives zeros.
 *
 * The running statistics move by momentum, or by 1 / *tracked if it is NaN, bit-identical to torch's lerp. Each of the
 * three may be NULL, the first two only together. */
SBN_API int sbn_forward(const sbn_plan *plan, double *buffer, const void *x, void *y, const void *weight,
                        const void *bias, void *running_mean, void *running_var, int64_t *tracked, int stage,
                        sbn_group *group, uint64_t digest, int64_t wait_ns);

/* row: 2c + 1 doubles: Σdy, Σdy·(x - mean), and the count n*l. */
SBN_API int sbn_backward_sums(const sbn_slice *slice, const void *dy, const void *x, const double *saved, double *row);

/* dx = invstd * weight * (dy - Σdy/n - (x - mean) * invstd² * slope * Σdy·(x - mean)/n); total has the sums and n. */
SBN_API int sbn_input_grad(const sbn_plan *plan, const void *dy, const void *x, void *dx, const double *saved,
                           const double *total, const void *weight);

/* A layer's backward pass: sbn_backward_sums, the round, and sbn_input_grad, without dx no round; and the gradients of weight
 * and bias, each may be NULL, from the own row. buffer: 4c + 2 doubles: own row, sum of all rows. Weight and its gradient
 * have one dtype. */
SBN_API int sbn_backward(const sbn_plan *plan, double *buffer, const double *saved, const void *dy, const void *x,
                         void *dx, const void *weight, void *dweight, void *dbias, int stage, sbn_group *group,
                         uint64_t digest, int64_t wait_ns);

/* Rounds of the ranks of one host, in shared memory; implemented in round.c. */

/* The reasons why a member takes no further turn: it has shut down, or abandoned the memory. */
enum { SBN_ENDED = 1, SBN_GIVEN_UP = 2 };

/* One member's view of the memory of a group; for one thread at a time. */
struct sbn_group {
  /* Set by the caller: sbn_group_bytes(members) bytes of shared memory, initially zero; the number of members, at most
   * 64; this member; the time to spin before sleeping; and the maximum sum of counts. */
  char *memory;
  int64_t members, me, spin_ns, most_count;
  /* This member's latest turn, from 1; the digest of its key; its shape; the arrival times at it and the previous one. */
  uint64_t turn, digest;
  int64_t vectors, channels, came, came_before;
  /* The results of that turn: the number of rows; the sum of their counts; the delay of this member behind all others (0:
   * others were later, or unknown); whether some member may have reported to the server; and the completion time. */
  int64_t rows, count, behind_ns, is_escalated, done_ns;
};

SBN_API int64_t sbn_group_bytes(int64_t members);
SBN_API int sbn_has_futex(void); /* Whether processes can sleep on a word of shared memory. */

/* Arrives at the next turn, and waits for the others until the timeout or a signal.
 * counts: of each row. values: replicas x vectors x channels. total: vectors x channels, written once all arrived. */
SBN_API int sbn_round(sbn_group *group, uint64_t digest, const uint64_t *counts, const double *values,
                      int64_t replicas, int64_t vectors, int64_t channels, double *total, int64_t came_ns,
                      int64_t wait_ns);

/* sbn_round for one row, in the form of a layer's pass: two vectors, then the count. The arrival time is now. */
int sbn_round_of_row(sbn_group *group, uint64_t digest, int64_t channels, const double *row, double *total,
                     int64_t wait_ns);
int sbn_is_finite(const double *values, int64_t size);

/* Continues to wait; with wait_ns = 0 it only checks. */
SBN_API int sbn_wait(sbn_group *group, double *total, int64_t wait_ns);

SBN_API uint64_t sbn_late(const sbn_group *group);    /* The members that have not arrived at this turn, a bit each. */
SBN_API void sbn_escalate(sbn_group *group);          /* Announces that this member reports its wait to the server. */
SBN_API void sbn_close(sbn_group *group, int reason); /* Takes no further turn; a second call has no effect. */
SBN_API int sbn_closed(const sbn_group *group);       /* The graver reason of members that take no further turn, or 0. */

/* Copies the rows of this turn in member order: the number of rows of each member, all counts and all values. */
SBN_API void sbn_rows(const sbn_group *group, uint64_t *replicas, uint64_t *counts, double *values);
#endif
