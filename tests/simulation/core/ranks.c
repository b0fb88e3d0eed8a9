/* Ranks as threads that have rounds of random sizes after random pauses, all checked: ranks RANKS ROUNDS */
#include ROUND_C
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 16, CHANNELS = 300, COMPANIONS = 3 };
static int ranks, rounds;
static char *memory;

/* Values of many magnitudes, so that another order of addition gives other bits. */
static double value_in(int rank, int round, int at) {
  return (1 + (rank * 7919 + round * 104729 + at * 31) % 1009 / 7.0) * (rank % 2 ? 1e-8 : 1e8);
}

static void *live(void *argument) {
  const int me = (int)(intptr_t)argument;
  sbn_group group = {.memory = memory, .members = ranks, .me = me, .most_count = INT64_C(1) << 53, .spin_ns = 2000};
  unsigned chance = (unsigned)me + 1;
  static _Thread_local double values[COMPANIONS * CHANNELS], total[CHANNELS];
  for (int round = 1; round <= rounds; round++) {
    const int channels = 1 + round * 37 % CHANNELS, mine = 1 + (me + round) % COMPANIONS;
    const uint64_t counts[COMPANIONS] = {(uint64_t)round, 1, 2};
    int64_t rows = 0;
    for (int row = 0; row < mine; row++)
      for (int at = 0; at < channels; at++) values[row * channels + at] = value_in(me + row, round, at);
    if (rand_r(&chance) % 50 == 0) {
      struct timespec some = {0, rand_r(&chance) % 300000};
      nanosleep(&some, NULL);
    }
    int stands = sbn_round(&group, (uint64_t)round, counts, values, mine, 1, channels, total, round, 1000000);
    while (stands == SBN_WAITS) {
      if (rand_r(&chance) % 2) sbn_escalate(&group);
      if (sbn_late(&group) >> ranks || sbn_closed(&group)) exit(3);
      stands = sbn_wait(&group, total, 50000000);
    }
    if (stands != SBN_DONE) printf("rank %d, round %d: %d\n", me, round, stands), exit(3);
    for (int at = 0; at < channels; at++) {
      double sum = 0;
      rows = 0;
      for (int rank = 0; rank < ranks; rank++)
        for (int row = 0; row < 1 + (rank + round) % COMPANIONS; row++, rows++) {
          const double value = value_in(rank + row, round, at);
          sum = rows ? sum + value : value;
        }
      if (sum != total[at] || rows != group.rows) printf("rank %d, round %d: another sum\n", me, round), exit(4);
    }
    if (round % 100 == 0) {
      static _Thread_local uint64_t replicas[MOST], all_counts[MOST * COMPANIONS];
      static _Thread_local double all_values[MOST * COMPANIONS * CHANNELS];
      sbn_rows(&group, replicas, all_counts, all_values);
      if (all_values[0] != value_in(0, round, 0)) exit(5);
    }
  }
  sbn_close(&group, SBN_LEFT);
  return NULL;
}

int main(int argc, char **argv) {
  if (argc != 3 || (ranks = atoi(argv[1])) < 1 || ranks > MOST || (rounds = atoi(argv[2])) < 1) return 2;
  memory = aligned_alloc(4096, (size_t)(sbn_group_bytes(ranks) + 4095) / 4096 * 4096);
  memset(memory, 0, (size_t)sbn_group_bytes(ranks));
  pthread_t threads[MOST];
  for (intptr_t me = 0; me < ranks; me++) pthread_create(threads + me, NULL, live, (void *)me);
  for (int me = 0; me < ranks; me++) pthread_join(threads[me], NULL);
  printf("%d ranks, %d rounds\n", ranks, rounds);
  return 0;
}
