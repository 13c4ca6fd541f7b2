// hiera-bench: the training step on random input, timed. Prints one line of JSON. Each full step is what a run does:
// draws, copy to the device, forward, backward, all-reduces, norm, clip, update, the loss read back as the trainer reads it
// (on a GPU a step later); wall clock between returns.
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "hierad/version.h"
#include "worker/bench/bench.h"
#include "worker/bench/ranks.h"

namespace hierad {
namespace {

int Main(int argc, char** argv) {
  BenchArguments arguments;
  bool sync = false;
  CLI::App app{"Times the training step on random input"};
  app.add_option("--config", arguments.config, "job.yaml instead of the options below");
  app.add_option("--variant", arguments.variant, "tiny|small|base|base_plus|large|huge");
  app.add_option("--task", arguments.task, "mae|classify");
  app.add_option("--input", arguments.input, "input_size, comma-separated")->delimiter(',');
  app.add_option("--chans", arguments.chans, "in_chans");
  app.add_option("--q-pool", arguments.q_pool, "q_pool (default: the task's)");
  app.add_option("--drop-path", arguments.drop_path, "drop_path_rate");
  app.add_option("--batch", arguments.batch, "samples per rank and micro-step");
  app.add_option("--rows", arguments.rows, "type of the stored samples; synthetic: drawn by the step")->check(CLI::IsMember({"u8", "i16", "f16", "f32", "synthetic"}));
  app.add_option("--accumulation", arguments.accumulation, "micro-steps per step");
  app.add_option("--mode", arguments.mode, "auto|eager|optimized|graph_safe|fused");
  app.add_option("--precision", arguments.precision, "fp32|bf16|fp16");
  app.add_option("--optimizer", arguments.optimizer, "adamw|muon");
  app.add_flag("--tf32", arguments.tf32, "TF32 products in fp32");
  app.add_flag("--tune", arguments.tune, "fused on a GPU: time the candidates of every product first");
  app.add_flag("--no-epilogues", arguments.no_epilogues, "fused on a GPU: GELU by kernels of its own");
  app.add_flag("--one-stream", arguments.one_stream, "fused on a GPU: weight gradients in the chain, not beside it");
  app.add_flag("--no-priorities", arguments.no_priorities, "fused on a GPU: weight gradients compete with the chain for the card");
  app.add_flag("--any-order", arguments.any_order, "eager, optimized, graph_safe on a GPU: PyTorch's faster kernels, whose sums have no fixed order");
  app.add_flag("--no-prefetch", arguments.no_prefetch, "do not copy the next step's batch behind this one");
  app.add_flag("--sync", sync, "wait for each step's loss before the next step is given: --read now");
  app.add_option("--read", arguments.read, "when losses are read, in turns, comma-separated: now|behind|rarely")->delimiter(',')->check(CLI::IsMember({"now", "behind", "rarely"}));
  app.add_option("--world", arguments.world, "ranks on this machine, one a GPU")->check(CLI::Range(1, 1024));
  app.add_option("--channels", arguments.channels, "NCCL: multiprocessors of an all-reduce at most (default: NCCL's choice)")->check(CLI::Range(0, 64));
  app.add_option("--bucket-mib", arguments.bucket_mib, "fused: MiB of gradients reduced at once (default: the plan's)")->check(CLI::Range(0, 4096));
  app.add_option("--reduce-dtype", arguments.reduce_dtype, "fused: fp32|bf16 of the all-reduces");
  app.add_flag("--shard", arguments.shard, "fused: each rank holds its share of the optimizer's state");
  app.add_option("--checkpoint-stages", arguments.checkpoint_stages, "fused: stages that backward computes again, comma-separated, the first is 1")->delimiter(',')->check(CLI::Range(1, 6));
  app.add_flag("--checkpoint-decoder", arguments.checkpoint_decoder, "fused: backward computes the decoder again");
  app.add_option("--sdpa", arguments.sdpa, "auto|math|flash|mem_efficient|cudnn");
  app.add_option("--device", arguments.device, "auto|cpu|cuda");
  app.add_option("--threads", arguments.threads, "compute threads on a CPU");
  app.add_option("--steps", arguments.steps, "timed steps")->check(CLI::Range(1, 1000000));
  app.add_option("--warmup", arguments.warmup, "steps before them")->check(CLI::Range(1, 1000000));
  app.add_option("--lr", arguments.lr, "learning rate");
  app.set_version_flag("--version", std::string(Version()) + " (" + std::string(Commit()) + ")");
  CLI11_PARSE(app, argc, argv);
  if (sync) arguments.read = {"now"};
  const bool several = arguments.world > 1;
  const bool cuda = !several && (arguments.device == "cuda" || (arguments.device == "auto" && CudaDeviceCount() > 0));
  const auto result = several ? BenchRanks(arguments) : Bench(arguments, cuda, nullptr);
  if (!result.ok()) {
    std::fprintf(stderr, "hiera-bench: %s\n", std::string(result.status().message()).c_str());
    return 1;
  }
  std::printf("%s\n", result->dump().c_str());
  return 0;
}

}  // namespace
}  // namespace hierad

int main(int argc, char** argv) { return hierad::Main(argc, argv); }
