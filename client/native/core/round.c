/* A round in shared memory: each member writes its rows, waits for the rows of all, and adds them in member order.
 *
 *   futex | member 0: arrival, closed, escalated, asleep | slot 0 | slot 1 | member 1: arrival, ... | slot 0 | ...
 *
 * Every word but the futex has one writer, its member, so a killed process leaves no lock behind. Two alternating slots
 * suffice: no member arrives at turn n + 2 before all have arrived at n + 1, and a member arrives at n + 1 only after
 * reading turn n.
 *
 * All words are atomic and sequentially consistent: if two members arrive last at the same time, at least one sees the
 * other's arrival. The same holds if one member arrives while another goes to sleep or reports to the server. Slots are
 * plain memory: a member publishes its slot by its arrival and overwrites it after all have arrived at the next turn.
 */
#define _GNU_SOURCE
#include "internal.h"
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* Apart from the futex, members never write to the same cache line. A slot holds one row of two vectors of 16,000
 * channels, or several smaller rows; untouched pages use no memory. */
enum { LINE = 64, SLOT = 1 << 18, POLLS = 16 };

typedef struct {
  _Alignas(LINE) _Atomic uint32_t word;
} futex;
typedef struct {
  _Alignas(LINE) _Atomic uint64_t arrival;
  _Atomic uint64_t closed, escalated, asleep;
} place;
typedef struct {
  uint64_t digest, replicas, vectors, channels, came;
} head;

static const int64_t STRIDE = LINE + 2 * (int64_t)SLOT;
static const uint64_t MOST_WORDS = (SLOT - sizeof(head)) / 8;

int64_t sbn_group_bytes(int64_t members) { return LINE + members * STRIDE; }

static futex *futex_of(const sbn_group *g) { return (futex *)g->memory; }
static place *place_of(const sbn_group *g, int64_t member) { return (place *)(g->memory + LINE + member * STRIDE); }
static char *slot_of(const sbn_group *g, int64_t member) {
  return (char *)place_of(g, member) + LINE + (int64_t)(g->turn & 1) * SLOT;
}
static uint64_t value_of(_Atomic uint64_t *word) { return atomic_load_explicit(word, memory_order_seq_cst); }
static void set(_Atomic uint64_t *word, uint64_t value) { atomic_store_explicit(word, value, memory_order_seq_cst); }

