// Products whose epilogue is GELU or its backward, with CUTLASS for sm_90a: TMA and wgmma, one warpgroup's epilogue under the
// other's products (ping-pong) or both at one large tile (cooperative). Slow to compile: included by gemm_gelu*.cu only.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include "worker/kernels/gelu.cuh"
#include "worker/kernels/gemm_gelu.h"

namespace hierad::kernels {

using Narrow = cutlass::bfloat16_t;
namespace fusion = cutlass::epilogue::fusion;
inline constexpr auto kNearest = cutlass::FloatRoundStyle::round_to_nearest;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;

// x Phi(x), of one value or an array of them.
template <typename T>
struct GeluOf {
  CUTLASS_DEVICE T operator()(T x) const { return FastGelu(x); }
};
template <typename T, int N>
struct GeluOf<cutlass::Array<T, N>> {
  CUTLASS_DEVICE cutlass::Array<T, N> operator()(const cutlass::Array<T, N>& x) const {
    cutlass::Array<T, N> y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) y[i] = FastGelu(x[i]);
    return y;
  }
};

// Takes h, stores GELU of it through shared memory as Sm90AuxStore does, gives its derivative: both from one distribution.
template <int kStages, typename EpilogueTile, typename SmemLayoutAtom, typename CopyOp>
struct StoreGelu : fusion::Sm90AuxStore<kStages, EpilogueTile, Narrow, kNearest, cutlass::gemm::TagToStrideC_t<Row>, SmemLayoutAtom, CopyOp> {
  using Base = fusion::Sm90AuxStore<kStages, EpilogueTile, Narrow, kNearest, cutlass::gemm::TagToStrideC_t<Row>, SmemLayoutAtom, CopyOp>;
  using Base::Base;

  template <typename Callbacks>
  struct ConsumerStoreCallbacks : Callbacks {
    CUTLASS_DEVICE explicit ConsumerStoreCallbacks(Callbacks&& callbacks) : Callbacks(static_cast<Callbacks&&>(callbacks)) {}
    template <typename Accumulator, typename Input, int kSize>
    CUTLASS_DEVICE auto visit(const cutlass::Array<Accumulator, kSize>& accumulator, int epi_v, int epi_m, int epi_n,
                              const cutlass::Array<Input, kSize>& h) {
      cutlass::Array<float, kSize> g, derivative;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) {
        float value, slope;
        GeluBoth<Narrow>(float(h[i]), &value, &slope);
        g[i] = value, derivative[i] = slope;
      }
      Callbacks::visit(accumulator, epi_v, epi_m, epi_n, g);
      return derivative;
    }
  };

  template <bool kReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Args...>& args) {
    auto callbacks = Base::template get_consumer_store_callbacks<kReferenceSrc>(args);
    return ConsumerStoreCallbacks<decltype(callbacks)>(cute::move(callbacks));
  }
};

struct PingPong {
  using Kernel = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
struct Cooperative {
  using Kernel = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

// Tile m x n x k, cluster m x n x 1; the epilogue's tile within it.
template <typename Schedule, int kM, int kN, int kK, int kClusterM, int kClusterN, typename EpilogueTile = cutlass::epilogue::collective::EpilogueTileAuto>
struct GeluConfig {
  using Tile = cute::Shape<cute::Int<kM>, cute::Int<kN>, cute::Int<kK>>;
  using Cluster = cute::Shape<cute::Int<kClusterM>, cute::Int<kClusterN>, cute::_1>;
  using ScheduleType = Schedule;
  static constexpr int kTileM = kM, kTileN = kN;

  template <typename Source>   // void: no operand of D's shape is read
  using Epilogue = cutlass::epilogue::collective::detail::EpilogueDescriptor<Tile, EpilogueTile, Source, Narrow,
                                                                            typename Schedule::Epilogue>;
  template <typename Source>
  using Aux = cutlass::epilogue::collective::detail::AuxStoreDescriptor<Epilogue<Source>, Row, Narrow>;

