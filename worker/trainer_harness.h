// For the trainer's tests: attempts of a small job, each rank a process of its own, with a step of a few numbers.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/job_yaml.h"
#include "base/sha256.h"
#include "base/status.h"
#include "worker/checkpoint/manifest.h"
#include "worker/fake_parts.h"
#include "worker/trainer.h"

namespace hierad {

// 41 samples, 2 ranks x 4: 6 steps an epoch, the last one short; 3 epochs.
inline constexpr char kJob[] = R"(
name: t
seed: 5
model: {variant: tiny, input_size: [64], in_chans: 2, embed_dim: 4, num_heads: 1, stages: [1, 1, 1], q_pool: 1, mask_unit_attn: [true, true, false],
        q_stride: [2], mask_unit_size: [4], patch_kernel: [4], patch_stride: [4], patch_padding: [0], decoder_embed_dim: 4, decoder_depth: 1, decoder_num_heads: 1}
data: {source: synthetic, synthetic_samples: 41}
optimizer: {lr: 0.05}
schedule: {epochs: 3}
step: {batch_per_rank: 4, max_nan_steps: 3}
resources: {device: cpu}
checkpoint: {every_steps: 4, keep_last: 2}
)";

class Trainers : public ::testing::Test {
 protected:
  struct Attempt {
    std::function<void(FakeSession*, int rank)> prepare = [](FakeSession*, int) {};
    FakeStep::Faults faults;
    bool fused = false;   // the planned step itself instead of a fake one
    std::function<void(TrainerOptions*)> change = [](TrainerOptions*) {};
    CheckpointFolder::StageHook stage;   // of rank 0's checkpoints
    // Sees the session at the end; what it returns follows the reason and message.
    std::function<std::string(const FakeSession&)> look = [](const FakeSession&) { return std::string(); };
  };

  void SetUp() override {
    spdlog::set_level(spdlog::level::off);
    folder_ = NewFolder();
  }
  void TearDown() override {
    for (const std::string& folder : folders_) EXPECT_TRUE(RemoveTree(folder).ok());
  }
  std::string NewFolder() {
    char name[] = "/tmp/trainer-test-XXXXXX";
    folders_.push_back(mkdtemp(name));
    return folders_.back();
  }

  v1::JobSpec Spec(int ranks) {
    auto spec = ParseJobYaml(kJob, {});
    EXPECT_TRUE(spec.ok()) << spec.status();
    FillDefaults(&*spec);
    spec->mutable_resources()->set_ranks(ranks);
    return *spec;
  }

  // Runs one attempt in `ranks` processes; each one's "REASON message look", or "killed".
  std::vector<std::string> Run(int ranks, const Attempt& attempt, const std::string& folder) {
    std::vector<int> blob_in(static_cast<size_t>(ranks)), outputs;
    std::vector<int> blob_out;
    for (int r = 1; r < ranks; ++r) {
      int fds[2];
      EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0);
      blob_in[size_t(r)] = fds[0];
      blob_out.push_back(fds[1]);
    }
    std::vector<pid_t> pids;
    for (int r = 0; r < ranks; ++r) {
      int out[2];
      EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
      const pid_t pid = fork();
      if (pid == 0) {
        FakeSession session;
        session.rendezvous_in = blob_in[size_t(r)];
        session.rendezvous_out = blob_out;
        attempt.prepare(&session, r);
        const std::string text = RunRank(ranks, r, attempt, folder, &session);
        _exit(WriteAll(out[1], text, "pipe").ok() ? 0 : 1);
      }
      close(out[1]);
      outputs.push_back(out[0]);
      pids.push_back(pid);
    }
    for (int fd : blob_out) close(fd);
    for (int r = 1; r < ranks; ++r) close(blob_in[size_t(r)]);
    std::vector<std::string> texts;
    for (size_t r = 0; r < pids.size(); ++r) {
      std::string text;
      char buffer[4096];
      ssize_t n;
      while ((n = read(outputs[r], buffer, sizeof buffer)) > 0) text.append(buffer, size_t(n));
      close(outputs[r]);
      int status = 0;
      waitpid(pids[r], &status, 0);
      texts.push_back(WIFSIGNALED(status) ? "killed" : text);
    }
    return texts;
  }

  std::string RunRank(int ranks, int rank, const Attempt& attempt, const std::string& folder, FakeSession* session) {
    TrainerOptions options;
    options.spec = Spec(ranks);
    options.run_folder = folder;
    options.rank = rank;
    options.world_size = ranks;
    attempt.change(&options);
    TrainerParts parts;
    parts.folder_timeout = std::chrono::milliseconds(200);
    parts.checkpoint_stage = attempt.stage;
    if (attempt.fused) {
      parts.make_step = [](const StepOptions& o, const Geometry&, const ParameterTable& t, Communicator* c) {
        StepOptions many = o;
        many.bucket_elements = 100;
        return MakeFusedCpuStep(many, t, c);
      };
    } else {
      parts.make_step = [&](const StepOptions& o, const Geometry& g, const ParameterTable& t, Communicator* c) {
        return absl::StatusOr<std::unique_ptr<Step>>(std::make_unique<FakeStep>(o, g, t, c, attempt.faults));
      };
    }
    Trainer trainer(options, parts, session);
    const TrainEnd end = trainer.Run();
    return v1::Reason_Name(end.reason) + " " + end.message + " " + attempt.look(*session);
  }

  // Until the checkpoint, which a thread writes, stands.
  static void AwaitCheckpoint(const std::string& folder, int64_t step) {
    const auto deadline = Clock::System().Monotonic() + std::chrono::seconds(60);
    while (!Exists(folder + "/checkpoints/" + CheckpointName(step)) && Clock::System().Monotonic() < deadline) SleepFor(std::chrono::milliseconds(1));
  }
  // The columns that do not depend on time.
  static std::string Lines(const std::string& folder) {
    std::ifstream in(folder + "/metrics.jsonl");
    std::string all, line;
    int64_t expected = 1;
    while (std::getline(in, line)) {
      v1::StepMetrics m;
      EXPECT_TRUE(ParseMetricsLine(line, &m)) << line;
      EXPECT_EQ(m.step(), expected++);
      m.clear_step_s();
      m.clear_data_wait_s();
      m.clear_time_ms();   // phases: FakeStep tells none
      all += MetricsLine(m) + "\n";
    }
    return all;
  }
  static std::string Weights(const std::string& folder) {
    const auto hash = Sha256OfFile(folder + "/exported/model.safetensors");
    EXPECT_TRUE(hash.ok()) << hash.status();
    return hash.ok() ? *hash : "";
  }
  static std::vector<std::string> Saved(const std::string& folder) {
    const auto names = ListFolder(folder + "/checkpoints");
    EXPECT_TRUE(names.ok()) << names.status();
    return names.ok() ? *names : std::vector<std::string>();
  }
  // Samples [count, 2, 64] that rise.
  static void WriteNpy(const std::string& path, int count) {
    std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(count) + ", 2, 64), }";
    header.resize(117, ' ');
    header += '\n';
    std::string file = std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header;
    for (int i = 0; i < count * 128; ++i) {
      const float value = float(i % 1000) * 1e-3f;
      file.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    EXPECT_TRUE(WriteFileAtomic(path, file).ok());
  }

  std::string folder_;
  std::vector<std::string> folders_;
};

// With results that are taken at once, one step and three steps behind.
class TrainersBehind : public Trainers, public ::testing::WithParamInterface<int> {};

}  // namespace hierad
