/* From sums to statistics, and vectors of parameters: all that ranks must have to the bit. Compiled without contraction,
 * so that the bits are those of the same formulas in numpy and torch. */
#include "scalars.h"
#include <math.h>

/* Σ(x - mean)², never below 0; NaN stays. */
INLINE double centred_at(const double *total, int64_t c, int64_t i) {
  const double centred = total[c + i] - total[i] * total[i] / total[2 * c];
  return centred < 0 ? 0 : centred;
}

static void make_statistics(int64_t c, const double *restrict total, double eps, int clamp, double *restrict kept) {
  const double n = total[2 * c];
  double *restrict mean = kept, *restrict invstd = kept + c, *restrict slope = kept + 2 * c;
  for (int64_t i = 0; i < c; i++) {
    const double variance = centred_at(total, c, i) / n, at_least = variance < eps ? eps : variance;
    mean[i] = total[i] / n;
    invstd[i] = 1 / sqrt(clamp ? at_least : variance + eps);
    slope[i] = !clamp || variance >= eps;
  }
}

/* torch's lerp: one fused addition, from the nearer end; in float32 for all types but float64. */
static void move(void *running, int dtype, int64_t i, double newest, double share) {
  if (dtype == SBN_F64) {
    double *old = (double *)running + i;
    *old = fabs(share) < 0.5 ? fma(share, newest - *old, *old) : fma(share - 1, newest - *old, newest);
    return;
  }
  const float old = (float)read_at(running, dtype, i), to = (float)newest, by = (float)share;
  write_at(running, dtype, i, fabsf(by) < 0.5f ? fmaf(by, to - old, old) : fmaf(by - 1, to - old, to));
}

void sbn_finish(const sbn_plan *plan, const double *total, double *kept, void *running_mean, void *running_var,
                int64_t *tracked) {
  const int64_t c = plan->slice.c;
  const double n = total[2 * c];
  double share = plan->momentum;
  if (tracked) ++*tracked;
  if (n == 0) {
    memset(kept, 0, 3 * (size_t)c * sizeof *kept);
    return;
  }
  make_statistics(c, total, plan->eps, plan->clamp, kept);
  if (!running_mean || !running_var) return;
  if (share != share) share = !tracked ? 0 : 1 / (double)(*tracked > 1 ? *tracked : 1);
  for (int64_t i = 0; i < c; i++) {
    move(running_mean, plan->running_dtype, i, kept[i], share);
    move(running_var, plan->running_dtype, i, centred_at(total, c, i) / (n - 1), share);
  }
}

void sbn_param_grads(const sbn_plan *plan, const double *row, const double *kept, void *dweight, void *dbias) {
  const int64_t c = plan->slice.c;
  const double *invstd = kept + c;
  for (int64_t i = 0; i < c; i++) {
    if (dweight) write_at(dweight, plan->weight_dtype, i, row[c + i] * invstd[i]);
    if (dbias) write_at(dbias, plan->bias_dtype, i, row[i]);
  }
}