  // gelu(store(acc + bias))
  using ForwardTree = fusion::Sm90EVT<
      fusion::Sm90Compute<GeluOf, Narrow, float, kNearest>,
      fusion::Sm90EVT<fusion::Sm90AuxStore<Aux<void>::Stages, typename Epilogue<void>::EpilogueTile, Narrow, kNearest, cutlass::gemm::TagToStrideC_t<Row>,
                                           typename Aux<void>::SmemLayoutAtom, typename Aux<void>::CopyOpR2S>,
                      fusion::Sm90EVT<fusion::Sm90Compute<cutlass::plus, Narrow, float, kNearest>, fusion::Sm90AccFetch,
                                      fusion::Sm90RowBroadcast<0, Tile, float, float>>>>;
  // sum over the tile's rows of (acc * (h -> store gelu, derivative))
  using BackwardTree = fusion::Sm90EVT<
      fusion::Sm90Compute<cutlass::epilogue::thread::Identity, Narrow, float, kNearest>,
      fusion::Sm90EVT<fusion::Sm90RowReduction<cutlass::plus, cutlass::plus, cutlass::plus, 0, Tile, float, float, kNearest, cute::Stride<cute::_0, cute::_1, cute::_0>, 4,
                                               /*EnableNullptr=*/false, /*FinalReduction=*/false>,
                      fusion::Sm90EVT<fusion::Sm90Compute<cutlass::multiplies, float, float, kNearest>, fusion::Sm90AccFetch,
                                      fusion::Sm90EVT<StoreGelu<Aux<Narrow>::Stages, typename Epilogue<Narrow>::EpilogueTile,
                                                                typename Aux<Narrow>::SmemLayoutAtom, typename Aux<Narrow>::CopyOpR2S>,
                                                      fusion::Sm90SrcFetch<Narrow>>>>>;

  // LayoutB: of b as [k, n].
  template <typename LayoutB, typename Source, typename Tree>
  struct Product {
    using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile, float, float, Source, Row, 8,
        Narrow, Row, 8, typename Schedule::Epilogue, Tree>::CollectiveOp;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Narrow, Row, 8, Narrow, LayoutB, 8, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename CollectiveEpilogue::SharedStorage))>, typename Schedule::Kernel>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, CollectiveEpilogue>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  };
  using Forward = Product<Column, void, ForwardTree>;
  using Backward = Product<Row, Narrow, BackwardTree>;
};

template <typename Product>
cudaError_t LaunchProduct(typename Product::Gemm::Arguments arguments, int sm_count, cudaStream_t stream) {
  arguments.hw_info.sm_count = sm_count;
  typename Product::Gemm gemm;
  if (Product::Gemm::can_implement(arguments) != cutlass::Status::kSuccess) return cudaErrorInvalidValue;
  if (gemm.initialize(arguments, nullptr, stream) != cutlass::Status::kSuccess) return cudaErrorInvalidValue;
  if (gemm.run(stream) != cutlass::Status::kSuccess) {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? cudaErrorLaunchFailure : error;
  }
  return cudaSuccess;
}

template <typename Config>
cudaError_t RunForward(const GemmGeluForward& p, int sm_count, cudaStream_t stream) {
  using Kernel = typename Config::Forward::Kernel;
  const int m = int(p.m), n = int(p.n), k = int(p.k);
  const auto stride_c = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
  typename Config::Forward::Gemm::Arguments a{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {m, n, k, 1},
      {static_cast<const Narrow*>(p.a), cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1}), static_cast<const Narrow*>(p.w),
       cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1})},
      {{{{{}, {p.bias}, {}}, {static_cast<Narrow*>(p.h), stride_c}}, {}}, nullptr, {}, static_cast<Narrow*>(p.g), stride_c}};
  return LaunchProduct<typename Config::Forward>(a, sm_count, stream);
}

template <typename Config>
cudaError_t RunBackward(const GemmGeluBackward& p, int sm_count, cudaStream_t stream) {
  using Kernel = typename Config::Backward::Kernel;
  const int m = int(p.m), n = int(p.n), k = int(p.k);
  const auto stride_c = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
  typename Config::Backward::Gemm::Arguments a{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {m, n, k, 1},
      {static_cast<const Narrow*>(p.dy), cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1}), static_cast<const Narrow*>(p.w),
       cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1})},
      {{{{{}, {{}, {static_cast<Narrow*>(p.g), stride_c}}, {}}, {p.parts}}, {}}, static_cast<const Narrow*>(p.h), stride_c, static_cast<Narrow*>(p.dh), stride_c}};
  return LaunchProduct<typename Config::Backward>(a, sm_count, stream);
}

}  // namespace hierad::kernels
