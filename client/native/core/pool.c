/* A pool of threads that sleep until there is work. The caller never waits for a helper to wake up: it runs parts itself,
 * closes the work, and waits only for helpers that have started a part. */
#define _GNU_SOURCE
#include "internal.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

enum { MAX_HELPERS = 255, STACK = 1 << 18, SPINS = 1 << 12 };

static struct {
  pthread_mutex_t in_use; /* held by the caller that has the helpers */
  pthread_mutex_t lock;   /* of all fields below; next and active are also read without it */
  pthread_cond_t is_open, is_left;
  sbn_work work; /* NULL: closed */
  const void *job;
  int64_t parts;
  int places; /* for further helpers */
  int helpers, is_ending;
  _Atomic int64_t next;
  _Atomic int active;
  pthread_t threads[MAX_HELPERS];
} pool;

static void begin(void) {
  memset(&pool, 0, sizeof pool);
  pthread_mutex_init(&pool.in_use, NULL);
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.is_open, NULL);
  pthread_cond_init(&pool.is_left, NULL);
}

__attribute__((constructor)) static void load(void) {
  begin();
  pthread_atfork(NULL, NULL, begin); /* a child has no helpers */
}

__attribute__((destructor)) static void unload(void) {
  pthread_mutex_lock(&pool.lock);
  pool.is_ending = 1;
  pthread_cond_broadcast(&pool.is_open);
  pthread_mutex_unlock(&pool.lock);
  for (int i = 0; i < pool.helpers; i++) pthread_join(pool.threads[i], NULL);
}

static void run_parts(sbn_work work, const void *job, int64_t parts) {
  for (int64_t i; (i = atomic_fetch_add(&pool.next, 1)) < parts;) work(job, i);
}

static void *help(void *unused) {
  (void)unused;
  pthread_mutex_lock(&pool.lock);
  while (!pool.is_ending) {
    if (!pool.work || !pool.places) {
      pthread_cond_wait(&pool.is_open, &pool.lock);
      continue;
    }
    const sbn_work work = pool.work;
    const void *job = pool.job;
    const int64_t parts = pool.parts;
    pool.places--;
    atomic_fetch_add(&pool.active, 1);
    pthread_mutex_unlock(&pool.lock);
    run_parts(work, job, parts);
    pthread_mutex_lock(&pool.lock);
    if (atomic_fetch_sub(&pool.active, 1) == 1) pthread_cond_signal(&pool.is_left);
  }
  pthread_mutex_unlock(&pool.lock);
  return NULL;
}

/* Called with the lock. If the system refuses a thread, the work only takes longer. */
static void start_helpers(int wanted) {
  if (pool.helpers >= wanted || pool.is_ending) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the program's threads */
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, STACK);
  while (pool.helpers < wanted && !pthread_create(&pool.threads[pool.helpers], &small, help, NULL)) pool.helpers++;
  pthread_attr_destroy(&small);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void share(int helpers, int64_t parts, sbn_work work, const void *job) {
  pthread_mutex_lock(&pool.lock);
  start_helpers(helpers);
  pool.work = work, pool.job = job, pool.parts = parts, pool.places = helpers;
  atomic_store(&pool.next, 0);
  for (int i = 0; i < helpers; i++) pthread_cond_signal(&pool.is_open);
  pthread_mutex_unlock(&pool.lock);
  run_parts(work, job, parts);
  for (int i = 0; i < SPINS && atomic_load(&pool.active); i++) relax();
  pthread_mutex_lock(&pool.lock);
  pool.work = NULL;
  while (atomic_load(&pool.active)) pthread_cond_wait(&pool.is_left, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
}

void sbn_share(int threads, int64_t parts, sbn_work work, const void *job) {
  int64_t helpers = threads < parts ? threads - 1 : parts - 1;
  if (helpers > MAX_HELPERS) helpers = MAX_HELPERS;
  if (helpers < 1 || pthread_mutex_trylock(&pool.in_use)) {
    for (int64_t i = 0; i < parts; i++) work(job, i);
    return;
  }
  share((int)helpers, parts, work, job);
  pthread_mutex_unlock(&pool.in_use);
}
