/* The native core: batch norm's arithmetic on a CPU, and rounds in shared memory. Plain C11 with GNU vectors; it needs
 * no headers of Python or torch.
 *
 * Rows and statistics are float64, in vectors of c values; tensors are dense. Sums are float64 from the first addition
 * on, in an order that depends on the shape alone, without contraction: the same slice gives the same sums on every
 * processor and with any number of threads. The table in library.py repeats the types of the functions. */
#ifndef SBN_H
#define SBN_H
#include <stdint.h>

/* Incremented when a signature here changes. */
#define SBN_VERSION 6

enum { SBN_F32 = 0, SBN_BF16 = 1, SBN_F16 = 2, SBN_F64 = 3 };

/* The state of a round. SBN_DIFFERS: digests or shapes differ. SBN_TOO_MANY: the sum of counts exceeds most_count.
 * SBN_NOT_FINITE: the sum has NaN or infinity. In a group SBN_DIFFERS, SBN_TOO_MANY and SBN_NOT_FINITE mean that all members have arrived and
 * get the same state; then only the server can end the round. A pass that returns SBN_NO_MEMORY has had no effect. */
enum { SBN_DONE, SBN_WAITS, SBN_CLOSED, SBN_DIFFERS, SBN_TOO_MANY, SBN_NOT_FINITE, SBN_NO_MEMORY };

/* The stages of a pass. SBN_MEASURE computes the own row. SBN_EXCHANGE does so too, runs the round, and finishes the
 * pass. SBN_FINISH only finishes the pass, with a given sum of all rows. */
enum { SBN_MEASURE, SBN_EXCHANGE, SBN_FINISH };

#define SBN_API __attribute__((visibility("default")))

/* The constant part of a layer's calls. Tensors are planes (n, c, l), or, if is_rows (channels_last), n rows of c
 * values with l = 1. threads: the maximum number of threads. */
typedef struct {
  int64_t n, c, l;
  int32_t dtype, is_rows, threads, weight_dtype, bias_dtype, running_dtype, clamp;
  double eps, momentum;
} sbn_plan;

/* The ranks that share memory, see below. */
typedef struct sbn_group sbn_group;

SBN_API int sbn_version(void);

/* Returns the instruction set in use: 0 the baseline, 1 AVX2 and F16C. wanted >= 0 limits it from now on; for tests. */
SBN_API int sbn_level(int wanted);

/* A layer's forward pass: computes the own row; runs the round, if there is a group; then computes the statistics, the
 * running statistics and y = (x - mean) * invstd * weight + bias. Returns the round's state. If it is not SBN_DONE, or
 * if the whole batch has one value per channel, the pass ends after the round. If rows is NULL, SBN_FINISH computes
 * only y, with the given statistics.
 *
 * rows: two rows of 2c + 1 doubles (Σx, Σx², count): the own one, and behind it the sum of all, which SBN_MEASURE does
 * not write. saved: three vectors of c doubles, which are zeros for a count of 0: the mean; invstd, which is
 * (var + eps)^-1/2 or, with clamp, max(var, eps)^-1/2; and slope, which is 1 where invstd depends on the variance, else
 * 0. weight and bias may be NULL.
 *
 * The running statistics move by momentum, or by 1 / *tracked if momentum is NaN, bit-identical to torch's lerp.
 * running_mean, running_var and tracked may be NULL, the first two only together. */
SBN_API int sbn_forward(const sbn_plan *plan, double *rows, double *saved, const void *x, void *y, const void *weight,
                        const void *bias, void *running_mean, void *running_var, int64_t *tracked, int stage,
                        sbn_group *group, uint64_t digest, int64_t wait_ns);

/* A layer's backward pass: computes the own row, Σdy, Σdy·(x - mean) and the count; runs the round; then computes
 * dx = invstd * weight * (dy - Σdy/n - (x - mean) * invstd² * slope * Σdy·(x - mean)/n), and from the own row dweight
 * and dbias. weight, dx, dweight and dbias may be NULL; without dx there is no round. dweight has weight's dtype. */
SBN_API int sbn_backward(const sbn_plan *plan, double *rows, const double *saved, const void *dy, const void *x,
                         void *dx, const void *weight, void *dweight, void *dbias, int stage, sbn_group *group,
                         uint64_t digest, int64_t wait_ns);

/* Rounds of the ranks of one host, in shared memory; implemented in round.c. */

/* The reasons why a member runs no further round in this memory: it left in good order, or abandoned the memory. */
enum { SBN_LEFT = 1, SBN_ABANDONED = 2 };

/* One member's view of the memory of a group; for one thread at a time. */
struct sbn_group {
  /* Set by the caller: sbn_group_bytes(members) bytes of shared memory, initially zero; the number of members, at most
   * 64; this member's index; the time to spin before sleeping; and the maximum sum of counts. */
  char *memory;
  int64_t members, me, spin_ns, most_count;
  /* A turn is one use of the memory, for one round. The latest turn of this member: its number, from 1; the digest of
   * the round key; the shape of the rows; this member's arrival times at this turn and at the one before. */
  uint64_t turn, digest;
  int64_t vectors, channels, came, came_before;
  /* The results of that turn: the number of rows; the sum of their counts; the delay of this member behind all others
   * (0: others were later, or unknown); whether a member may have reported to the server; and the completion time. */
  int64_t rows, count, behind_ns, is_escalated, done_ns;
};

SBN_API int64_t sbn_group_bytes(int64_t members);
SBN_API int sbn_has_futex(void); /* Whether processes can sleep on a word of shared memory. */

/* Arrives at the next turn, and waits for the others until the timeout or a signal.
 * counts: one per row. values: replicas x vectors x channels. total: vectors x channels, written once all arrived. */
SBN_API int sbn_round(sbn_group *group, uint64_t digest, const uint64_t *counts, const double *values,
                      int64_t replicas, int64_t vectors, int64_t channels, double *total, int64_t came_ns,
                      int64_t wait_ns);

/* The round of a pass: rows has the own row, and the sum goes behind it. Without a group the own row is the sum. */
int sbn_exchange(sbn_group *group, uint64_t digest, int64_t channels, double *rows, int64_t wait_ns);

/* Continues to wait; with wait_ns = 0 it only checks. */
SBN_API int sbn_wait(sbn_group *group, double *total, int64_t wait_ns);

SBN_API uint64_t sbn_late(const sbn_group *group);    /* The members that have not arrived at this turn, a bit each. */
SBN_API void sbn_escalate(sbn_group *group);          /* Announces that this member reports its wait to the server. */
SBN_API void sbn_close(sbn_group *group, int reason); /* Takes no further turn; a second call has no effect. */
SBN_API int sbn_closed(const sbn_group *group);       /* The gravest reason why members take no further turn; or 0. */

/* Copies the rows of this turn in member order: the number of rows of each member, all counts and all values. */
SBN_API void sbn_rows(const sbn_group *group, uint64_t *replicas, uint64_t *counts, double *values);
#endif
