/* Explores all orders in which the ranks of a group can take the steps of round.c: explore RANKS ROUNDS WHAT
 *
 * Each atomic access of round.c and each system call is a step. Ranks are coroutines; no state is explored twice.
 * Vector clocks find accesses to slots that no atomic access orders. With sequentially consistent atomic accesses this
 * covers all that C11 allows: a program without races has no other behaviour. Weaker stores wait in a buffer, so later
 * loads can overtake them; relaxed stores order nothing.
 *
 * WHAT is a sum. 1: rank 0 has another key in round 2. 2: the last rank closes the group instead of its last round. 4:
 * rank 0 escalates to the server when it has to wait. 8: one rank may be killed. */
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static uint64_t model_load(volatile void *word, int size, int order);
static uint64_t model_store(volatile void *word, int size, uint64_t value, int order, int is_sum);
static long model_futex(volatile void *word, int operation, uint32_t value);
static void model_copy(void *to, const void *from, size_t size);

#undef atomic_load_explicit
#undef atomic_store_explicit
#undef atomic_fetch_add_explicit
#define atomic_load_explicit(word, order) model_load(word, sizeof *(word), order)
#define atomic_store_explicit(word, value, order) model_store(word, sizeof *(word), value, order, 0)
#define atomic_fetch_add_explicit(word, more, order) model_store(word, sizeof *(word), more, order, 1)
#define syscall(number, word, operation, value, ...) model_futex(word, operation, value)
#define clock_gettime(clock, now) ((now)->tv_sec = (now)->tv_nsec = 0)
#define memcpy model_copy
#include ROUND_C
#undef memcpy

enum { RANKS = 3, STACK = 16384, MOST_DELAYED = 4, MOST_DEPTH = 1000, BYTES = LINE + RANKS * (LINE + 2 * SLOT) };
enum { OTHER_KEY = 1, CLOSES = 2, ESCALATES = 4, KILLS = 8 };
enum { READY, SLEEPING, ENDED, KILLED };
typedef uint8_t clocks[RANKS];
typedef struct {
  ucontext_t context;
  _Alignas(16) char stack[STACK];
  sbn_group group;
  /* `past`: a hash of what the rank has read and stored, as far as its variables still depend on it. */
  uint64_t past, turn;
  int stands, delayed;
  clocks seen;
  struct {
    volatile void *word;
    int size, order;
    uint64_t value;
  } buffer[MOST_DELAYED];
} rank;

/* Everything that a step changes. */
static struct {
  _Alignas(LINE) char memory[BYTES];
  clocks released[RANKS]; /* what each rank had seen at its latest arrival */
  struct {
    uint8_t written;
    clocks read;
  } slots[RANKS][2];
  rank ranks[RANKS];
  int killed;
  /* For each round: how many ranks found it done, whether one found it closed, and whether rank 0 escalated it. */
  uint8_t done[8], closed[8], escalated[8];
} all;

static int ranks, rounds, what, current, depth;
static ucontext_t scheduler;
static struct {
  int rank;
  const char *step;
} path[MOST_DEPTH];
static const char *step = "begin";

static void found(const char *complaint) {
  for (int n = 0; n < depth; n++) printf("  rank %d: %s\n", path[n].rank, path[n].step);
  printf("found: %s\n", complaint);
  exit(1);
}

static void yield(const char *next) {
  step = next;
  swapcontext(&all.ranks[current].context, &scheduler);
}

static uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
  return hash ^ hash >> 29;
}

static rank *me(void) { return &all.ranks[current]; }
static int place_in_memory(const volatile void *word) { return (int)((const volatile char *)word - all.memory); }
static int is_futex(const volatile void *word) { return place_in_memory(word) < LINE; }
static int owner_of(const volatile void *word) { return (place_in_memory(word) - LINE) / (LINE + 2 * SLOT); }
static place *place_at(int r) { return place_of(&all.ranks[0].group, r); }

/* Whether another rank may write this word, or (if this is a write) read it. Accesses to other words are no steps. */
static int is_shared(const volatile void *word, int is_write) {
  if (is_futex(word)) return 1;
  place *its = place_at(owner_of(word));
  if (word == &its->closed && !(what & CLOSES)) return 0;
  if (word == &its->escalated && !(what & ESCALATES)) return 0;
  return is_write || owner_of(word) != current;
}

static void join(uint8_t *into, const uint8_t *from) {
  for (int r = 0; r < ranks; r++)
    if (from[r] > into[r]) into[r] = from[r];
}

/* Only arrivals order the accesses to rows. */
static int is_arrival(const volatile void *word) {
  return !is_futex(word) && word == &place_at(owner_of(word))->arrival;
}

static void put(int r, volatile void *word, int size, uint64_t value, int order) {
  if (is_arrival(word)) {
    if (order == memory_order_relaxed)
      memset(all.released[owner_of(word)], 0, sizeof(clocks));
    else
      memcpy(all.released[owner_of(word)], all.ranks[r].seen, sizeof(clocks));
  }
  if (size == 4)
    *(volatile uint32_t *)word = (uint32_t)value;
  else
    *(volatile uint64_t *)word = value;
}

