// Which attention kernel takes a shape: the tensor cores' where they fit (attention_forward.cu and the backward files), the
// plain one elsewhere. The choice among the first is by measurement (docs/performance.md, Attention).
#include "worker/kernels/attention.h"

#include "worker/kernels/attention_warpgroup.cuh"

namespace hierad::kernels {
namespace {

enum Path { kChosen = 0, kShort = 1, kWhole = 2, kStreamed = 3, kWarpgroups = 4, kWindow = 5, kShortWarpgroup = 6 };   // as AttentionShape::path

bool ByWarpgroups(const AttentionShape& s) {
  if (ThisCard().capability != 90 || s.q_stride != 1) return false;
  return s.path == kChosen ? s.head_dim > 80 && s.head_dim <= 96 && s.keys > 128 : s.path == kWarpgroups;
}

bool ByWindows(const AttentionShape& s) {   // backward
  if (ThisCard().capability != 90 || !attention::WarpgroupWindowFits(s)) return false;
  return s.path == kChosen ? s.head_dim > 16 && s.keys > 48 : s.path == kWindow;
}

bool ByShortWarpgroup(const AttentionShape& s) {
  if (ThisCard().capability != 90 || !attention::WarpgroupShortFits(s)) return false;
  return s.path == kChosen || s.path == kShortWarpgroup;
}

template <int DP>
Path BackwardPath(const AttentionShape& s) {
  if (ByShortWarpgroup(s)) return kShortWarpgroup;
  if (ByWindows(s)) return kWindow;
  if (ByWarpgroups(s)) return kWarpgroups;
  if ((s.path == kChosen ? DP > 48 || s.keys <= 64 : s.path == kShort) && attention::ShortBackwardFits<DP>(s)) return kShort;
  return (s.path == kChosen ? s.keys <= 256 : s.path == kWhole) && attention::WholeBackwardFits<DP>(s) ? kWhole : kStreamed;
}

template <int DP, typename T>
cudaError_t Backward(const AttentionShape& s, const attention::BackwardArgs<T>& args, cudaStream_t stream) {
  const Path path = BackwardPath<DP>(s);
  if (path == kShortWarpgroup) return attention::LaunchWarpgroupShortBackward(s, args, stream);
  if (path == kWindow) return attention::LaunchWarpgroupWindow(s, args, stream);
  if (path == kWarpgroups) return attention::LaunchWarpgroupBackward<attention::PanelColumns(DP)>(s, args, stream);
  return path == kShort ? attention::LaunchShortBackward<DP>(s, args, stream) : attention::LaunchTwoPassBackward<DP>(s, path == kWhole, args, stream);
}

template <int DP, typename T>
cudaError_t Forward(const AttentionShape& s, const attention::ForwardArgs<T>& args, cudaStream_t stream) {
  if (ByShortWarpgroup(s)) return attention::LaunchWarpgroupShortForward(s, args, stream);
  if (ByWarpgroups(s)) return attention::LaunchWarpgroupForward<attention::PanelColumns(DP)>(s, args, stream);
  return attention::LaunchForward<DP>(s, args, stream);
}

template <typename T>
cudaError_t TensorCoreForward(const AttentionShape& shape, const T* qkv, T* o, float* lse, uint8_t* argmax, cudaStream_t stream) {
  if (!HasTensorCoreAttention(shape)) return PlainAttentionForward(shape, qkv, o, lse, argmax, stream);
  const attention::ForwardArgs<T> args{qkv, o, lse, argmax};
  switch ((shape.head_dim + 15) / 16 * 16) {
#define HIERAD_CASE(DP) case DP: return Forward<DP>(shape, args, stream);
    HIERAD_EACH_HEAD_DIM(HIERAD_CASE)
#undef HIERAD_CASE
    default: return cudaErrorInvalidValue;
  }
}

template <typename T>
cudaError_t TensorCoreBackward(const AttentionShape& shape, const T* qkv, const T* o, const T* d_o, const float* lse, const uint8_t* argmax,
                               T* dqkv, float* scratch, cudaStream_t stream) {
  if (!HasTensorCoreAttention(shape)) return PlainAttentionBackward(shape, qkv, o, d_o, lse, argmax, dqkv, scratch, stream);
  const attention::BackwardArgs<T> args{qkv, o, d_o, lse, argmax, dqkv, scratch};
  switch ((shape.head_dim + 15) / 16 * 16) {
#define HIERAD_CASE(DP) case DP: return Backward<DP>(shape, args, stream);
    HIERAD_EACH_HEAD_DIM(HIERAD_CASE)
#undef HIERAD_CASE
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

bool HasTensorCoreAttention(const AttentionShape& s) { return s.head_dim % 8 == 0 && s.head_dim <= 128; }

cudaError_t AttentionForward(const AttentionShape& shape, const bf16* qkv, bf16* o, float* lse, uint8_t* argmax, cudaStream_t stream) {
  return TensorCoreForward(shape, qkv, o, lse, argmax, stream);
}
cudaError_t AttentionForward(const AttentionShape& shape, const half* qkv, half* o, float* lse, uint8_t* argmax, cudaStream_t stream) {
  return TensorCoreForward(shape, qkv, o, lse, argmax, stream);
}
cudaError_t AttentionBackward(const AttentionShape& shape, const bf16* qkv, const bf16* o, const bf16* d_o, const float* lse,
                              const uint8_t* argmax, bf16* dqkv, float* scratch, cudaStream_t stream) {
  return TensorCoreBackward(shape, qkv, o, d_o, lse, argmax, dqkv, scratch, stream);
}
cudaError_t AttentionBackward(const AttentionShape& shape, const half* qkv, const half* o, const half* d_o, const float* lse,
                              const uint8_t* argmax, half* dqkv, float* scratch, cudaStream_t stream) {
  return TensorCoreBackward(shape, qkv, o, d_o, lse, argmax, dqkv, scratch, stream);
}

}  // namespace hierad::kernels
