/* Rounds of the ranks of one host, in shared memory. */
#ifndef SBN_ROUND_H
#define SBN_ROUND_H
#include "sbn.h"

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
  int64_t rows, count, behind_ns, is_told, done_ns;
};

SBN_API int64_t sbn_group_bytes(int64_t members);

/* Whether processes can sleep on a word of shared memory. */
SBN_API int sbn_has_futex(void);

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

/* The members that have not arrived at this turn, a bit each. */
SBN_API uint64_t sbn_late(const sbn_group *group);

/* Announces that this member reports its wait to the server. */
SBN_API void sbn_tell(sbn_group *group);

/* Takes no further turn, for one of the two reasons; a second call has no effect. */
SBN_API void sbn_close(sbn_group *group, int reason);

/* The graver reason of the members that take no further turn; 0 without any. */
SBN_API int sbn_closed(const sbn_group *group);

/* Copies the rows of this turn in member order: the number of rows of each member, all counts and all values. */
SBN_API void sbn_rows(const sbn_group *group, uint64_t *replicas, uint64_t *counts, double *values);
#endif