static void let_go(int r) {
  rank *its = &all.ranks[r];
  put(r, its->buffer[0].word, its->buffer[0].size, its->buffer[0].value, its->buffer[0].order);
  memmove(its->buffer, its->buffer + 1, sizeof its->buffer[0] * --its->delayed);
}

static void let_all_go(int r) {
  while (all.ranks[r].delayed) let_go(r);
}

static uint64_t model_load(volatile void *word, int size, int order) {
  if (is_shared(word, 0)) yield(is_futex(word) ? "load the futex" : "load");
  uint64_t value = size == 4 ? *(volatile uint32_t *)word : *(volatile uint64_t *)word;
  for (int n = 0; n < me()->delayed; n++)
    if (me()->buffer[n].word == word) value = me()->buffer[n].value;
  if (is_arrival(word) && order != memory_order_relaxed) join(me()->seen, all.released[owner_of(word)]);
  /* A wait that starts again forgets all before; for an arrival it only matters whether it has reached this turn. */
  const uint64_t relevant = is_arrival(word) ? value >= me()->group.turn : value;
  me()->past = mixed(mixed(is_futex(word) ? 1 : me()->past, (uint64_t)place_in_memory(word)), relevant);
  return value;
}

static uint64_t model_store(volatile void *word, int size, uint64_t value, int order, int is_sum) {
  if (is_shared(word, 1)) yield(is_sum ? "add" : "store");
  if (is_sum) {
    let_all_go(current);
    value += *(volatile uint32_t *)word;
    put(current, word, size, value, order);
  } else if (order == memory_order_seq_cst) {
    let_all_go(current);
    put(current, word, size, value, order);
  } else {
    if (me()->delayed == MOST_DELAYED) let_go(current);
    int n = me()->delayed++;
    me()->buffer[n].word = word, me()->buffer[n].size = size, me()->buffer[n].value = value;
    me()->buffer[n].order = order;
  }
  if (is_arrival(word) && order != memory_order_relaxed) me()->seen[current]++;
  me()->past = mixed(mixed(is_arrival(word) ? 2 : me()->past, (uint64_t)place_in_memory(word)), is_sum ? 0 : value);
  return value;
}

static long model_futex(volatile void *word, int operation, uint32_t value) {
  yield(operation == FUTEX_WAIT ? "sleep" : "wake");
  let_all_go(current);
  me()->past = mixed(me()->past, 3);
  if (operation == FUTEX_WAKE) {
    for (int r = 0; r < ranks; r++)
      if (all.ranks[r].stands == SLEEPING) all.ranks[r].stands = READY;
    return 0;
  }
  errno = EAGAIN;
  if (*(volatile uint32_t *)word != value) return -1;
  me()->stands = SLEEPING;
  yield("woken");
  return 0;
}

static void model_copy(void *to, const void *from, size_t size) {
  const int is_write = (char *)to >= all.memory && (char *)to < all.memory + BYTES;
  const int is_read = (const char *)from >= all.memory && (const char *)from < all.memory + BYTES;
  if (is_write || is_read) {
    int at = place_in_memory(is_write ? to : from) - LINE, its = at / (LINE + 2 * SLOT);
    int slot = (at % (LINE + 2 * SLOT) - LINE) / SLOT;
    if (all.slots[its][slot].written > me()->seen[its]) found("a race: rows are accessed while they are written");
    if (is_write) {
      for (int r = 0; r < ranks; r++)
        if (all.slots[its][slot].read[r] > me()->seen[r]) found("a race: rows are written while they are read");
      all.slots[its][slot].written = me()->seen[its];
    } else {
      all.slots[its][slot].read[current] = me()->seen[current];
      me()->past = mixed(4, (uint64_t)its); /* a rank that adds rows has seen all arrivals */
    }
  }
  memcpy(to, from, size);
}

static double value_in(int r, int turn) { return r + turn / 16.0; }

/* Whether a rank closes the group instead of this round. */
static int is_closing(int r, int turn) { return what & CLOSES && r == ranks - 1 && turn == rounds; }

static void check_done(sbn_group *g, const double *total, int turn) {
  double sum = 0;
  for (int r = 0; r < ranks; r++) sum += value_in(r, turn);
  if (total[0] != sum || g->rows != ranks || g->count != ranks * turn) found("a wrong sum");
  if (g->behind_ns != (current == ranks - 1 && turn > 1 ? 7 : 0)) found("a wrong time");
  if (all.escalated[turn] && !g->is_escalated) found("a rank does not know that the round was escalated");
  all.done[turn]++;
  if (all.closed[turn]) found("done for some, and closed for others");
}

