/* A pool of threads that sleep until there is work. The caller never waits for a helper to wake up: it runs parts
 * itself, closes the work, and waits only for helpers that have started a part. */
#define _GNU_SOURCE
#include "internal.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

enum { MAX_HELPERS = 255, STACK = 1 << 18, SPINS = 1 << 12 };

static struct {
  pthread_mutex_t in_use; /* held by the caller that has the helpers */
  pthread_mutex_t lock;   /* of all fields below; next and active are atomic and also used without it */
  pthread_cond_t is_open, is_left;
  sbn_work work; /* work, job and parts stay the same while a helper is active */
  const void *job;
  int64_t parts;
  int places; /* for further helpers; 0 while there is no work */
  int helpers;
  _Atomic int64_t next;
  _Atomic int active;
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

static void run_parts(void) {
  for (int64_t i; (i = atomic_fetch_add(&pool.next, 1)) < pool.parts;) pool.work(pool.job, i);
}

/* A helper ends with its process: ctypes never unloads a library. */
static void *help(void *unused) {
  pthread_mutex_lock(&pool.lock);
  while (1) {
    while (!pool.places) pthread_cond_wait(&pool.is_open, &pool.lock);
    pool.places--;
    pool.active++;
    pthread_mutex_unlock(&pool.lock);
    run_parts();
    pthread_mutex_lock(&pool.lock);
    if (!--pool.active) pthread_cond_signal(&pool.is_left);
  }
  return unused;
}

/* Called with the lock. If the system refuses a thread, the work only takes longer. */
static void start_helpers(int wanted) {
  if (pool.helpers >= wanted) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the program's threads */
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, STACK);
  pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
  for (pthread_t thread; pool.helpers < wanted && !pthread_create(&thread, &small, help, NULL);) pool.helpers++;
  pthread_attr_destroy(&small);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void sbn_share(int threads, int64_t parts, sbn_work work, const void *job) {
  int64_t helpers = threads < parts ? threads - 1 : parts - 1;
  if (helpers > MAX_HELPERS) helpers = MAX_HELPERS;
  if (helpers < 1 || pthread_mutex_trylock(&pool.in_use)) {
    for (int64_t i = 0; i < parts; i++) work(job, i);
    return;
  }
  pthread_mutex_lock(&pool.lock);
  start_helpers((int)helpers);
  pool.work = work, pool.job = job, pool.parts = parts, pool.places = (int)helpers;
  pool.next = 0;
  for (int64_t i = 0; i < helpers; i++) pthread_cond_signal(&pool.is_open);
  pthread_mutex_unlock(&pool.lock);
  run_parts();
  for (int i = 0; i < SPINS && pool.active; i++) relax();
  pthread_mutex_lock(&pool.lock);
  pool.places = 0;
  while (pool.active) pthread_cond_wait(&pool.is_left, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
  pthread_mutex_unlock(&pool.in_use);
}