/* The number of rows of this size, each with its count, that fit into a slot. */
static uint64_t slot_capacity(uint64_t vectors, uint64_t channels) {
  if (vectors > MOST_WORDS || channels > MOST_WORDS) return 0;
  return MOST_WORDS / (1 + vectors * channels);
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Sleeps until a wake or the timeout, but not if the word is no longer `value`; returns 0 after a signal. */
static int futex_sleep(futex *f, uint32_t value, int64_t at_most_ns) {
#ifdef __linux__
  struct timespec at_most = {at_most_ns / 1000000000, at_most_ns % 1000000000};
  return syscall(SYS_futex, &f->word, FUTEX_WAIT, value, &at_most, NULL, 0) == 0 || errno != EINTR;
#else
  (void)f, (void)value, (void)at_most_ns;
  return 1;
#endif
}

static int futex_wake(futex *f) {
#ifdef __linux__
  return syscall(SYS_futex, &f->word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0) >= 0;
#else
  (void)f;
  return 0;
#endif
}

int sbn_has_futex(void) {
  futex one = {0};
  return futex_wake(&one);
}

/* A member sets `asleep` and then checks the round again, so either this loop wakes it or it sees the new state. */
static void wake_all(const sbn_group *g) {
  atomic_fetch_add_explicit(&futex_of(g)->word, 1, memory_order_seq_cst);
  for (int64_t member = 0; member < g->members; member++)
    if (value_of(&place_of(g, member)->asleep)) {
      futex_wake(futex_of(g));
      return;
    }
}

static int have_all_arrived(const sbn_group *g) {
  for (int64_t member = 0; member < g->members; member++)
    if (value_of(&place_of(g, member)->arrival) < g->turn) return 0;
  return 1;
}

static int state_of(const sbn_group *g) {
  if (have_all_arrived(g)) return SBN_DONE;
  if (!sbn_closed(g)) return SBN_WAITS;
  return have_all_arrived(g) ? SBN_DONE : SBN_CLOSED; /* all may have arrived, and one closed, since the first check */
}

static int wait_for_all(const sbn_group *g, int64_t ns) {
  int found = state_of(g);
  if (found != SBN_WAITS || ns <= 0) return found;
  int64_t now = now_ns();
  const int64_t spun = now + g->spin_ns, end = now + ns;
  while (now < spun) {
    for (int n = 0; n < POLLS; n++) {
      if (have_all_arrived(g)) return SBN_DONE;
      relax();
    }
    now = now_ns();
  }
  _Atomic uint64_t *asleep = &place_of(g, g->me)->asleep;
  while (now < end) {
    uint32_t word = atomic_load_explicit(&futex_of(g)->word, memory_order_seq_cst);
    set(asleep, 1);
    found = state_of(g);
    int is_woken = found != SBN_WAITS || futex_sleep(futex_of(g), word, end - now);
    set(asleep, 0);
    if (found != SBN_WAITS) return found;
    if (!is_woken) break;
    now = now_ns();
  }
  return state_of(g);
}

static int is_finite(const double *values, int64_t size) {
  /* NaN and infinity have all exponent bits set, so adding one to the exponent carries into the sign bit. */
  uint64_t found = 0;
  for (int64_t k = 0; k < size; k++) {
    uint64_t bits;
    memcpy(&bits, values + k, sizeof bits);
    found |= (bits & INT64_MAX) + (UINT64_C(1) << 52);
  }
  return !(found >> 63);
}

static void write_rows(sbn_group *g, const uint64_t *counts, const double *values, uint64_t replicas) {
  char *slot = slot_of(g, g->me);
  int fits = replicas <= slot_capacity(g->vectors, g->channels);
  head mine = {g->digest, fits ? replicas : 0, g->vectors, g->channels, g->came};
  memcpy(slot, &mine, sizeof mine);
  if (!fits) return;
  memcpy(slot + sizeof mine, counts, 8 * replicas);
  memcpy(slot + sizeof mine + 8 * replicas, values, 8 * replicas * g->vectors * g->channels);
}

/* Adds the rows of all members. Other processes have written the slots, so their sizes are not trusted. */
static int add_up(sbn_group *g, double *total) {
  const int64_t size = g->vectors * g->channels;
  const uint64_t capacity = slot_capacity(g->vectors, g->channels);
  int64_t latest = 0;
  g->rows = g->count = 0;
  for (int64_t member = 0; member < g->members; member++) {
    const char *slot = slot_of(g, member);
    head its;
    memcpy(&its, slot, sizeof its);
    if (its.digest != g->digest || its.vectors != (uint64_t)g->vectors || its.channels != (uint64_t)g->channels ||
        its.replicas == 0 || its.replicas > capacity)
      return SBN_DIFFERS;
    if (member != g->me && (int64_t)its.came > latest) latest = its.came;
    const uint64_t *counts = (const uint64_t *)(slot + sizeof its);
    const double *rows = (const double *)(counts + its.replicas);
    for (uint64_t row = 0; row < its.replicas; row++, rows += size) {
      uint64_t count = counts[row];
      if (count > (uint64_t)(g->most_count - g->count)) return SBN_TOO_MANY;
      g->count += count;
      if (g->rows++ == 0)
        memcpy(total, rows, 8 * size);
      else
        for (int64_t k = 0; k < size; k++) total[k] += rows[k];
    }
  }
  if (!is_finite(total, size)) return SBN_NOT_FINITE;
  /* All arrived at this turn after this member's previous arrival; discard implausible times of other clocks. */
  const int64_t behind = g->came - latest;
  g->behind_ns = behind > 0 && g->came_before > 0 && behind <= g->came - g->came_before ? behind : 0;
  /* A member that escalated a later turn may have escalated this one too, while this member slept. */
  g->is_escalated = 0;
  for (int64_t member = 0; member < g->members; member++)
    if (value_of(&place_of(g, member)->escalated) >= g->turn) g->is_escalated = 1;
  g->done_ns = now_ns();
  return SBN_DONE;
}

int sbn_round(sbn_group *g, uint64_t digest, const uint64_t *counts, const double *values, int64_t replicas,
              int64_t vectors, int64_t channels, double *total, int64_t came_ns, int64_t wait_ns) {
  if (sbn_closed(g)) return SBN_CLOSED;
  g->turn++;
  g->digest = digest, g->vectors = vectors, g->channels = channels;
  g->came_before = g->came, g->came = came_ns;
  write_rows(g, counts, values, replicas);
  set(&place_of(g, g->me)->arrival, g->turn);
  if (have_all_arrived(g)) {
    wake_all(g);
    return add_up(g, total);
  }
  return sbn_wait(g, total, wait_ns);
}

int sbn_exchange(sbn_group *g, uint64_t digest, int64_t channels, double *rows, int64_t wait_ns) {
  double *total = rows + 2 * channels + 1;
  if (!g) {
    memcpy(total, rows, (2 * (size_t)channels + 1) * sizeof *rows);
    return is_finite(total, 2 * channels) ? SBN_DONE : SBN_NOT_FINITE;
  }
  const uint64_t count = (uint64_t)rows[2 * channels];
  const int found = sbn_round(g, digest, &count, rows, 1, 2, channels, total, now_ns(), wait_ns);
  total[2 * channels] = (double)g->count;
  return found;
}

int sbn_wait(sbn_group *g, double *total, int64_t wait_ns) {
  int found = wait_for_all(g, wait_ns);
  return found == SBN_DONE ? add_up(g, total) : found;
}

uint64_t sbn_late(const sbn_group *g) {
  uint64_t late = 0;
  for (int64_t member = 0; member < g->members; member++)
    if (value_of(&place_of(g, member)->arrival) < g->turn) late |= UINT64_C(1) << member;
  return late;
}

void sbn_escalate(sbn_group *g) { set(&place_of(g, g->me)->escalated, g->turn); }

void sbn_close(sbn_group *g, int reason) {
  _Atomic uint64_t *closed = &place_of(g, g->me)->closed;
  if (value_of(closed)) return;
  set(closed, reason);
  wake_all(g);
}

int sbn_closed(const sbn_group *g) {
  int gravest = 0;
  for (int64_t member = 0; member < g->members; member++) {
    uint64_t reason = value_of(&place_of(g, member)->closed);
    if (reason) gravest = gravest == SBN_ABANDONED || reason == SBN_ABANDONED ? SBN_ABANDONED : SBN_LEFT;
  }
  return gravest;
}

void sbn_rows(const sbn_group *g, uint64_t *replicas, uint64_t *counts, double *values) {
  const int64_t size = g->vectors * g->channels;
  for (int64_t member = 0, left = g->rows; member < g->members; member++) {
    const char *slot = slot_of(g, member);
    head its;
    memcpy(&its, slot, sizeof its);
    /* At most the rows that were added, even if the slot has changed since. */
    const uint64_t rows = its.replicas <= (uint64_t)left ? its.replicas : (uint64_t)left;
    replicas[member] = rows;
    memcpy(counts, slot + sizeof its, 8 * rows);
    memcpy(values, slot + sizeof its + 8 * rows, 8 * rows * size);
    counts += rows, values += rows * size, left -= rows;
  }
}