static void live(void) {
  sbn_group *g = &me()->group;
  for (int turn = 1; turn <= rounds; turn++) {
    me()->turn = (uint64_t)turn;
    if (is_closing(current, turn)) {
      sbn_close(g, SBN_ABANDONED);
      break;
    }
    const int is_other = what & OTHER_KEY && turn == 2;
    const int escalates = what & ESCALATES && current == 0;
    const uint64_t count = (uint64_t)turn;
    double value = value_in(current, turn), total[1];
    int stands = sbn_round(g, 100 + turn + (is_other && current == 0), &count, &value, 1, 1, 1, total,
                           1000 * turn + 7 * current, escalates ? 0 : 1);
    if (escalates && stands == SBN_WAITS) {
      sbn_escalate(g);
      stands = sbn_wait(g, total, 0);
      if (stands == SBN_WAITS) {
        all.escalated[turn] = 1;
        stands = sbn_wait(g, total, 1);
      }
    }
    if (stands == SBN_DONE && is_other) found("another key was not noticed");
    if (stands == SBN_CLOSED) {
      all.closed[turn] = 1;
      if (!(what & CLOSES) || turn < rounds || all.done[turn]) found("closed, although no rank has closed");
      break;
    }
    if (stands != (is_other ? SBN_DIFFERS : SBN_DONE)) found("another end than expected");
    if (stands == SBN_DONE) check_done(g, total, turn);
  }
  me()->stands = ENDED;
  yield("end");
}

static uint64_t hash_of_all(void) {
  uint64_t hash = (uint64_t)all.killed;
  const uint64_t *futex = (const uint64_t *)all.memory;
  hash = mixed(hash, *futex);
  for (int r = 0; r < ranks; r++) {
    const rank *its = &all.ranks[r];
    const uint64_t *words = (const uint64_t *)place_at(r);
    for (int n = 0; n < 4; n++) hash = mixed(hash, words[n]);
    hash = mixed(mixed(mixed(hash, its->past), its->turn), (uint64_t)(its->stands * 8 + its->delayed));
    for (int n = 0; n < its->delayed; n++)
      hash = mixed(mixed(hash, (uint64_t)place_in_memory(its->buffer[n].word)), its->buffer[n].value);
    for (int other = 0; other < ranks; other++) hash = mixed(hash, its->seen[other]);
    for (int slot = 0; slot < 2; slot++) {
      hash = mixed(hash, all.slots[r][slot].written);
      for (int other = 0; other < ranks; other++) hash = mixed(hash, all.slots[r][slot].read[other]);
    }
    for (int other = 0; other < ranks; other++) hash = mixed(hash, all.released[r][other]);
  }
  for (int turn = 1; turn <= rounds; turn++) hash = mixed(hash, all.escalated[turn] + 2u * all.closed[turn]);
  return hash ? hash : 1;
}

static uint64_t *visited, room = 1 << 16, states;

static int is_new(uint64_t hash) {
  if (2 * states >= room) {
    uint64_t *before = visited, many = room;
    visited = calloc(room *= 2, sizeof *visited);
    states = 0;
    for (uint64_t n = 0; n < many; n++)
      if (before[n]) is_new(before[n]);
    free(before);
  }
  uint64_t at = hash & (room - 1);
  for (; visited[at]; at = (at + 1) & (room - 1))
    if (visited[at] == hash) return 0;
  visited[at] = hash;
  return (int)++states;
}

/* Tries all that can happen next: a rank takes a step, its oldest buffered store becomes visible, or it is killed. */
static void explore(void) {
  if (!is_new(hash_of_all())) return;
  if (depth == MOST_DEPTH - 1) found("it does not end");
  void *before = malloc(sizeof all);
  memcpy(before, &all, sizeof all);
  int ready = 0, sleeping = 0;
  for (int r = 0; r < ranks; r++) {
    const rank *its = &all.ranks[r];
    sleeping += its->stands == SLEEPING;
    for (int way = 0; way < 3; way++) {
      if (way == 0 && its->stands != READY) continue;
      if (way == 1 && !its->delayed) continue;
      if (way == 2 && (!(what & KILLS) || all.killed || its->stands >= ENDED)) continue;
      ready += way < 2;
      current = r;
      path[depth].rank = r;
      path[depth].step = way == 1 ? "a store is seen" : "killed";
      depth++;
      if (way == 0) {
        swapcontext(&scheduler, &all.ranks[r].context);
        path[depth - 1].step = step;
      } else if (way == 1)
        let_go(r);
      else
        all.killed = 1, all.ranks[r].stands = KILLED;
      explore();
      depth--;
      memcpy(&all, before, sizeof all);
    }
  }
  if (!ready && sleeping && !all.killed) found("a rank is never woken");
  free(before);
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  ranks = atoi(argv[1]), rounds = atoi(argv[2]), what = atoi(argv[3]);
  if (ranks < 2 || ranks > RANKS || rounds < 1 || rounds > 7) return 2;
  visited = calloc(room, sizeof *visited);
  for (current = 0; current < ranks; current++) {
    rank *its = me();
    its->group = (sbn_group){.memory = all.memory, .members = ranks, .me = current, .most_count = 1000};
    its->seen[current] = 1;
    getcontext(&its->context);
    its->context.uc_stack.ss_sp = its->stack;
    its->context.uc_stack.ss_size = STACK;
    makecontext(&its->context, live, 0);
    swapcontext(&scheduler, &its->context);
  }
  explore();
  printf("%llu states\n", (unsigned long long)states);
  return 0;
}
