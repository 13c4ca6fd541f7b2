// Softmax attention inside windows, queries max-pooled, and its backward pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "worker/kernels/reference/types.h"

namespace hierad::reference {

// Tokens n = t * windows + w; a window holds `keys` of them and keys / q_stride queries.
struct AttentionShape {
  int64_t batch, windows, keys, q_stride, heads, head_dim;

  int64_t queries() const { return keys / q_stride; }
  int64_t dim() const { return heads * head_dim; }
  // Element of token t of window w in qkv[b, n, 3, heads, head_dim]; part 0 q, 1 k, 2 v.
  int64_t In(int64_t b, int64_t w, int64_t t, int part, int64_t h) const {
    return ((b * windows * keys + t * windows + w) * 3 + part) * dim() + h * head_dim;
  }
  // Element of query t of window w in o[b, n', heads, head_dim].
  int64_t Out(int64_t b, int64_t w, int64_t t, int64_t h) const {
    return (b * windows * queries() + t * windows + w) * dim() + h * head_dim;
  }
  int64_t Lse(int64_t b, int64_t w, int64_t t, int64_t h) const {
    return ((b * heads + h) * windows + w) * queries() + t;
  }
};

// argmax: place 0..q_stride-1 of the pooled query, as o; nullptr with q_stride 1. Ties: the first.
template <typename T, typename S>
void Attention(const AttentionShape& a, const T* qkv, T* o, S* lse, uint8_t* argmax) {
  const S scale = 1 / std::sqrt(S(a.head_dim));
  std::vector<S> q(a.head_dim), p(a.keys), sum(a.head_dim);
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t w = 0; w < a.windows; ++w) {
        for (int64_t t = 0; t < a.queries(); ++t) {
          for (int64_t e = 0; e < a.head_dim; ++e) {
            q[e] = S(qkv[a.In(b, w, t, 0, h) + e]);
            int64_t best = 0;
            for (int64_t s = 1; s < a.q_stride; ++s) {
              const S value = S(qkv[a.In(b, w, s * a.queries() + t, 0, h) + e]);
              if (Exceeds(value, q[e])) q[e] = value, best = s;
            }
            if (argmax != nullptr) argmax[a.Out(b, w, t, h) + e] = uint8_t(best);
          }
          S most = -std::numeric_limits<S>::infinity();
          for (int64_t key = 0; key < a.keys; ++key) {
            const T* k = qkv + a.In(b, w, key, 1, h);
            S dot = 0;
            for (int64_t e = 0; e < a.head_dim; ++e) dot += q[e] * S(k[e]);
            p[key] = dot * scale;
            most = Exceeds(p[key], most) ? p[key] : most;
          }
          S total = 0;
          for (int64_t key = 0; key < a.keys; ++key) total += p[key] = std::exp(p[key] - most);
          std::fill(sum.begin(), sum.end(), S(0));
          for (int64_t key = 0; key < a.keys; ++key) {
            const T* v = qkv + a.In(b, w, key, 2, h);
            for (int64_t e = 0; e < a.head_dim; ++e) sum[e] += p[key] * S(v[e]);
          }
          for (int64_t e = 0; e < a.head_dim; ++e) o[a.Out(b, w, t, h) + e] = T(sum[e] / total);
          lse[a.Lse(b, w, t, h)] = most + std::log(total);
        }
      }
    }
  }
}

// dqkv is written whole: a query's gradient goes to the token that the pooling chose, its other tokens get 0.
// delta: [b, heads, windows, queries], sum over head_dim of o * d_o.
template <typename T, typename S>
void AttentionBackward(const AttentionShape& a, const T* qkv, const T* o, const T* d_o, const S* lse,
                       const uint8_t* argmax, T* dqkv, S* delta) {
  const S scale = 1 / std::sqrt(S(a.head_dim));
  std::vector<S> q(a.head_dim), dq(a.head_dim), dk(a.keys * a.head_dim), dv(a.keys * a.head_dim);
  for (int64_t b = 0; b < a.batch; ++b) {
    for (int64_t h = 0; h < a.heads; ++h) {
      for (int64_t w = 0; w < a.windows; ++w) {
        std::fill(dk.begin(), dk.end(), S(0));
        std::fill(dv.begin(), dv.end(), S(0));
        for (int64_t t = 0; t < a.queries(); ++t) {
          const int64_t out = a.Out(b, w, t, h);
          auto token = [&](int64_t e) { return (argmax == nullptr ? 0 : argmax[out + e]) * a.queries() + t; };
          S d = 0;
          for (int64_t e = 0; e < a.head_dim; ++e) {
            q[e] = S(qkv[a.In(b, w, token(e), 0, h) + e]);
            d += S(o[out + e]) * S(d_o[out + e]);
            dq[e] = 0;
          }
          delta[a.Lse(b, w, t, h)] = d;
          for (int64_t key = 0; key < a.keys; ++key) {
            const T* k = qkv + a.In(b, w, key, 1, h);
            const T* v = qkv + a.In(b, w, key, 2, h);
            S dot = 0, dp = 0;
            for (int64_t e = 0; e < a.head_dim; ++e) dot += q[e] * S(k[e]), dp += S(d_o[out + e]) * S(v[e]);
            const S p = std::exp(dot * scale - lse[a.Lse(b, w, t, h)]), ds = p * (dp - d) * scale;
            for (int64_t e = 0; e < a.head_dim; ++e) {
              dq[e] += ds * S(k[e]);
              dk[key * a.head_dim + e] += ds * q[e];
              dv[key * a.head_dim + e] += p * S(d_o[out + e]);
            }
          }
          for (int64_t e = 0; e < a.head_dim; ++e) {
            for (int64_t s = 0; s < a.q_stride; ++s) {
              const int64_t at = s * a.queries() + t;
              dqkv[a.In(b, w, at, 0, h) + e] = T(at == token(e) ? dq[e] : S(0));
            }
          }
        }
        for (int64_t key = 0; key < a.keys; ++key) {
          for (int64_t e = 0; e < a.head_dim; ++e) {
            dqkv[a.In(b, w, key, 1, h) + e] = T(dk[key * a.head_dim + e]);
            dqkv[a.In(b, w, key, 2, h) + e] = T(dv[key * a.head_dim + e]);
          }
        }
      }
    }
  }
}

}  // namespace hierad::reference
