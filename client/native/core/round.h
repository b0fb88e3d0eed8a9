/* A round of the ranks of one host, in memory that they share. */
#ifndef SBN_ROUND_H
#define SBN_ROUND_H
#include "sbn.h"

/* Why a member comes to no further turn: it has ended in good order, or has given the memory up. */
enum { SBN_ENDED = 1, SBN_GIVEN_UP = 2 };

/* The memory of one group, as one member sees it; for one thread at a time. */
struct sbn_group {
  /* As given: sbn_group_bytes(members) bytes that the members share, all zero at first; how many members there are, 64
   * at most; which one this is; how long to look for the others before sleeping; and the largest sum of counts. */
  char *memory;
  int64_t members, me, spin_ns, most_count;
  /* This member's latest turn, from 1; what it was about; when it came to it, and to the one before. */
  uint64_t turn, digest;
  int64_t vectors, channels, came, came_before;
  /* What that turn has brought: how many rows, the sum of their counts, how much later than all others this member came
   * (0: others were later, or it cannot be known), whether some member may have told the server that it waits, and when
   * the sum was there. */
  int64_t rows, count, behind_ns, is_told, done_ns;
};

SBN_API int64_t sbn_group_bytes(int64_t members);

/* Whether the system lets processes sleep on a word of memory. */
SBN_API int sbn_has_futex(void);

/* Comes to the next turn, and waits for the others for so long at most, or until a signal.
 * counts: of each row. values: replicas x vectors x channels. total: vectors x channels, written once all have come. */
SBN_API int sbn_round(sbn_group *group, uint64_t digest, const uint64_t *counts, const double *values,
                      int64_t replicas, int64_t vectors, int64_t channels, double *total, int64_t came_ns,
                      int64_t wait_ns);

/* The same with one row and the sum as a layer's pass has them: of two vectors, with the count behind. It comes now. */
int sbn_round_of_row(sbn_group *group, uint64_t digest, int64_t channels, const double *row, double *total,
                     int64_t wait_ns);

int sbn_is_finite(const double *values, int64_t size);

/* Waits on for the others; with 0 it only looks. */
SBN_API int sbn_wait(sbn_group *group, double *total, int64_t wait_ns);

/* The members that have not come to this turn, a bit each. */
SBN_API uint64_t sbn_late(const sbn_group *group);

/* Lets the others know that this member tells the server that it waits. */
SBN_API void sbn_tell(sbn_group *group);

/* Comes to no further turn, for one of the two reasons; the first one stays. */
SBN_API void sbn_close(sbn_group *group, int reason);

/* Why some member comes to no further turn, the graver reason; 0 if all do. */
SBN_API int sbn_closed(const sbn_group *group);

/* Copies what all have brought to this turn, in order: how many rows each has brought, and all counts and values. */
SBN_API void sbn_rows(const sbn_group *group, uint64_t *replicas, uint64_t *counts, double *values);
#endif
