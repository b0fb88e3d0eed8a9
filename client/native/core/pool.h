/* Threads that share the parts of one piece of work. */
#ifndef SBN_POOL_H
#define SBN_POOL_H
#include <stdint.h>

typedef void (*sbn_work)(const void *job, int64_t part);

/* Does work(job, 0) to work(job, parts - 1), in any order, by the caller and up to threads - 1 others; returns when all are
 * done. One caller at a time has the others' help, so that none waits for another: the rest work alone. */
void sbn_share(int threads, int64_t parts, sbn_work work, const void *job);
#endif
